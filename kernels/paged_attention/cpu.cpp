// Grouped-query attention over the packed paged cache, with the cache write: decode, prefill and mixed steps of one layer.
#include "../common/attention.hpp"
#include "../common/exports.hpp"

extern "C" {

struct AttentionInput {
  int64_t rows, sequences, table_width, heads, kv_heads, head_dim, block_size, block_stride, threads;
  double scale;
  const bf16 *q, *k, *v;  // rotated: [rows, heads, head_dim], [rows, kv_heads, head_dim] twice; k null: nothing to write
  const int64_t* slot;
  const int32_t *query_start, *context_len, *block_table;
  Kv *keys, *values;                // one layer's cache, block b at b * block_stride elements
  bf16 *key_scales, *value_scales;  // of an integer cache, block b at b * block_stride / head_dim; else null
  bf16* out;                        // [rows, heads, head_dim]
  void* scratch;                    // attention_scratch_bytes() bytes
};

}  // extern "C"

namespace {

struct Plan {
  Attention attention;
  bf16* q;
  std::atomic<int>* next;
  int64_t bytes;
};

Plan make_plan(const AttentionInput& in) {
  Plan p = {};
  Bump bump(in.scratch);
  Attention& a = p.attention;
  a.cache = {in.keys, in.values, in.block_stride, int(in.block_size), int(in.kv_heads), int(in.head_dim), in.key_scales, in.value_scales};
  a.sequences = int(in.sequences), a.group = int(in.heads / in.kv_heads);
  a.rows = in.rows, a.table_width = in.table_width, a.out_stride = in.heads * in.head_dim;
  a.query_start = in.query_start, a.context_len = in.context_len, a.block_table = in.block_table;
  a.out = in.out, a.scale = float(in.scale);
  a.q = p.q = bump.take<bf16>(in.rows * in.heads * in.head_dim);
  p.next = bump.take<std::atomic<int>>(1);
  a.unit_start = bump.take<int64_t>(in.sequences + 1);
  a.done = bump.take<std::atomic<int>>(in.sequences * in.kv_heads);
  a.partials = bump.take<float>(most_units(a) * a.partial_floats());
  p.bytes = bump.used();
  return p;
}

// One row: its key and value into the cache, its queries into [kv_heads][rows][group][head_dim].
void place_row(const AttentionInput& in, const Plan& p, int64_t row) {
  const int64_t hd = in.head_dim, width = p.attention.group * hd;
  for (int64_t h = 0; h < in.kv_heads; h++) {
    std::memcpy(p.q + (h * in.rows + row) * width, in.q + (row * in.kv_heads + h) * width, sizeof(bf16) * size_t(width));
    if (!in.k) continue;
    float key[MAX_HEAD_DIM], value[MAX_HEAD_DIM];
    const int64_t from = (row * in.kv_heads + h) * hd;
    for (int64_t d = 0; d < hd; d++) key[d] = to_float(in.k[from + d]), value[d] = to_float(in.v[from + d]);
    write_cache(p.attention.cache, in.slot[row], int(h), key, value);
  }
}

}  // namespace

extern "C" {

int64_t kv_bits() { return PM_KV_BITS; }

const char* attention_unsupported(const AttentionInput* in) {
  if (in->head_dim % 16 || in->head_dim > MAX_HEAD_DIM) return "head_dim must be a multiple of 16, at most 256";
  if (in->block_size % 16 || PM_SPAN % in->block_size) return "the cache's block size must be a multiple of 16 that divides the span of keys";
  if (in->heads % in->kv_heads) return "the number of heads must be a multiple of the number of key/value heads";
  return nullptr;
}

int64_t attention_scratch_bytes(const AttentionInput* in) {
  AttentionInput counted = *in;
  counted.scratch = nullptr;
  return make_plan(counted).bytes;
}

void paged_attention(const AttentionInput* in) {
  Plan p = make_plan(*in);
  for (int64_t i = 0; i < in->sequences * in->kv_heads; i++) p.attention.done[i].store(0, std::memory_order_relaxed);
  p.next->store(0, std::memory_order_relaxed);
  p.attention.plan();
  Barrier barrier;
  parallel(int(in->threads), [&](int id, int threads) {
    const Range rows = share(in->rows, id, threads);
    for (int64_t r = rows.begin; r < rows.end; r++) place_row(*in, p, r);
    barrier.wait(threads);
    for (int u = p.next->fetch_add(1); u < p.attention.units(); u = p.next->fetch_add(1)) p.attention.run(u);
  });
}

}  // extern "C"
