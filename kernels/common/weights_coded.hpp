// bf16 weights in 12 bits, with no value changed (PM_WEIGHT_BITS 12): a decode step reads a quarter less.
// The low byte of a weight (an exponent's last bit and the mantissa) is kept as it is. Of the high byte (the sign and the rest of
// the exponent) a panel's weights hold few values: it becomes a number of four bits, a place in the panel's table of the 15
// commonest and zero. A weight whose high byte is not in the table counts as zero there and is listed with its value at the end.
//
// A panel is table[64] (the sixteen, four times) and then, for every four pairs of k and every vector of 16 outputs, 64 bytes of
// two numbers and 128 low bytes, which `decode` turns into the four vectors of the plain layout. k is padded to whole groups.
// After the panels: int64 start[panels + 1], Listed[start[panels]]. All weights being what they were, products differ from the
// plain layout's in the place of the listed ones in a sum alone.
#pragma once
#include <vector>

static_assert(PM_LAYOUT == 1, "coded weights are always repacked");

struct Listed {
  uint32_t k;
  uint16_t column;  // of the panel
  bf16 value;
};

constexpr int CODED_PAIRS = 4, CODED_BYTES = 192;  // pairs of k in a group; bytes of one vector's four pairs
static inline int64_t coded_groups(int64_t k) { return (k + 2 * CODED_PAIRS - 1) / (2 * CODED_PAIRS); }
static inline int64_t coded_bytes(int64_t k) { return 64 + coded_groups(k) * PM_PANEL_VECS * CODED_BYTES; }

struct HighBytes {  // a panel's table, and each high byte's place in it; 0 also for those that have none
  uint8_t table[16] = {}, place[256] = {};
  int64_t listed = 0;

  HighBytes(const bf16* w, int64_t n, int64_t k, int64_t p) {
    int64_t count[256] = {};
    const int64_t last = (p + 1) * PANEL < n ? (p + 1) * PANEL : n;
    for (int64_t i = p * PANEL * k; i < last * k; i++) count[w[i] >> 8]++;
    count[0] = 0;  // always in the table
    for (int t = 1; t < 16; t++) {
      int most = 0;
      for (int b = 1; b < 256; b++) most = count[b] > count[most] ? b : most;
      table[t] = uint8_t(most), place[most] = most ? uint8_t(t) : uint8_t(0);
      count[most] = 0;
    }
    for (const int64_t left : count) listed += left;
  }
  bool has(bf16 w) const { return place[w >> 8] || !(w >> 8); }
};

static inline int64_t panels_of(int64_t n) { return round_up(n, PANEL) / PANEL; }
static inline int64_t panel_elements(int64_t k) { return coded_bytes(k) / int64_t(sizeof(Weight)); }
static inline int64_t* listed_starts(Weight* w, int64_t n, int64_t k) { return (int64_t*)(w + panels_of(n) * panel_elements(k)); }
static inline const int64_t* listed_starts(const Weight* w, int64_t n, int64_t k) { return (const int64_t*)(w + panels_of(n) * panel_elements(k)); }

static int64_t packed_bytes(const bf16* w, int64_t n, int64_t k, int64_t threads) {
  std::atomic<int64_t> listed{0};
  parallel(int(threads), [&](int id, int count) {
    const Range r = share(panels_of(n), id, count);
    for (int64_t p = r.begin; p < r.end; p++) listed += HighBytes(w, n, k, p).listed;
  });
  return panels_of(n) * coded_bytes(k) + (panels_of(n) + 1) * int64_t(sizeof(int64_t)) + listed * int64_t(sizeof(Listed));
}

static void pack_panel(const bf16* w, int64_t n, int64_t k, const HighBytes& high, int64_t p, uint8_t* out, Listed* list) {
  std::memset(out, 0, size_t(coded_bytes(k)));
  for (int i = 0; i < 64; i++) out[i] = high.table[i % 16];
  for (int64_t c = 0; c < PANEL && p * PANEL + c < n; c++)
    for (int64_t i = 0; i < k; i++) {
      const bf16 value = w[(p * PANEL + c) * k + i];
      if (!high.has(value)) {
        *list++ = {uint32_t(i), uint16_t(c), value};
        continue;
      }
      const int64_t pair = i / 2, vector = pair % CODED_PAIRS, element = c % 16 * 2 + i % 2;  // of the plain layout
      uint8_t* group = out + 64 + (pair / CODED_PAIRS * PM_PANEL_VECS + c / 16) * CODED_BYTES;
      const int64_t at = element / 8 * 16 + vector % 2 * 8 + element % 8;
      group[at] |= uint8_t(high.place[value >> 8] << (vector / 2 * 4));
      group[64 + vector / 2 * 64 + at] = uint8_t(value);
    }
}

static void pack(const bf16* w, int64_t n, int64_t k, Weight* out, int64_t threads) {
  const int64_t panels = panels_of(n);
  int64_t* start = listed_starts(out, n, k);
  const auto each = [&](auto&& f) {
    parallel(int(threads), [&](int id, int count) {
      const Range r = share(panels, id, count);
      for (int64_t p = r.begin; p < r.end; p++) f(p, HighBytes(w, n, k, p));
    });
  };
  start[0] = 0;
  each([&](int64_t p, const HighBytes& high) { start[p + 1] = high.listed; });
  for (int64_t p = 0; p < panels; p++) start[p + 1] += start[p];
  Listed* list = (Listed*)(start + panels + 1);
  each([&](int64_t p, const HighBytes& high) { pack_panel(w, n, k, high, p, (uint8_t*)(out + p * panel_elements(k)), list + start[p]); });
}

// The panel in the plain layout, in memory of this thread's own that the next call with the same `slot` overwrites.
static const bf16* decode_panel(const Weight* w, int64_t k, int64_t p, int slot) {
  static thread_local std::vector<bf16> plain[2];
  plain[slot].resize(size_t(coded_groups(k) * 2 * CODED_PAIRS * PANEL + 32));
  bf16* out = (bf16*)round_up(int64_t(plain[slot].data()), 64);
  const uint8_t* from = (const uint8_t*)(w + p * panel_elements(k));
  const Table table = table_load(from);
  from += 64;
  for (int64_t g = 0; g < coded_groups(k); g++)
    for (int j = 0; j < PM_PANEL_VECS; j++, from += CODED_BYTES) {
      W v[CODED_PAIRS];
      wdecode(from, table, v);
      for (int t = 0; t < CODED_PAIRS; t++) wstore(out + ((g * CODED_PAIRS + t) * PM_PANEL_VECS + j) * 32, v[t]);
    }
  return out;
}

static void add_listed(int rows, const bf16* x, int64_t ldx, const Weight* w, int64_t n, int64_t k, int64_t p, float* out) {
  const int64_t* start = listed_starts(w, n, k);
  const Listed* list = (const Listed*)(start + panels_of(n) + 1);
  for (int64_t l = start[p]; l < start[p + 1]; l++)
    for (int i = 0; i < rows; i++) out[i * PANEL + list[l].column] += to_float(x[i * ldx + list[l].k]) * to_float(list[l].value);
}

// out[MR][PANEL] = x[MR, k] . panel, decoded on the way
template <int MR, bool FETCH>
static __attribute__((noinline)) void coded_product(const bf16* x, int64_t ldx, const uint8_t* panel, int64_t k, float* out) {
  const Table table = table_load(panel);
  const bf16* rows[(MR + 1) / 2];  // every second row of x: few enough for the registers
  for (int i = 0; i < MR; i += 2) rows[i / 2] = x + i * ldx;
  V acc[MR][PM_PANEL_VECS];
  clear(acc);
  const uint8_t* from = panel + 64;
  for (int64_t g = 0; g < coded_groups(k); g++) {
    PM_UNROLL_LOOP(4)
    for (int j = 0; j < PM_PANEL_VECS; j++, from += CODED_BYTES) {
      W v[CODED_PAIRS];
      wdecode(from, table, v);
      for (int at = 0; FETCH && at < CODED_BYTES; at += 64) prefetch(from + at + PM_PREFETCH);
      for (const bf16*& row : rows) asm volatile("" : "+r"(row));  // x is read for each vector: kept, it would push sums out of the registers
      PM_UNROLL_LOOP(4)
      for (int t = 0; t < CODED_PAIRS; t++)
        PM_UNROLL_LOOP(14)
        for (int i = 0; i < MR; i++) acc[i][j] = dot2(acc[i][j], v[t], wpair(load_pair(rows[i / 2] + i % 2 * ldx + 2 * t)));
    }
    for (const bf16*& row : rows) row += 2 * CODED_PAIRS;
  }
  for (int i = 0; i < MR; i++)
    for (int j = 0; j < PM_PANEL_VECS; j++) vstore(out + i * PANEL + j * 16, acc[i][j]);
}

// Weights that more rows read than a tile has are decoded once; with tile registers, always. Null otherwise.
static inline const Weight* open_panel(const Weight* w, int64_t k, int64_t p, int64_t rows, int slot) {
  return rows > ROW_TILE || PM_TILES ? decode_panel(w, k, p, slot) : nullptr;
}

template <int MR, bool FIRST>
static inline void panel_product(const bf16* x, int64_t ldx, const Weight* w, int64_t n, int64_t k, int64_t p, const Weight* opened, float* out) {
  if (opened) plain_product<MR, false>(x, ldx, opened, n, k, 0, out);
  else coded_product<MR, FIRST && PM_PREFETCH>(x, ldx, (const uint8_t*)(w + p * panel_elements(k)), k, out);
  add_listed(MR, x, ldx, w, n, k, p, out);
}
