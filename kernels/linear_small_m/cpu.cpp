// y = x . w^T + bias for few rows of x: bf16 operands, float32 sums, bf16 or float32 result. Memory bound: w is read once.
#include "../common/exports.hpp"

extern "C" {

// x [rows, k], w in the layout of `pack_matrix` (or plain rows when `weight_layout()` is 0), bias [n] or null. k is even.
void linear(const bf16* x, const bf16* w, const bf16* bias, void* out, int64_t rows, int64_t n, int64_t k, int64_t out_float32, int64_t threads) {
  const Matrix matrix = {w, n, k};
  const auto emit = [&](int64_t row, int64_t c, V y) {
    const int lanes = int(n - c < LANES ? n - c : LANES);
    if (lanes <= 0) return;
    float t[LANES];
    vstore(t, y);
    for (int i = 0; bias && i < lanes; i++) t[i] += to_float(bias[c + i]);
    if (out_float32) return std::memcpy((float*)out + row * n + c, t, sizeof(float) * size_t(lanes)), void();
    bf16 h[LANES];
    vstore_bf16(h, vload(t));
    std::memcpy((bf16*)out + row * n + c, h, sizeof(bf16) * size_t(lanes));
  };
  parallel(int(threads), [&](int id, int count) { matmul(x, k, rows, matrix, share(matrix.panels(), id, count), emit); });
}

}  // extern "C"
