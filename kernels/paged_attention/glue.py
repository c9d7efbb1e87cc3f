"""Calls the paged attention kernel from a candidate: one C call a layer writes the cache and attends.

Pasted into `forward.py`; it needs nothing but ctypes and torch.
"""

import ctypes

import torch


class AttentionInput(ctypes.Structure):
    sizes = (
        "rows",
        "sequences",
        "table_width",
        "heads",
        "kv_heads",
        "head_dim",
        "block_size",
        "block_stride",
        "threads",
    )
    pointers = ("q", "k", "v", "slot", "query_start", "context_len", "block_table", "keys", "values", "out", "scratch")
    _fields_ = [
        *((name, ctypes.c_int64) for name in sizes),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in pointers),
    ]


class PagedAttention:
    """Attention of a step through `library` (built from paged_attention), for decode and prefill rows alike.

    One layer's cache is keys [blocks, kv_heads, head_dim / 2, block_size, 2] and values [blocks, kv_heads, block_size / 2,
    head_dim, 2], bf16, each block contiguous: layers may share a pool [blocks, layers, ...], given as `pool[:, layer]`.
    """

    def __init__(self, library, heads, kv_heads, head_dim, threads, block_size=32):
        self.library, self.shape, self.threads, self.block_size = (
            library,
            (heads, kv_heads, head_dim),
            threads,
            block_size,
        )
        library.attention_scratch_bytes.restype = ctypes.c_int64
        library.attention_unsupported.restype = ctypes.c_char_p
        self.scratch = torch.empty(0, dtype=torch.uint8)
        sizes = AttentionInput(heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
        problem = library.attention_unsupported(ctypes.byref(sizes))
        if problem:
            raise ValueError(f"the attention kernel cannot run this model: {problem.decode()}")

    def allocate(self, blocks, layers):
        """Zeroed keys and values [blocks, layers, ...] on large pages."""
        _, kv_heads, dim = self.shape
        keys = torch.empty(blocks, layers, kv_heads, dim // 2, self.block_size, 2, dtype=torch.bfloat16)
        values = torch.empty(blocks, layers, kv_heads, self.block_size // 2, dim, 2, dtype=torch.bfloat16)
        for pool in (keys, values):
            self.library.use_large_pages(ctypes.c_void_p(pool.data_ptr()), ctypes.c_int64(pool.nbytes))
            pool.zero_()
        return keys, values

    def __call__(self, q, k, v, batch, keys, values):
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], rotated, bf16 -> bf16 [T, heads, head_dim].

        k and v are written at `batch.slot`; with k and v None the cache holds them already.
        """
        heads, kv_heads, dim = self.shape
        q, k, v = (None if x is None else x.contiguous() for x in (q, k, v))
        if any(x is not None and x.dtype != torch.bfloat16 for x in (q, k, v, keys, values)):
            raise ValueError("the attention kernel takes bfloat16 queries, keys, values and cache")
        out = torch.empty_like(q)
        rows, sequences = q.shape[0], batch.context_len.numel()
        call = AttentionInput(
            rows,
            sequences,
            batch.block_table.shape[1],
            heads,
            kv_heads,
            dim,
            self.block_size,
            keys.stride(0),
            self.threads,
            dim**-0.5,
        )
        tensors = {"q": q, "k": k, "v": v, "keys": keys, "values": values, "out": out}
        tensors |= {name: getattr(batch, name) for name in ("slot", "query_start", "context_len", "block_table")}
        for name, tensor in tensors.items():
            setattr(call, name, None if tensor is None else tensor.data_ptr())
        need = self.library.attention_scratch_bytes(ctypes.byref(call))
        if need > self.scratch.numel():
            self.scratch = torch.empty(need + 4096, dtype=torch.uint8)
        call.scratch = self.scratch.data_ptr()
        self.library.paged_attention(ctypes.byref(call))
        return out
