// y = x . w^T + bias for few rows of x: bf16 operands, float32 sums, bf16 or float32 result. Memory bound: w is read once.
#include "../common/linear.hpp"

extern "C" {

// x [rows, k], w in the layout of `pack_matrix` (or plain rows when `weight_layout()` is 0), bias [n] or null. k is even.
void linear(const bf16* x, const bf16* w, const bf16* bias, void* out, int64_t rows, int64_t n, int64_t k, int64_t out_float32, int64_t threads) {
  const Matrix matrix = {w, n, k};
  const LinearOutput emit = {bias, out, n, out_float32 != 0};
  parallel(int(threads), [&](int id, int count) { matmul(x, k, rows, matrix, share_panels(matrix.panels(), id, count), emit); });
}

}  // extern "C"
