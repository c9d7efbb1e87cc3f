// What every library with packed weights exports beside its operator.
#pragma once
#include "gemm.hpp"
#ifdef __linux__
#include <sys/mman.h>
#endif

extern "C" {

int64_t weight_layout() { return PM_LAYOUT; }
int64_t panel_columns() { return PANEL; }
int64_t instruction_set() { return PM_ISA; }
#if !PM_ENCODED && PM_TILES
int64_t instruction_set_usable() { return tiles_permitted(); }  // must be asked, and answer 1, before the first product
#else
int64_t instruction_set_usable() { return 1; }
#endif
int64_t weight_bits() { return PM_WEIGHT_BITS; }
#if PM_ENCODED
int64_t weight_group() { return PM_GROUP; }
#else
int64_t weight_group() { return 0; }
#endif

// Bytes that `pack_matrix` makes of w[n, k].
int64_t packed_size(const bf16* w, int64_t n, int64_t k, int64_t threads) { return packed_bytes(w, n, k, threads); }

// Copies w[n, k] into the panel layout at out.
void pack_matrix(const bf16* w, int64_t n, int64_t k, Weight* out, int64_t threads) { pack(w, n, k, out, threads); }

// Asks the system to back the whole pages of [p, p + bytes) with large ones; without them the weight stream stalls on page walks.
void use_large_pages(void* p, int64_t bytes) {
#ifdef __linux__
  const uintptr_t page = 4096, begin = (uintptr_t(p) + page - 1) / page * page, end = (uintptr_t(p) + uintptr_t(bytes)) / page * page;
  if (end > begin) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#else
  (void)p, (void)bytes;
#endif
}

}  // extern "C"
