"""Calls the integer-weight linear kernel from a candidate: weights quantised and packed once, then one C call a layer.

Pasted into `forward.py`; it needs nothing but ctypes and torch.
"""

import ctypes

import torch


class QuantisedLinear:
    """y = x . weight^T + bias through `library` (built from weight_only_matmul): x bf16 [M, k] -> bf16 or float32 [M, n].

    Weights are rounded to the library's bits and inputs to 8: a candidate that uses it must declare its precision.
    """

    def __init__(self, library, weight, bias, threads):
        self.library, self.bias, self.threads = library, bias, threads
        for name in ("packed_size", "encoded_bytes"):
            getattr(library, name).restype = ctypes.c_int64
        if weight.dtype != torch.bfloat16:
            raise ValueError(f"the quantised linear kernel takes bfloat16 weights, not {weight.dtype}")
        (self.n, self.k), i64, pointer = weight.shape, ctypes.c_int64, ctypes.c_void_p
        weight = weight.contiguous()
        source, team = (pointer(weight.data_ptr()), i64(self.n), i64(self.k)), i64(threads)
        self.packed = torch.empty(library.packed_size(*source, team), dtype=torch.uint8)
        library.use_large_pages(pointer(self.packed.data_ptr()), i64(self.packed.nbytes))
        library.pack_matrix(*source, pointer(self.packed.data_ptr()), team)

    def __call__(self, x, out_dtype=torch.bfloat16):
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.k or out_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"the quantised linear kernel takes bfloat16 [M, {self.k}], not {x.dtype} {tuple(x.shape)} -> {out_dtype}"
            )
        x, i64, pointer = x.contiguous(), ctypes.c_int64, ctypes.c_void_p
        rows = x.numel() // self.k
        out = torch.empty(*x.shape[:-1], self.n, dtype=out_dtype)
        scratch = torch.empty(self.library.encoded_bytes(i64(rows), i64(self.k)), dtype=torch.uint8)
        self.library.quantised_linear(
            pointer(x.data_ptr()), pointer(self.packed.data_ptr()), pointer(self.bias.data_ptr() if self.bias is not None else None),
            pointer(out.data_ptr()), pointer(scratch.data_ptr()), i64(rows), i64(self.n), i64(self.k),
            i64(out_dtype == torch.float32), i64(self.threads),
        )  # fmt: skip
        return out
