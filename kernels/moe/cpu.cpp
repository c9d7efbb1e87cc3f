// A mixture of experts for all rows of a step in one parallel region: routing, then products grouped by expert, then each row's
// weighted sum. bf16 weights and rows, float32 sums.
//   route | sort by expert and gather | gate/up products | down product | sum of a row's experts
// Who computes what (PM_SPLIT) decides how a step suffers from experts that are chosen more often than others:
//   0 every thread works at every expert, each on panels of its own; 1 a thread has whole experts, dealt out by their rows, and
//   goes from one product to the next without waiting; 2 threads take the next panel of any expert until none is left.
// A row's result depends neither on the other rows nor on the number of threads.
#include <algorithm>
#include <atomic>

#include "../common/bump.hpp"
#include "../common/exports.hpp"

#ifndef PM_SPLIT
#define PM_SPLIT 0
#endif
#ifndef PM_BY_COUNT  // experts in the order of their rows, most first; else by number
#define PM_BY_COUNT 1
#endif
#ifndef PM_WEIGHT_ROWS  // rows that take as long to multiply as their expert's weights take to read
#define PM_WEIGHT_ROWS 4
#endif

extern "C" {

struct ExpertWeights {  // in the layout of `pack_matrix`, or plain rows when `weight_layout()` is 0
  const Weight *gate, *up, *down;
};

struct Experts {
  int64_t count, per_token, hidden, ffn, normalise;
  double scale;                  // of the shares
  const Weight* router;          // [count, hidden], as the experts' weights
  const ExpertWeights* weights;  // [count]
};

struct MixtureInput {
  int64_t rows, routed;  // routed: ids and shares are given
  const bf16* x;         // [rows, hidden]
  int32_t* ids;          // [rows, per_token]
  float* shares;         // [rows, per_token]
  bf16* out;             // [rows, hidden]
  void* scratch;         // mixture_scratch() bytes
};

}  // extern "C"

namespace {

struct Buffers {
  float *logits, *y;   // [rows][padded experts], [assignments][y_stride]
  bf16 *x, *inner;     // of assignments in the order of their experts
  int32_t *place;                  // [rows * per_token] -> position in that order
  int32_t *start, *order, *owner;  // [experts + 1] first assignment of each; [used] as they are worked at; [experts] whose it is
  std::atomic<int64_t>* next;      // [2] panel to be taken of each product
  int64_t used, logits_stride, x_stride, inner_stride, y_stride, bytes;
};

Buffers lay_out(const Experts& e, int64_t rows, void* scratch) {
  Buffers b = {};
  Bump bump(scratch);
  const int64_t assignments = rows * e.per_token;
  b.logits_stride = padded_n(e.count), b.x_stride = input_stride(e.hidden);
  b.inner_stride = input_stride(padded_n(e.ffn)), b.y_stride = padded_n(e.hidden);
  b.logits = bump.take<float>(rows * b.logits_stride);
  b.y = bump.take<float>(assignments * b.y_stride);
  b.x = bump.take<bf16>(assignments * b.x_stride);
  b.inner = bump.take<bf16>(assignments * b.inner_stride);
  b.place = bump.take<int32_t>(assignments);
  b.start = bump.take<int32_t>(e.count + 1), b.order = bump.take<int32_t>(e.count), b.owner = bump.take<int32_t>(e.count);
  b.next = bump.take<std::atomic<int64_t>>(2);
  b.bytes = bump.used();
  return b;
}

class Mixture {  // one thread's view of a running call
 public:
  Mixture(const Experts& e, const MixtureInput& in, Buffers& b, Barrier& barrier, int id, int threads)
      : e_(e), in_(in), b_(b), barrier_(barrier), id_(id), threads_(threads) {}

  void run() {
    if (!in_.routed) route();
    if (id_ == 0) sort();
    wait();
    gather();
    wait();
    if (PM_SPLIT == 1) {
      for (int64_t i = 0; i < b_.used; i++)
        if (b_.owner[b_.order[i]] == id_) gate_up(b_.order[i], all(e_.ffn)), down(b_.order[i], all(e_.hidden));
    } else {
      each_share(0, e_.ffn, [&](int expert, Range panels) { gate_up(expert, panels); });
      wait();
      each_share(1, e_.hidden, [&](int expert, Range panels) { down(expert, panels); });
    }
    wait();
    combine();
  }

 private:
  void wait() { barrier_.wait(threads_); }
  Range mine(int64_t count) const { return share(count, id_, threads_); }
  static Range all(int64_t n) { return {0, padded_n(n) / PANEL}; }
  int64_t rows_of(int expert) const { return b_.start[expert + 1] - b_.start[expert]; }

  void route() {
    const Matrix router = {e_.router, e_.count, e_.hidden};
    const bool by_rows = in_.rows >= threads_ * ROW_TILE;  // else the router's panels are shared out
    const Range rows = by_rows ? mine(in_.rows) : Range{0, in_.rows};
    matmul(in_.x + rows.begin * e_.hidden, e_.hidden, rows.end - rows.begin, router, by_rows ? all(e_.count) : mine(router.panels()),
           [&](int64_t row, int64_t c, V y) { vstore(b_.logits + (rows.begin + row) * b_.logits_stride + c, y); });
    if (!by_rows) wait();
    const Range own = mine(in_.rows);
    for (int64_t row = own.begin; row < own.end; row++) choose(b_.logits + row * b_.logits_stride, in_.ids + row * e_.per_token, in_.shares + row * e_.per_token);
    wait();
  }

  // Softmax over all experts and the best of a row, the lower number first of two that are equal. The logits are used up.
  void choose(float* logits, int32_t* ids, float* shares) const {
    float most = MINUS_INF, whole = 0.f, chosen = 0.f;
    for (int64_t i = 0; i < e_.count; i++) most = std::max(most, logits[i]);
    for (int64_t i = 0; i < e_.count; i++) whole += logits[i] = std::exp(logits[i] - most);
    for (int64_t k = 0; k < e_.per_token; k++) {
      ids[k] = int32_t(std::max_element(logits, logits + e_.count) - logits);
      chosen += shares[k] = logits[ids[k]] / whole;
      logits[ids[k]] = -1.f;
    }
    for (int64_t k = 0; k < e_.per_token; k++) shares[k] *= float(e_.scale) / (e_.normalise ? chosen : 1.f);
  }

  // Assignments in the order of their experts, and what each thread will do.
  void sort() {
    const int64_t assignments = in_.rows * e_.per_token;
    std::fill(b_.start, b_.start + e_.count + 1, 0);
    for (int64_t a = 0; a < assignments; a++) b_.start[in_.ids[a] + 1]++;
    b_.used = 0;
    for (int32_t expert = 0; expert < e_.count; expert++) {
      if (b_.start[expert + 1]) b_.order[b_.used++] = expert;
      b_.start[expert + 1] += b_.start[expert], b_.owner[expert] = b_.start[expert];
    }
    for (int64_t a = 0; a < assignments; a++) b_.place[a] = b_.owner[in_.ids[a]]++;
    if (PM_BY_COUNT) std::stable_sort(b_.order, b_.order + b_.used, [&](int32_t a, int32_t b) { return rows_of(a) > rows_of(b); });
    deal();
    for (int p = 0; p < 2; p++) b_.next[p].store(0, std::memory_order_relaxed);
  }

  // Whole experts to threads: each to the one with least to do.
  void deal() {
    int64_t load[MOST_THREADS] = {};
    const int threads = std::min(threads_, MOST_THREADS);
    for (int64_t i = 0; i < b_.used; i++) {
      const int32_t to = int32_t(std::min_element(load, load + threads) - load);
      b_.owner[b_.order[i]] = to, load[to] += rows_of(b_.order[i]) + PM_WEIGHT_ROWS;
    }
  }

  void gather() {
    const Range rows = mine(in_.rows);
    for (int64_t a = rows.begin * e_.per_token; a < rows.end * e_.per_token; a++)
      std::memcpy(b_.x + b_.place[a] * b_.x_stride, in_.x + a / e_.per_token * e_.hidden, sizeof(bf16) * size_t(e_.hidden));
  }

  // Calls f(expert, panels) for this thread's share of a product with `n` outputs.
  template <class F>
  void each_share(int product, int64_t n, F&& f) {
    const int64_t panels = padded_n(n) / PANEL;
    if (PM_SPLIT == 0) {
      for (int64_t i = 0; i < b_.used; i++) {  // experts with few panels begin with another thread each
        const int first = int(i % threads_);
        f(b_.order[i], share_panels(panels, (id_ + first) % threads_, threads_));
      }
      return;
    }
    for (int64_t u = take(product); u < b_.used * panels; u = take(product)) f(b_.order[u / panels], {u % panels, u % panels + 1});
  }
  int64_t take(int product) { return b_.next[product].fetch_add(1, std::memory_order_relaxed); }

  void gate_up(int expert, Range panels) const {
    const ExpertWeights& w = e_.weights[expert];
    bf16* to = b_.inner + b_.start[expert] * b_.inner_stride;
    matmul_pair(b_.x + b_.start[expert] * b_.x_stride, b_.x_stride, rows_of(expert), {w.gate, e_.ffn, e_.hidden}, {w.up, e_.ffn, e_.hidden}, panels,
                [&](int64_t row, int64_t c, V g, V u) { vstore_bf16(to + row * b_.inner_stride + c, vmul(vsilu(g), u)); });
  }

  void down(int expert, Range panels) const {
    float* to = b_.y + b_.start[expert] * b_.y_stride;
    matmul(b_.inner + b_.start[expert] * b_.inner_stride, b_.inner_stride, rows_of(expert), {e_.weights[expert].down, e_.hidden, e_.ffn}, panels,
           [&](int64_t row, int64_t c, V y) { vstore(to + row * b_.y_stride + c, y); });
  }

  void combine() const {
    const Range rows = mine(in_.rows);
    for (int64_t row = rows.begin; row < rows.end; row++)
      for (int64_t c = 0; c < e_.hidden; c += LANES) {
        V sum = vzero();
        for (int64_t a = row * e_.per_token; a < (row + 1) * e_.per_token; a++)
          sum = vfma(vload(b_.y + b_.place[a] * b_.y_stride + c), vset(in_.shares[a]), sum);
        bf16 t[LANES];
        vstore_bf16(t, sum);
        std::memcpy(in_.out + row * e_.hidden + c, t, sizeof(bf16) * size_t(std::min<int64_t>(LANES, e_.hidden - c)));
      }
  }

  static constexpr int MOST_THREADS = 256;
  const Experts& e_;
  const MixtureInput& in_;
  Buffers& b_;
  Barrier& barrier_;
  const int id_, threads_;
};

}  // namespace

extern "C" {

int64_t mixture_scratch(const Experts* e, int64_t rows) { return lay_out(*e, rows, nullptr).bytes; }

void mixture(const Experts* e, const MixtureInput* in, int64_t threads) {
  Buffers b = lay_out(*e, in->rows, in->scratch);
  Barrier barrier;
  parallel(int(threads), [&](int id, int count) { Mixture(*e, *in, b, barrier, id, count).run(); });
}

}  // extern "C"
