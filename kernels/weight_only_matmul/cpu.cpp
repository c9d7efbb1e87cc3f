// y = x . w^T + bias with integer weights: x is quantised to 8 bits as it comes, four products an instruction. Any rows.
#ifndef PM_WEIGHT_BITS
#define PM_WEIGHT_BITS 8
#endif
#include "../common/linear.hpp"

extern "C" {

int64_t encoded_bytes(int64_t rows, int64_t k) { return rows * input_stride(k); }

// x bf16 [rows, k], w in the layout of `pack_matrix`, bias bf16 [n] or null; scratch encoded_bytes(rows, k) bytes.
void quantised_linear(const bf16* x, const Weight* w, const bf16* bias, void* out, void* scratch, int64_t rows, int64_t n, int64_t k, int64_t out_float32, int64_t threads) {
  const Matrix matrix = {w, n, k};
  const LinearOutput emit = {bias, out, n, out_float32 != 0};
  Input* encoded = (Input*)scratch;
  Barrier barrier;
  parallel(int(threads), [&](int id, int count) {
    const Range mine = share(rows, id, count);
    for (int64_t r = mine.begin; r < mine.end; r++) encode(x + r * k, k, encoded + r * input_stride(k));
    barrier.wait(count);
    matmul(encoded, input_stride(k), rows, matrix, share_panels(matrix.panels(), id, count), emit);
  });
}

}  // extern "C"
