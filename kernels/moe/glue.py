"""Calls the mixture-of-experts kernel from a candidate: every expert's weights packed once, then one C call a layer.

Pasted into a candidate's source; it needs nothing but ctypes and torch.
"""

import ctypes

import torch


class ExpertWeights(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("gate", "up", "down")]


class Experts(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "per_token", "hidden", "ffn", "normalise")),
        ("scale", ctypes.c_double),
        ("router", ctypes.c_void_p),
        ("weights", ctypes.POINTER(ExpertWeights)),
    ]


class MixtureInput(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "routed")),
        *((name, ctypes.c_void_p) for name in ("x", "ids", "shares", "out", "scratch")),
    ]


class GroupedExperts:
    """A layer's mixture through `library` (built from moe): x bf16 [T, hidden] -> bf16 [T, hidden].

    `experts` are (gate, up, down) of each expert, bf16 [ffn, hidden], [ffn, hidden], [hidden, ffn]; `router` is [experts, hidden].
    Routing is softmax over all experts and the `per_token` best, unless a call brings shares and expert numbers of its own.
    """

    def __init__(self, library, router, experts, per_token, normalise, scale, threads):
        self.library, self.threads, self.per_token = library, threads, per_token
        for name in ("packed_size", "weight_layout", "instruction_set_usable", "mixture_scratch"):
            getattr(library, name).restype = ctypes.c_int64
        if not library.instruction_set_usable():
            raise ValueError("the system refuses this process the tile registers (AMX) that the experts kernel uses")
        self.ffn, self.hidden = experts[0][0].shape
        self.keep = []  # tensors that the C side points into
        table = (ExpertWeights * len(experts))(*(ExpertWeights(*(self.matrix(w) for w in each)) for each in experts))
        self.experts = Experts(
            len(experts), per_token, self.hidden, self.ffn, normalise, scale, self.matrix(router), table
        )
        self.scratch = torch.empty(0, dtype=torch.uint8)

    def matrix(self, weight):
        """The address of the weight as the library reads it."""
        i64, pointer, (n, k) = ctypes.c_int64, ctypes.c_void_p, weight.shape
        if weight.dtype != torch.bfloat16 or k % 2:
            raise ValueError(f"the experts kernel takes bfloat16 weights of an even width, not {weight.dtype} {(n, k)}")
        kept = weight.contiguous()
        if self.library.weight_layout():
            source, threads = (pointer(kept.data_ptr()), i64(n), i64(k)), i64(self.threads)
            packed = torch.empty(self.library.packed_size(*source, threads), dtype=torch.uint8)
            self.library.use_large_pages(pointer(packed.data_ptr()), i64(packed.nbytes))
            self.library.pack_matrix(*source, pointer(packed.data_ptr()), threads)
            kept = packed
        self.keep.append(kept)
        return kept.data_ptr()

    def __call__(self, x, shares=None, chosen=None):
        """`shares` and `chosen` [T, per_token]: the weights of a token's experts, and their numbers."""
        if x.dtype != torch.bfloat16 or x.dim() != 2 or x.shape[1] != self.hidden:
            raise ValueError(f"the experts kernel takes bfloat16 [T, {self.hidden}], not {x.dtype} {tuple(x.shape)}")
        x, rows = x.contiguous(), len(x)
        shape = (rows, self.per_token)
        ids = torch.empty(shape, dtype=torch.int32) if chosen is None else chosen.to(torch.int32).contiguous()
        shares = torch.empty(shape) if shares is None else shares.float().contiguous()
        need = self.library.mixture_scratch(ctypes.byref(self.experts), ctypes.c_int64(rows))
        if need > self.scratch.numel():
            self.scratch = torch.empty(need, dtype=torch.uint8)
        out = torch.empty_like(x)
        at = (t.data_ptr() for t in (x, ids, shares, out, self.scratch))
        call = MixtureInput(rows, chosen is not None, *at)
        self.library.mixture(ctypes.byref(self.experts), ctypes.byref(call), ctypes.c_int64(self.threads))
        return out
