"""Calls the whole-step kernel from a candidate: weights, the paged cache and one C call a step.

Pasted into `forward.py`; it needs nothing but ctypes and torch.
"""

import ctypes

import torch


class LayerWeights(ctypes.Structure):
    names = ("attention_norm", "mlp_norm", "q", "k", "v", "o", "gate", "up", "down", "q_bias", "k_bias", "v_bias")
    _fields_ = [(name, ctypes.c_void_p) for name in names]


class ModelWeights(ctypes.Structure):
    sizes = ("layers", "hidden", "ffn", "heads", "kv_heads", "head_dim", "vocab", "block_size", "threads")
    _fields_ = [
        *((name, ctypes.c_int64) for name in sizes),
        ("norm_eps", ctypes.c_double),
        ("attention_scale", ctypes.c_double),
        ("layer", ctypes.POINTER(LayerWeights)),
        *((name, ctypes.c_void_p) for name in ("embedding", "final_norm", "head", "cos", "sin")),
    ]


class StepInput(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "sequences", "table_width", "logits", "block_stride")),
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "slot", "logit_rows")),
        *((name, ctypes.c_void_p) for name in ("query_start", "context_len", "block_table")),
        *((name, ctypes.c_void_p) for name in ("keys", "values", "key_scales", "value_scales", "out", "scratch")),
    ]


class WholeStep:
    """Runs every kind of step through `library` (built from decode_step). `memo` keeps packed weights between candidates,
    `rope(config, dtype)` gives cos and sin [positions, head_dim].

    The cache is two tensors, keys [blocks, layers, kv_heads, head_dim / n, block_size, n] and values [blocks, layers, kv_heads,
    block_size / n, head_dim, n], bf16 with n = 2; built with PM_KV_BITS 8 int8 with n = 4, and two more tensors hold their
    scales, bf16 [blocks, layers, kv_heads, block_size]. With `layers_apart` each a tensor a layer, without that dimension.
    """

    def __init__(self, library, config, weights, rope, threads, memo, block_size=32, layers_apart=False):
        self.library, self.config, self.block_size = library, config, block_size
        self.layers_apart = layers_apart and config.num_hidden_layers > 1
        for name in ("packed_size", "scratch_bytes", "weight_layout", "panel_columns", "weight_bits", "weight_group", "kv_bits"):
            getattr(library, name).restype = ctypes.c_int64
        library.instruction_set_usable.restype = ctypes.c_int64
        library.unsupported.restype = ctypes.c_char_p
        if not library.instruction_set_usable():
            raise ValueError("the system refuses this process the tile registers (AMX) that the step kernel uses")
        self.keep = []  # tensors that the C side points into
        c, w = config, weights
        self.layers = (LayerWeights * c.num_hidden_layers)()
        self.packed = self.layout(memo, weights, threads) if library.weight_layout() else None
        for i in range(c.num_hidden_layers):
            self.fill_layer(self.layers[i], f"model.layers.{i}", w)
        half = c.head_dim // 2  # of a table with both halves filled the kernel reads the first
        self.cos, self.sin = memo(
            "rope:halves:float32", lambda: tuple(t[:, :half].contiguous() for t in rope(c, torch.float32))
        )
        head = "lm_head.weight" if "lm_head.weight" in w else "model.embed_tokens.weight"
        self.model = ModelWeights(
            c.num_hidden_layers, c.hidden_size, c.intermediate_size, c.num_attention_heads, c.num_key_value_heads,
            c.head_dim, c.vocab_size, block_size, threads, c.rms_norm_eps, c.head_dim**-0.5, self.layers,
            self.vector(w["model.embed_tokens.weight"]), self.vector(w["model.norm.weight"]), self.matrix(head, w),
            self.vector(self.cos, torch.float32), self.vector(self.sin, torch.float32),
        )  # fmt: skip
        problem = library.unsupported(ctypes.byref(self.model))
        if problem:
            raise ValueError(f"the step kernel cannot run this model: {problem.decode()}")
        self.scratch = torch.empty(0, dtype=torch.uint8)
        self.pointers, self.known = [], None

    def matrix_names(self, weights):
        """Every layer's matrices in the order a step reads them, and the head; also of layers that this model leaves out."""
        parts = [f"self_attn.{x}_proj.weight" for x in "qkvo"] + [
            f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")
        ]
        layers = 0
        while f"model.layers.{layers}.{parts[0]}" in weights:
            layers += 1
        head = "lm_head.weight" if "lm_head.weight" in weights else "model.embed_tokens.weight"
        return [*(f"model.layers.{i}.{part}" for i in range(layers) for part in parts), head]

    def layout(self, memo, weights, threads):
        """All matrices packed into one allocation, kept under a key that names the layout."""
        library = self.library
        key = f"panels of {library.panel_columns()}, {library.weight_bits()} bits, groups of {library.weight_group()}"
        return memo(key, lambda: self.pack(self.matrix_names(weights), weights, threads))

    def pack(self, names, weights, threads):
        i64, sources, sizes = ctypes.c_int64, {}, {}
        for name in names:
            self.check(weights[name], torch.bfloat16)
            tensor = weights[name].contiguous()
            sources[name] = (ctypes.c_void_p(tensor.data_ptr()), *map(i64, tensor.shape)), tensor
            sizes[name] = (self.library.packed_size(*sources[name][0], i64(threads)) + 63) // 64 * 64
        huge = 2 << 20  # bytes of a large page
        arena = torch.empty(sum(sizes.values()) + 2 * huge, dtype=torch.uint8)
        at, packed = -arena.data_ptr() % huge, {}
        self.library.use_large_pages(ctypes.c_void_p(arena.data_ptr()), i64(arena.numel()))
        for name in names:
            packed[name], at = arena[at : at + sizes[name]], at + sizes[name]
            self.library.pack_matrix(*sources[name][0], ctypes.c_void_p(packed[name].data_ptr()), i64(threads))
        return packed

    def check(self, tensor, dtype):
        if tensor.dtype != dtype:
            raise ValueError(f"the step kernel takes {dtype} weights, not {tensor.dtype}: load the model in bfloat16")

    def vector(self, tensor, dtype=torch.bfloat16):
        if tensor is None:
            return None
        self.check(tensor, dtype)
        self.keep.append(tensor.contiguous())
        return self.keep[-1].data_ptr()

    def matrix(self, name, weights):
        return self.packed[name].data_ptr() if self.packed is not None else self.vector(weights[name])

    def fill_layer(self, layer, prefix, w):
        layer.attention_norm = self.vector(w[f"{prefix}.input_layernorm.weight"])
        layer.mlp_norm = self.vector(w[f"{prefix}.post_attention_layernorm.weight"])
        for part in ("q", "k", "v", "o"):
            setattr(layer, part, self.matrix(f"{prefix}.self_attn.{part}_proj.weight", w))
        for part in ("gate", "up", "down"):
            setattr(layer, part, self.matrix(f"{prefix}.mlp.{part}_proj.weight", w))
        for part in ("q", "k", "v"):
            setattr(layer, f"{part}_bias", self.vector(w.get(f"{prefix}.self_attn.{part}_proj.bias")))

    def kinds(self):
        """(shape, dtype) of one head's keys, values and, of integers, their scales in one block."""
        bits, dim, size = self.library.kv_bits(), self.config.head_dim, self.block_size
        n, dtype = 32 // bits, torch.bfloat16 if bits == 16 else torch.int8
        numbers = [((dim // n, size, n), dtype), ((size // n, dim, n), dtype)]
        return numbers if bits == 16 else numbers + 2 * [((size,), torch.bfloat16)]

    @property
    def bytes_per_block(self):
        c = self.config
        heads = c.num_hidden_layers * c.num_key_value_heads
        return heads * sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in self.kinds())

    def allocate(self, blocks):
        """Zeroed tensors on large pages: one of each kind, whose blocks hold all layers, or with `layers_apart` one a layer."""
        c = self.config
        layers = c.num_hidden_layers
        first = (blocks, c.num_key_value_heads) if self.layers_apart else (blocks, layers, c.num_key_value_heads)
        pools = []
        for shape, dtype in self.kinds():
            for _ in range(layers if self.layers_apart else 1):
                pool = torch.empty(*first, *shape, dtype=dtype)
                self.library.use_large_pages(ctypes.c_void_p(pool.data_ptr()), ctypes.c_int64(pool.nbytes))
                pools.append(pool.zero_())
        return tuple(pools)

    def layer_pointers(self, tensors):
        """Addresses of an array for each kind: where block 0 of each layer lies. Kept for the pool seen last."""
        if tensors is not self.known:
            layers = len(self.layers)
            each = layers if self.layers_apart else 1
            kinds = [tensors[first : first + each] for first in range(0, len(tensors), each)]
            at = [[pools[n].data_ptr() if each > 1 else pools[0][:, n].data_ptr() for n in range(layers)] for pools in kinds]
            self.pointers = [(ctypes.c_void_p * layers)(*found) for found in at]
            self.known = tensors  # held, so that no other pool can be taken for it
        return [ctypes.addressof(pointers) for pointers in self.pointers]

    def __call__(self, batch, tensors):
        """Float32 logits [len(batch.logit_rows), vocab]; writes this step's keys and values into `tensors`."""
        step = StepInput()
        step.rows, step.sequences = batch.token_ids.numel(), batch.context_len.numel()
        step.table_width, step.logits = batch.block_table.shape[1], batch.logit_rows.numel()
        for name in ("token_ids", "positions", "slot", "logit_rows", "query_start", "context_len", "block_table"):
            setattr(step, name, getattr(batch, name).data_ptr())
        for name, pointers in zip(("keys", "values", "key_scales", "value_scales"), self.layer_pointers(tensors), strict=False):
            setattr(step, name, pointers)
        step.block_stride = tensors[0].stride(0)
        out = torch.empty(step.logits, self.config.vocab_size)
        step.out = out.data_ptr()
        need = self.library.scratch_bytes(ctypes.byref(self.model), ctypes.byref(step))
        if need > self.scratch.numel():
            self.scratch = torch.empty(need + 4096, dtype=torch.uint8)
        step.scratch = self.scratch.data_ptr()
        self.library.forward_step(ctypes.byref(self.model), ctypes.byref(step))
        return out
