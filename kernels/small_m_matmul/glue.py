"""Calls the small-batch linear kernel from a candidate: bf16 weights packed once, then one C call a layer.

Pasted into `forward.py`; it needs nothing but ctypes and torch.
"""

import ctypes

import torch


class PackedLinear:
    """y = x . weight^T + bias through `library` (built from small_m_matmul): x bf16 [M, k] -> bf16 or float32 [M, n].

    Pays off while M is small (a decode batch); a prefill chunk is as well served by torch.
    """

    def __init__(self, library, weight, bias, threads):
        self.library, self.bias, self.threads = library, bias, threads
        for name in ("packed_size", "weight_layout", "instruction_set_usable"):
            getattr(library, name).restype = ctypes.c_int64
        if not library.instruction_set_usable():
            raise ValueError("the system refuses this process the tile registers (AMX) that the linear kernel uses")
        self.n, self.k = weight.shape
        if weight.dtype != torch.bfloat16 or self.k % 2:
            raise ValueError(
                f"the linear kernel takes bfloat16 weights with an even input width, not {weight.dtype} {tuple(weight.shape)}"
            )
        self.weight = weight.contiguous()
        if library.weight_layout():
            self.weight = self.packed(self.weight)

    def packed(self, weight):
        i64, pointer = ctypes.c_int64, ctypes.c_void_p
        source, threads = (pointer(weight.data_ptr()), i64(self.n), i64(self.k)), i64(self.threads)
        out = torch.empty(self.library.packed_size(*source, threads), dtype=torch.uint8)
        self.library.use_large_pages(pointer(out.data_ptr()), i64(out.nbytes))
        self.library.pack_matrix(*source, pointer(out.data_ptr()), threads)
        return out

    def __call__(self, x, out_dtype=torch.bfloat16):
        if x.dtype != torch.bfloat16 or x.shape[-1] != self.k or out_dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"the linear kernel takes bfloat16 [M, {self.k}], not {x.dtype} {tuple(x.shape)} -> {out_dtype}"
            )
        x, i64, pointer = x.contiguous(), ctypes.c_int64, ctypes.c_void_p
        rows = x.numel() // self.k
        out = torch.empty(*x.shape[:-1], self.n, dtype=out_dtype)
        self.library.linear(
            pointer(x.data_ptr()), pointer(self.weight.data_ptr()), pointer(self.bias.data_ptr() if self.bias is not None else None),
            pointer(out.data_ptr()), i64(rows), i64(self.n), i64(self.k), i64(out_dtype == torch.float32), i64(self.threads),
        )  # fmt: skip
        return out
