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
    cache = ("keys", "values", "key_scales", "value_scales")
    pointers = ("q", "k", "v", "slot", "query_start", "context_len", "block_table", *cache, "out", "scratch")
    _fields_ = [
        *((name, ctypes.c_int64) for name in sizes),
        ("scale", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in pointers),
    ]


class PagedAttention:
    """Attention of a step through `library` (built from paged_attention), for decode and prefill rows alike.

    One layer's cache is keys [blocks, kv_heads, head_dim / n, block_size, n] and values [blocks, kv_heads, block_size / n,
    head_dim, n], bf16 with n = 2, each block contiguous: layers may share a pool [blocks, layers, ...], given as
    `pool[:, layer]`. Built with PM_KV_BITS 8 they are int8 with n = 4, and two tensors more hold their scales, bf16 [blocks,
    kv_heads, block_size].
    """

    def __init__(self, library, heads, kv_heads, head_dim, threads, block_size=32):
        self.library, self.shape, self.threads, self.block_size = (
            library,
            (heads, kv_heads, head_dim),
            threads,
            block_size,
        )
        for name in ("attention_scratch_bytes", "kv_bits"):
            getattr(library, name).restype = ctypes.c_int64
        library.attention_unsupported.restype = ctypes.c_char_p
        self.scratch = torch.empty(0, dtype=torch.uint8)
        sizes = AttentionInput(heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
        problem = library.attention_unsupported(ctypes.byref(sizes))
        if problem:
            raise ValueError(f"the attention kernel cannot run this model: {problem.decode()}")

    def allocate(self, blocks, layers):
        """A layer's tensors with dimension 1 for the layer: keys and values, zeroed, on large pages, and integers' scales."""
        _, heads, dim = self.shape
        bits, size = self.library.kv_bits(), self.block_size
        n, dtype = 32 // bits, torch.bfloat16 if bits == 16 else torch.int8
        pools = [torch.empty(blocks, layers, heads, *kind, n, dtype=dtype) for kind in ((dim // n, size), (size // n, dim))]
        for pool in pools:
            self.library.use_large_pages(ctypes.c_void_p(pool.data_ptr()), ctypes.c_int64(pool.nbytes))
            pool.zero_()
        scales = [torch.zeros(blocks, layers, heads, size, dtype=torch.bfloat16) for _ in range(2) if bits == 8]
        return (*pools, *scales)

    def __call__(self, q, k, v, batch, cache):
        """q [T, heads, head_dim], k and v [T, kv_heads, head_dim], rotated, bf16 -> bf16 [T, heads, head_dim].

        k and v are written at `batch.slot` of `cache`, one layer's tensors; with k and v None it holds them already.
        """
        heads, kv_heads, dim = self.shape
        q, k, v = (None if x is None else x.contiguous() for x in (q, k, v))
        kept = torch.bfloat16 if self.library.kv_bits() == 16 else torch.int8
        if any(x is not None and x.dtype != torch.bfloat16 for x in (q, k, v)) or cache[0].dtype != kept:
            raise ValueError(f"the attention kernel takes bfloat16 queries, keys and values and a cache of {kept}")
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
            cache[0].stride(0),
            self.threads,
            dim**-0.5,
        )
        tensors = {"q": q, "k": k, "v": v, "out": out, **dict(zip(AttentionInput.cache, cache, strict=False))}
        tensors |= {name: getattr(batch, name) for name in ("slot", "query_start", "context_len", "block_table")}
        for name, tensor in tensors.items():
            setattr(call, name, None if tensor is None else tensor.data_ptr())
        need = self.library.attention_scratch_bytes(ctypes.byref(call))
        if need > self.scratch.numel():
            self.scratch = torch.empty(need + 4096, dtype=torch.uint8)
        call.scratch = self.scratch.data_ptr()
        self.library.paged_attention(ctypes.byref(call))
        return out
