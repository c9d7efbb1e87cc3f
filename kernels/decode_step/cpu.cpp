// One whole forward step of a Llama-family model over a paged cache: any number of rows, decode, prefill and mixed.
//
// bf16 or integer weights and cache, float32 residual and sums, float32 logits. One parallel region a step; every thread owns a share of
// each matrix's panels, and barriers part the phases of a layer:
//   norm + qkv | rope + cache write | attention | out projection + residual | norm + gate/up | down projection + residual
// The residual stays float32 from the embedding to the last norm. With few rows each thread norms all of them for itself
// (no barrier, and the input stays in its own L1); with many the rows are shared out. With very many (a prefill) each thread takes
// strips of PM_STRIP rows through all phases but attention by itself, which leaves two barriers a layer and a strip in its own L2.
// The last layer ends with the rows whose logits are asked for.
// A row's result does not depend on the other rows, their number, the thread count or the chunking.
#include <initializer_list>

#include "../common/attention.hpp"
#include "../common/exports.hpp"

#ifndef PM_OWN_NORM_ROWS  // up to this many rows each thread norms all rows for itself
#define PM_OWN_NORM_ROWS 16
#endif
#ifndef PM_NEXT_PREFETCH  // bytes of the next phase's weights fetched before a barrier
#define PM_NEXT_PREFETCH 0
#endif
#ifndef PM_STRIP  // rows that a thread takes through a layer by itself once every thread has that many; 0: all rows go together
#define PM_STRIP 64
#endif

extern "C" {

struct LayerWeights {  // matrices in the layout of `pack_matrix`, or plain rows when `weight_layout()` is 0
  const bf16 *attention_norm, *mlp_norm;
  const Weight *q, *k, *v, *o, *gate, *up, *down;
  const bf16 *q_bias, *k_bias, *v_bias;  // null without biases
};

struct ModelWeights {
  int64_t layers, hidden, ffn, heads, kv_heads, head_dim, vocab, block_size, threads;
  double norm_eps, attention_scale;
  const LayerWeights* layer;  // [layers]
  const bf16 *embedding, *final_norm;  // embedding: plain rows [vocab, hidden]
  const Weight* head;
  const float *cos, *sin;  // [positions, head_dim / 2]
};

struct StepInput {  // fields as in the engine's batch
  int64_t rows, sequences, table_width, logits, block_stride;
  const int64_t *token_ids, *positions, *slot, *logit_rows;
  const int32_t *query_start, *context_len, *block_table;
  Kv *const *keys, *const *values;                // [layers], block 0 of each layer; block b lies block_stride elements on
  bf16 *const *key_scales, *const *value_scales;  // [layers], of an integer cache; else null
  float* out;                                     // [logits, vocab]
  void* scratch;                                  // scratch_bytes() bytes
};

}  // extern "C"

namespace {

struct Buffers {
  float *residual, *qkv;
  bf16 *normed, *q, *attended, *inner;
  Input* encoded;  // inputs of a product as its weights' format wants them; unused with bf16 weights
  Attention attention;
  std::atomic<int>* next_unit;  // [layers]
  int64_t residual_stride, x_stride, qkv_stride, attended_stride, inner_stride, k_column, v_column, encoded_rows, bytes;
};

int64_t most_input(const ModelWeights& m) {  // widest encoded row
  int64_t most = 0;
  for (const int64_t k : {m.hidden, m.heads * m.head_dim, m.ffn}) most = input_stride(k) > most ? input_stride(k) : most;
  return most;
}

Buffers lay_out(const ModelWeights& m, const StepInput& s) {
  Buffers b = {};
  Bump bump(s.scratch);
  const int64_t threads = m.threads, attention_width = m.heads * m.head_dim, kv_width = m.kv_heads * m.head_dim;
  b.residual_stride = padded_n(m.hidden);
  b.x_stride = padded_k(m.hidden);
  b.k_column = padded_n(attention_width);
  b.v_column = b.k_column + padded_n(kv_width);
  b.qkv_stride = b.v_column + padded_n(kv_width);
  b.attended_stride = padded_k(attention_width);
  b.inner_stride = padded_k(padded_n(m.ffn));
  b.residual = bump.take<float>((s.rows + s.logits) * b.residual_stride);  // after all rows, those whose logits are asked for
  b.qkv = bump.take<float>(s.rows * b.qkv_stride);
  b.encoded_rows = s.rows > s.logits ? s.rows : s.logits;
  const int64_t copies = s.rows <= PM_OWN_NORM_ROWS || s.logits <= PM_OWN_NORM_ROWS ? threads : 1;
  b.normed = bump.take<bf16>(copies * b.encoded_rows * b.x_stride);
  if (PM_ENCODED) b.encoded = bump.take<Input>(copies * b.encoded_rows * most_input(m));
  b.q = bump.take<bf16>(s.rows * attention_width);
  b.attended = bump.take<bf16>((s.rows + s.logits) * b.attended_stride);
  b.inner = bump.take<bf16>(b.encoded_rows * b.inner_stride);
  b.next_unit = bump.take<std::atomic<int>>(m.layers);
  Attention& a = b.attention;
  a.cache = {nullptr, nullptr, s.block_stride, int(m.block_size), int(m.kv_heads), int(m.head_dim), nullptr, nullptr};
  a.sequences = int(s.sequences), a.group = int(m.heads / m.kv_heads);
  a.rows = s.rows, a.table_width = s.table_width, a.out_stride = b.attended_stride;
  a.query_start = s.query_start, a.context_len = s.context_len, a.block_table = s.block_table;
  a.q = b.q, a.out = b.attended, a.scale = float(m.attention_scale);
  a.unit_start = bump.take<int64_t>(s.sequences + 1);
  a.done = bump.take<std::atomic<int>>(s.sequences * m.kv_heads);
  a.partials = bump.take<float>(most_units(a) * a.partial_floats());
  b.bytes = bump.used();
  return b;
}

class Step {  // one thread's view of a running step
 public:
  Step(const ModelWeights& m, const StepInput& s, Buffers& b, Barrier& barrier, int id, int threads)
      : m_(m), s_(s), b_(b), barrier_(barrier), id_(id), threads_(threads), live_{0, s.rows, b.residual, b.attended} {}

  void run() {
    embed();
    wait();
    for (int64_t l = 0; l < m_.layers; l++) layer(l);
    wait();
    logits();
  }

 private:
  struct Rows {  // those in work: all, a strip of them, or in the last layer the ones whose logits are asked for
    int64_t first, count;
    float* residual;
    bf16* attended;
  };

  void wait() { barrier_.wait(threads_); }
  void meet() {  // a barrier unless this thread works on a strip
    if (!alone_) wait();
  }
  Range mine(int64_t count) const { return alone_ ? Range{0, count} : share(count, id_, threads_); }
  Range mine(const Matrix& w) const { return alone_ ? Range{0, w.panels()} : share_panels(w.panels(), id_, threads_); }
  bool own(int64_t rows) const { return alone_ || threads_ == 1 || rows <= PM_OWN_NORM_ROWS; }
  int64_t strip_row() const { return alone_ ? int64_t(id_) * PM_STRIP : 0; }  // where the rows in work lie in the buffers between phases

  // Calls work() for the live rows: together with the other threads, or for each strip of this thread's share. A row is always in
  // the same thread's share, so that strips need no barrier between a layer and the next.
  template <class Work>
  void over_rows(Work&& work) {
    const Rows all = live_;
    if (!PM_STRIP || all.count < int64_t(threads_) * PM_STRIP) return work();
    const Range r = mine(all.count);
    alone_ = true;
    const int64_t rows = r.end - r.begin, strips = (rows + PM_STRIP - 1) / (PM_STRIP ? PM_STRIP : 1);
    for (int64_t i = 0; i < strips; i++) {
      const int64_t first = r.begin + rows * i / strips, end = r.begin + rows * (i + 1) / strips;
      live_ = {all.first + first, end - first, all.residual + first * b_.residual_stride, all.attended + first * b_.attended_stride};
      work();
    }
    live_ = all, alone_ = false;
  }

  void embed() {
    const Range r = mine(s_.rows);
    for (int64_t row = r.begin; row < r.end; row++) {
      const bf16* from = m_.embedding + s_.token_ids[row] * m_.hidden;
      float* to = b_.residual + row * b_.residual_stride;
      for (int64_t i = 0; i < m_.hidden; i++) to[i] = to_float(from[i]);
      for (int64_t i = m_.hidden; i < b_.residual_stride; i++) to[i] = 0.f;
    }
  }

  void norm_row(const float* x, const bf16* weight, bf16* out) const {
    const int64_t n = m_.hidden, whole = n / LANES * LANES;
    V squares = vzero();
    for (int64_t i = 0; i < whole; i += LANES) squares = vfma(vload(x + i), vload(x + i), squares);
    float sum = vsum(squares);
    for (int64_t i = whole; i < n; i++) sum += x[i] * x[i];
    const float inverse = 1.f / std::sqrt(sum / float(n) + float(m_.norm_eps));
    for (int64_t i = 0; i < whole; i += LANES) vstore_bf16(out + i, vmul(vmul(vload(x + i), vset(inverse)), vload_bf16(weight + i)));
    for (int64_t i = whole; i < n; i++) out[i] = to_bf16(x[i] * inverse * to_float(weight[i]));
    for (int64_t i = n; i < b_.x_stride; i++) out[i] = 0;
  }

  // Where inputs of `rows` rows lie: rows that each thread makes for itself lie apart.
  int64_t private_row(int64_t rows) const { return alone_ ? strip_row() : own(rows) ? id_ * b_.encoded_rows : 0; }

  // A product's inputs: `make(row)` gives row `row` as bf16, of which this thread may read all afterwards. With few rows each
  // thread makes and encodes all of them for itself, which spares a barrier; with many they are shared out.
  template <class Make>
  const Input* inputs(int64_t rows, int64_t k, Make&& make, const bf16* plain) {
    const Range r = own(rows) ? Range{0, rows} : mine(rows);
#if !PM_ENCODED
    for (int64_t row = r.begin; row < r.end; row++) make(row);
    if (!own(rows)) wait();
    (void)k;
    return plain;
#else
    Input* to = b_.encoded + private_row(rows) * most_input(m_);
    for (int64_t row = r.begin; row < r.end; row++) encode(make(row), k, to + row * input_stride(k));
    if (!own(rows)) wait();
    (void)plain;
    return to;
#endif
  }

  const Input* normed(const Rows& rows, const bf16* weight) {
    bf16* to = b_.normed + private_row(rows.count) * b_.x_stride;
    const auto make = [&](int64_t row) {
      norm_row(rows.residual + row * b_.residual_stride, weight, to + row * b_.x_stride);
      return to + row * b_.x_stride;
    };
    return inputs(rows.count, m_.hidden, make, to);
  }

  // Rows that all threads have written before a barrier.
  const Input* ready(const bf16* rows, int64_t stride, int64_t count, int64_t k) {
#if !PM_ENCODED
    (void)stride, (void)count, (void)k;
    return rows;
#else
    return inputs(count, k, [&](int64_t row) { return rows + row * stride; }, rows);
#endif
  }
  int64_t stride(int64_t plain, int64_t k) const { return PM_ENCODED ? input_stride(k) : plain; }

  void fetch_ahead(const Matrix& w) const {
    if (!PM_NEXT_PREFETCH) return;
    const char* p = (const char*)(w.data + mine(w).begin * panel_elements(w.k));
    for (int64_t at = 0; at < PM_NEXT_PREFETCH; at += 64) prefetch(p + at);
  }

  void project(const Input* x, const LayerWeights& w) {
    const Matrix parts[3] = {{w.q, m_.heads * m_.head_dim, m_.hidden}, {w.k, m_.kv_heads * m_.head_dim, m_.hidden}, {w.v, m_.kv_heads * m_.head_dim, m_.hidden}};
    const int64_t columns[3] = {0, b_.k_column, b_.v_column};
    const Range all = mine(parts[0].panels() + parts[1].panels() + parts[2].panels());  // one stretch over the three
    int64_t first = 0;
    for (int i = 0; i < 3; i++) {
      const int64_t count = parts[i].panels(), begin = all.begin - first, end = all.end - first;
      const Range stretch = {begin > 0 ? begin : 0, end < count ? end : count};
      float* to = b_.qkv + strip_row() * b_.qkv_stride + columns[i];
      matmul(x, stride(b_.x_stride, m_.hidden), live_.count, parts[i], PM_DEAL ? mine(parts[i]) : stretch,
             [&](int64_t row, int64_t c, V y) { vstore(to + row * b_.qkv_stride + c, y); });
      first += count;
    }
  }

  // x (one head, float32, in place): bias, then rotary embedding of the pairs (d, d + head_dim / 2).
  void rotate(float* x, const bf16* bias, int64_t position) const {
    const int64_t half = m_.head_dim / 2;
    const float *cos = m_.cos + position * half, *sin = m_.sin + position * half;
    add_bias(x, bias);
    const int64_t whole = half / LANES * LANES;
    for (int64_t d = 0; d < whole; d += LANES) {
      const V a = vload(x + d), b = vload(x + d + half), c = vload(cos + d), s = vload(sin + d);
      vstore(x + d, vsub(vmul(a, c), vmul(b, s)));
      vstore(x + d + half, vadd(vmul(b, c), vmul(a, s)));
    }
    for (int64_t d = whole; d < half; d++) {
      const float a = x[d], c = x[d + half];
      x[d] = a * cos[d] - c * sin[d];
      x[d + half] = c * cos[d] + a * sin[d];
    }
  }

  void add_bias(float* x, const bf16* bias) const {
    for (int64_t d = 0; bias && d < m_.head_dim; d++) x[d] += to_float(bias[d]);
  }

  // One live row and one head: the first `kv_heads` units write the cache, the others make queries.
  void rotate_unit(const LayerWeights& w, const Cache& cache, int64_t live_row, int64_t unit) {
    const int64_t row = live_.first + live_row, hd = m_.head_dim, group = b_.attention.group, at = s_.positions[row];
    float* qkv = b_.qkv + (strip_row() + live_row) * b_.qkv_stride;
    if (unit < m_.kv_heads) {
      float *key = qkv + b_.k_column + unit * hd, *value = qkv + b_.v_column + unit * hd;
      rotate(key, w.k_bias ? w.k_bias + unit * hd : nullptr, at);
      add_bias(value, w.v_bias ? w.v_bias + unit * hd : nullptr);
      return write_cache(cache, s_.slot[row], int(unit), key, value);
    }
    const int64_t h = unit - m_.kv_heads, kv = h / group;
    rotate(qkv + h * hd, w.q_bias ? w.q_bias + h * hd : nullptr, at);
    bf16* to = b_.q + ((kv * s_.rows + row) * group + h % group) * hd;
    for (int64_t d = 0; d < hd; d += LANES) vstore_bf16(to + d, vload(qkv + h * hd + d));
  }

  void attend(int64_t l) {
    Attention a = b_.attention;
    a.cache = cache_of(l);
    for (int64_t u = b_.next_unit[l].fetch_add(1, std::memory_order_relaxed); u < a.units(); u = b_.next_unit[l].fetch_add(1, std::memory_order_relaxed)) a.run(u);
  }

  void add_to_residual(const Rows& rows, const Input* x, int64_t ldx, const Matrix& w) {
    matmul(x, ldx, rows.count, w, mine(w), [&](int64_t row, int64_t c, V y) {
      float* to = rows.residual + row * b_.residual_stride + c;
      vstore(to, vadd(vload(to), y));
    });
  }

  // Once the last layer's keys and values are written, only the rows whose logits are asked for matter: they are put together.
  void keep_asked() {
    const Rows asked = {0, s_.logits, b_.residual + s_.rows * b_.residual_stride, b_.attended + s_.rows * b_.attended_stride};
    const Range r = mine(s_.logits);
    for (int64_t i = r.begin; i < r.end; i++) {
      std::memcpy(asked.residual + i * b_.residual_stride, b_.residual + s_.logit_rows[i] * b_.residual_stride, sizeof(float) * size_t(b_.residual_stride));
      std::memcpy(asked.attended + i * b_.attended_stride, b_.attended + s_.logit_rows[i] * b_.attended_stride, sizeof(bf16) * size_t(b_.attended_stride));
    }
    live_ = asked;
    wait();
  }

  Cache cache_of(int64_t l) const {
    Cache c = b_.attention.cache;
    c.keys = s_.keys[l], c.values = s_.values[l];
    if (PM_KV_BITS == 8) c.key_scales = s_.key_scales[l], c.value_scales = s_.value_scales[l];
    return c;
  }

  void before_attention(int64_t l) {
    const LayerWeights& w = m_.layer[l];
    project(normed(live_, w.attention_norm), w);
    meet();
    const Cache cache = cache_of(l);
    const int64_t each = m_.heads + m_.kv_heads;
    const Range units = mine(live_.count * each);
    for (int64_t u = units.begin; u < units.end; u++) rotate_unit(w, cache, u / each, u % each);
  }

  void after_attention(int64_t l) {
    const LayerWeights& w = m_.layer[l];
    const int64_t width = m_.heads * m_.head_dim;
    const Matrix o = {w.o, m_.hidden, width}, gate = {w.gate, m_.ffn, m_.hidden}, up = {w.up, m_.ffn, m_.hidden};
    const Matrix down = {w.down, m_.hidden, m_.ffn};
    add_to_residual(live_, ready(live_.attended, b_.attended_stride, live_.count, width), stride(b_.attended_stride, width), o);
    fetch_ahead(gate);
    meet();
    const Input* x = normed(live_, w.mlp_norm);
    bf16* inner = b_.inner + strip_row() * b_.inner_stride;
    matmul_pair(x, stride(b_.x_stride, m_.hidden), live_.count, gate, up, mine(gate),
                [&](int64_t row, int64_t c, V g, V u) { vstore_bf16(inner + row * b_.inner_stride + c, vmul(vsilu(g), u)); });
    fetch_ahead(down);
    meet();
    add_to_residual(live_, ready(inner, b_.inner_stride, live_.count, m_.ffn), stride(b_.inner_stride, m_.ffn), down);
    meet();
  }

  void layer(int64_t l) {
    over_rows([&] { before_attention(l); });
    wait();
    attend(l);
    fetch_ahead({m_.layer[l].o, m_.hidden, m_.heads * m_.head_dim});
    wait();
    if (l + 1 == m_.layers) keep_asked();
    over_rows([&] { after_attention(l); });
  }

  void logits() {
    const Matrix head = {m_.head, m_.vocab, m_.hidden};
    const Input* x = normed(live_, m_.final_norm);
    matmul(x, stride(b_.x_stride, m_.hidden), s_.logits, head, mine(head), [&](int64_t row, int64_t c, V y) {
      if (c < m_.vocab) vstore_first(s_.out + row * m_.vocab + c, y, int(m_.vocab - c < LANES ? m_.vocab - c : LANES));
    });
  }

  const ModelWeights& m_;
  const StepInput& s_;
  Buffers& b_;
  Barrier& barrier_;
  const int id_, threads_;
  Rows live_;
  bool alone_ = false;  // whether the live rows are a strip of this thread's
};

}  // namespace

extern "C" {

int64_t kv_bits() { return PM_KV_BITS; }

// Null when the kernel can run the model, else what it cannot do.
const char* unsupported(const ModelWeights* m) {
  if (m->head_dim % 16 || m->head_dim > MAX_HEAD_DIM) return "head_dim must be a multiple of 16, at most 256";
  if (m->block_size % 16 || PM_SPAN % m->block_size) return "the cache's block size must be a multiple of 16 that divides the span of keys";
  if (m->heads % m->kv_heads) return "the number of heads must be a multiple of the number of key/value heads";
  if (m->threads < 1) return "at least one thread is needed";
  return nullptr;
}

int64_t scratch_bytes(const ModelWeights* m, const StepInput* s) {
  StepInput counted = *s;
  counted.scratch = nullptr;
  return lay_out(*m, counted).bytes;
}

void forward_step(const ModelWeights* m, const StepInput* s) {
  Buffers b = lay_out(*m, *s);
  for (int64_t l = 0; l < m->layers; l++) b.next_unit[l].store(0, std::memory_order_relaxed);
  for (int64_t i = 0; i < s->sequences * m->kv_heads; i++) b.attention.done[i].store(0, std::memory_order_relaxed);
  b.attention.plan();
  const int64_t width = m->heads * m->head_dim, inner = padded_n(m->ffn);
  for (int64_t r = 0; r < b.encoded_rows; r++) {  // padding that is multiplied by zero weights must be finite
    std::memset(b.attended + r * b.attended_stride + width, 0, sizeof(bf16) * size_t(b.attended_stride - width));
    std::memset(b.inner + r * b.inner_stride + inner, 0, sizeof(bf16) * size_t(b.inner_stride - inner));
  }
  Barrier barrier;
  parallel(int(m->threads), [&](int id, int threads) { Step(*m, *s, b, barrier, id, threads).run(); });
}

}  // extern "C"
