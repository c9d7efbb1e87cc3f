"""Calls the whole-step kernel from a candidate: weights, rope tables, the paged cache and one C call a step.

Pasted into `forward.py`; it needs nothing but ctypes and torch.
"""

import ctypes
import math

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
        *((name, ctypes.c_void_p) for name in ("keys", "values", "out", "scratch")),
    ]


def rope_tables(config):
    """cos and sin, float32 [max positions, head_dim / 2], with the config's scaling (none, linear or llama3)."""
    scaling, two_pi = config.rope_scaling, 2 * math.pi
    frequency = 1.0 / config.rope_theta ** (
        torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
    )
    kind = "default" if scaling is None else scaling.kind
    if kind == "linear":
        frequency = frequency / scaling.factor
    elif kind == "llama3":
        turns = (
            scaling.original_max_position * frequency / two_pi
        )  # how often a dimension turns in the original context
        keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling.factor
    elif kind != "default":
        raise ValueError(f"rope scaling {kind!r} is not supported by the step kernel")
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), frequency)
    return angles.cos().contiguous(), angles.sin().contiguous()


class WholeStep:
    """Runs every kind of step through `library` (built from decode_step). `memo` keeps packed weights between candidates.

    The cache is two bf16 tensors, keys [blocks, layers, kv_heads, head_dim / 2, block_size, 2] and
    values [blocks, layers, kv_heads, block_size / 2, head_dim, 2].
    """

    def __init__(self, library, config, weights, threads, memo, block_size=32):
        self.library, self.config, self.block_size = library, config, block_size
        for name in ("packed_size", "scratch_bytes", "weight_layout", "panel_columns", "weight_bits", "weight_group"):
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
        self.cos, self.sin = memo("rope:step-kernel:float32", lambda: rope_tables(config))
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
        self.pointers = {}

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
        i64, sizes = ctypes.c_int64, {}
        for name in names:
            rows, columns = weights[name].shape
            sizes[name] = (self.library.packed_size(i64(rows), i64(columns)) + 63) // 64 * 64
        huge = 2 << 20  # bytes of a large page
        arena = torch.empty(sum(sizes.values()) + 2 * huge, dtype=torch.uint8)
        at, packed = -arena.data_ptr() % huge, {}
        self.library.use_large_pages(ctypes.c_void_p(arena.data_ptr()), i64(arena.numel()))
        for name in names:
            source, to = weights[name].contiguous(), arena[at : at + sizes[name]]
            self.check(source, torch.bfloat16)
            rows, columns = source.shape
            self.library.pack_matrix(
                ctypes.c_void_p(source.data_ptr()),
                i64(rows),
                i64(columns),
                ctypes.c_void_p(to.data_ptr()),
                i64(threads),
            )
            packed[name], at = to, at + sizes[name]
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

    @property
    def bytes_per_block(self):
        c = self.config
        return 2 * 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self.block_size

    def allocate(self, blocks):
        c, size = self.config, self.block_size
        shape = (blocks, c.num_hidden_layers, c.num_key_value_heads)
        keys = torch.empty(*shape, c.head_dim // 2, size, 2, dtype=torch.bfloat16)
        values = torch.empty(*shape, size // 2, c.head_dim, 2, dtype=torch.bfloat16)
        for pool in (keys, values):
            self.library.use_large_pages(ctypes.c_void_p(pool.data_ptr()), ctypes.c_int64(pool.nbytes))
            pool.zero_()
        return keys, values

    def layer_pointers(self, pool):
        """Address of an array with the address of each layer in block 0 of `pool`."""
        if pool.data_ptr() not in self.pointers:
            each = (pool.data_ptr() + i * pool.stride(1) * pool.element_size() for i in range(len(self.layers)))
            self.pointers[pool.data_ptr()] = (ctypes.c_void_p * len(self.layers))(*each)
        return ctypes.addressof(self.pointers[pool.data_ptr()])

    def __call__(self, batch, tensors):
        """Float32 logits [len(batch.logit_rows), vocab]; writes this step's keys and values into `tensors`."""
        step = StepInput()
        step.rows, step.sequences = batch.token_ids.numel(), batch.context_len.numel()
        step.table_width, step.logits = batch.block_table.shape[1], batch.logit_rows.numel()
        for name in ("token_ids", "positions", "slot", "logit_rows", "query_start", "context_len", "block_table"):
            setattr(step, name, getattr(batch, name).data_ptr())
        step.keys, step.values = (self.layer_pointers(t) for t in tensors)
        step.block_stride = tensors[0].stride(0)
        out = torch.empty(step.logits, self.config.vocab_size)
        step.out = out.data_ptr()
        need = self.library.scratch_bytes(ctypes.byref(self.model), ctypes.byref(step))
        if need > self.scratch.numel():
            self.scratch = torch.empty(need + 4096, dtype=torch.uint8)
        step.scratch = self.scratch.data_ptr()
        self.library.forward_step(ctypes.byref(self.model), ctypes.byref(step))
        return out
