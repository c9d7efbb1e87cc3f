// What linear layers do with a result: add the bias, round, store.
#pragma once
#include "exports.hpp"

struct LinearOutput {
  const bf16* bias;  // [n] or null
  void* data;        // [rows, n], float32 or bf16
  int64_t n;
  bool float32;

  void operator()(int64_t row, int64_t c, V y) const {
    const int lanes = int(n - c < LANES ? n - c : LANES);
    if (lanes <= 0) return;
    float t[LANES];
    vstore(t, y);
    for (int i = 0; bias && i < lanes; i++) t[i] += to_float(bias[c + i]);
    if (float32) return std::memcpy((float*)data + row * n + c, t, sizeof(float) * size_t(lanes)), void();
    bf16 h[LANES];
    vstore_bf16(h, vload(t));
    std::memcpy((bf16*)data + row * n + c, h, sizeof(bf16) * size_t(lanes));
  }
};
