"""The forward pass for NVIDIA GPUs: every operator a Triton kernel, pure decode steps replayed as CUDA graphs.

Settings: `block_size`; `weights` (same, fp8, int8, int4; fp8 from compute capability 9.0); `graphs`; `triton` (parameter values
by operator). Under Triton's interpreter it runs on the CPU without graphs, which is how its values are tested without a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.contract import DECODE, Batch, KVPool, LoadedModel, Settings, rope_table
from kernels.gpu.graphs import DecodeGraphs
from kernels.gpu.launch import counting, interpreted
from kernels.gpu.llama import load_model
from kernels.gpu.step import StepInput, run_step
from kernels.gpu.tunables import CAPABILITY
from kernels.kv_copy.triton import copy_blocks, gather_blocks, scatter_blocks


class Forward:
    """`dispatch` counts the launches of each kernel since the start; `greedy` holds the last step's largest tokens, int64 [R]."""

    def __init__(self, model: LoadedModel, settings: Settings) -> None:
        self.config = c = model.config
        kind = str(settings.get("weights", "same"))
        self.device = device_for(kind)
        self.dtype = model.weights["model.embed_tokens.weight"].dtype
        self.block_size = int(settings.get("block_size", 16))
        if self.block_size & (self.block_size - 1):
            raise ValueError(f"block_size must be a power of two, not {self.block_size}")
        half = c.head_dim // 2
        rope = model.memo("rope:half:float32", lambda: tuple(t[:, :half] for t in rope_table(c, torch.float32)))
        params = settings.get("triton", {})
        self.model = load_model(c, model.weights, rope, self.device, kind, params, model.memo)
        self.dispatch: Counter[str] = Counter()
        self.greedy: Tensor | None = None
        width = -(-c.max_position_embeddings // self.block_size)
        graphs = settings.get("graphs", True) and self.device.type == "cuda"
        self.graphs = DecodeGraphs(self.model, width, self.device) if graphs else None

    def allocate(self, blocks: int) -> KVPool:
        """Keys and values of each layer in turn, each [blocks, kv_heads, block_size, head_dim]."""
        c = self.config
        shape = (blocks, c.num_key_value_heads, self.block_size, c.head_dim)
        each = torch.Size(shape[1:]).numel() * self.dtype.itemsize
        count = 2 * c.num_hidden_layers
        tensors = tuple(torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(count))
        return KVPool(tensors, self.block_size, each * count)

    def __call__(self, batch: Batch, kv: KVPool) -> Tensor:
        """Logits on the batch's own device, so that a host that samples on the CPU needs to know nothing of this one."""
        step = self.plan(batch)
        logits, self.greedy = self.replayed(step, kv) or self.launched(step, kv)
        return logits.to(batch.token_ids.device)

    def replayed(self, step: StepInput, kv: KVPool) -> tuple[Tensor, Tensor] | None:
        if self.graphs is None or step.prefill.numel():
            return None
        return self.graphs.run(step, kv.tensors, self.dispatch)

    def launched(self, step: StepInput, kv: KVPool) -> tuple[Tensor, Tensor]:
        with counting(self.dispatch):
            return run_step(self.model, step, kv.tensors)

    def plan(self, batch: Batch) -> StepInput:
        """The batch on the device. Which sequences decode is read where the batch lies: of a CPU batch without waiting."""
        phase = batch.phase.tolist()
        lengths = batch.query_start.diff().tolist()
        decode = [s for s, p in enumerate(phase) if p == DECODE]
        prefill = [s for s, p in enumerate(phase) if p != DECODE]

        def index(sequences: Sequence[int]) -> Tensor:
            return torch.tensor(sequences, dtype=torch.int32, device=self.device)

        return StepInput(
            token_ids=batch.token_ids.to(self.device),
            positions=batch.positions.to(self.device),
            slots=batch.slot.to(self.device),
            query_start=batch.query_start.to(self.device),
            contexts=batch.context_len.to(self.device),
            table=batch.block_table.to(self.device).contiguous(),
            decode=index(decode),
            prefill=index(prefill),
            longest=max((lengths[s] for s in prefill), default=0),
            logit_rows=batch.logit_rows.to(self.device),
        )

    def copy_blocks(self, kv: KVPool, source: Sequence[int], target: Sequence[int]) -> None:
        """Copies blocks within a pool (a sequence that forks). No block may be written twice, nor written and read."""
        reads, writes = (torch.tensor(blocks, device=self.device) for blocks in (source, target))
        with counting(self.dispatch):
            for tensor in kv.tensors:
                copy_blocks(tensor, tensor, reads, writes)

    def export_blocks(self, kv: KVPool, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """The named blocks in buffers of their own, one for each tensor of the pool."""
        index = torch.tensor(blocks, device=self.device)
        with counting(self.dispatch):
            return tuple(gather_blocks(tensor, index) for tensor in kv.tensors)

    def import_blocks(self, kv: KVPool, blocks: Sequence[int], buffers: Sequence[Tensor]) -> None:
        """Puts what `export_blocks` gave into blocks of a pool."""
        index = torch.tensor(blocks, device=self.device)
        with counting(self.dispatch):
            for tensor, buffer in zip(kv.tensors, buffers, strict=True):
                scatter_blocks(buffer.to(self.device), tensor, index)


def device_for(kind: str) -> torch.device:
    """The GPU, or the CPU under Triton's interpreter. Raises RuntimeError without either, ValueError for too old a GPU."""
    if interpreted():
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError("this candidate needs an NVIDIA GPU (or TRITON_INTERPRET=1 to try it on the CPU)")
    least = CAPABILITY.get(kind, (0, 0))
    if torch.cuda.get_device_capability() < least:
        raise ValueError(f"weights kept as {kind} need compute capability {least[0]}.{least[1]} or higher")
    return torch.device("cuda", torch.cuda.current_device())


def build(model: LoadedModel, settings: Settings) -> Forward:
    return Forward(model, settings)
