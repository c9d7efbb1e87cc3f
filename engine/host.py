"""The engine host: holds one model, loads candidates, runs steps. The only process in which candidate code runs.

    python -m engine.host --model FOLDER --dtype bfloat16 --threads 2 --kv-bytes 536870912

It speaks `engine.wire` on its standard input and output and has no sockets. A candidate's error is a reply, not the host's
end; what a candidate prints goes to standard error. It waits in a blocking read, so an idle host uses no processor time.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from engine import sandbox, wire

LOG_TAIL = 4000


def take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Own copies of descriptors 0 and 1; afterwards 0 is empty and 1 is standard error, whatever a candidate does with them."""
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return os.fdopen(source, "rb", buffering=1 << 20), os.fdopen(sink, "wb", buffering=1 << 20)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--kv-bytes", type=int, required=True)
    parser.add_argument("--even-routing", action="store_true", help="experts by position alone: for verification")
    options = parser.parse_args()
    layers = sandbox.apply(os.getppid())
    source, sink = take_pipes()
    start = time.perf_counter()
    try:
        host = Host(options.model, options.dtype, options.threads, options.kv_bytes, layers, options.even_routing)
    except Exception as error:
        reply(sink, wire.Reply(False, error=as_error(error), log_tail=traceback.format_exc()[-LOG_TAIL:]))
        sys.exit(1)
    reply(sink, wire.Reply(True, host.ready(time.perf_counter() - start)))
    host.serve(source, sink)


def reply(sink: BinaryIO, message: wire.Reply) -> None:
    sink.write(wire.encode(message))
    sink.flush()


def as_error(error: BaseException) -> wire.HostError:
    from engine.artifacts import ArtifactError
    from engine.loader import CandidateError
    from engine.models.errors import ModelError

    if isinstance(error, ModelError):
        return wire.HostError(error.code, error.message, error.mend)
    codes = {
        ArtifactError: "artifact_damaged",
        CandidateError: "bad_candidate",
        BadOutput: "bad_output",
        NotResident: "not_resident",
    }
    code = next((c for kind, c in codes.items() if isinstance(error, kind)), "candidate_error")
    return wire.HostError(
        code, f"{type(error).__name__}: {error}", "Read the log below; the candidate's source is named in it."
    )


class NotResident(Exception):
    """A call names a candidate that was not loaded."""


class BadOutput(Exception):
    """A forward pass returned something that is not float32 logits of the shape asked for, or not finite."""


@dataclass(frozen=True)
class Resident:
    forward: Any
    pool: Any
    folder: Path


class Host:
    """Dispatches messages. One resident forward pass and pool for each (artifact hash, layers)."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        threads: int,
        kv_bytes: int,
        sandbox_layers: list[str],
        even_routing: bool = False,
    ) -> None:
        import torch

        from engine.models.weights import evenly_routed, load_model
        from engine.trace import watch_libraries

        watch_libraries()
        torch.set_num_threads(threads)
        torch.set_grad_enabled(False)
        self.model, self.dtype, self.threads, self.kv_bytes = load_model(model, dtype), dtype, threads, kv_bytes
        if even_routing:
            self.model = evenly_routed(self.model)
        self.folder, self.sandbox_layers = model, sandbox_layers
        self.resident: dict[tuple[str, int], Resident] = {}
        self.schedules: dict[str, list[Any]] = {}
        self.weights_hash = weights_hash(model, dtype)
        self.handlers: dict[type, Callable[[Any], wire.Body]] = {
            wire.Load: self.load,
            wire.Unload: self.unload,
            wire.Step: self.step,
            wire.Prepare: self.prepare,
            wire.TimedBlock: self.timed_block,
            wire.Trace: self.trace,
            wire.Fill: self.fill,
            wire.Status: self.status,
        }

    def ready(self, load_s: float) -> wire.Ready:
        c = self.model.config
        size = sum(t.nbytes for t in self.model.weights.values())
        context, layers = c.max_position_embeddings, c.num_hidden_layers
        return wire.Ready(os.getpid(), load_s, self.weights_hash, c.vocab_size, context, layers, self.dtype, size)

    def serve(self, source: BinaryIO, sink: BinaryIO) -> None:
        decoder = msgspec.msgpack.Decoder(wire.Request)
        while header := source.read(4):
            message = decoder.decode(source.read(int.from_bytes(header, "little")))
            if isinstance(message, wire.Shutdown):
                reply(sink, wire.Reply(True, wire.Done()))
                return
            try:
                answer = wire.Reply(True, self.handlers[type(message)](message))
            except (Exception, SystemExit) as error:
                answer = wire.Reply(False, error=as_error(error), log_tail=traceback.format_exc()[-LOG_TAIL:])
            reply(sink, answer)

    def load(self, message: wire.Load) -> wire.Loaded:
        from engine.loader import load_forward, make_pool
        from engine.models.weights import with_layers

        start = time.perf_counter()
        model = with_layers(self.model, message.layers)
        writer = hashlib.sha256(
            f"{message.artifact_hash}:{self.weights_hash}:{model.config.num_hidden_layers}".encode()
        ).hexdigest()
        forward = load_forward(Path(message.path), message.artifact_hash, model, self.threads)
        pool = make_pool(forward, message.kv_bytes or self.kv_bytes, writer)
        self.resident[message.artifact_hash, message.layers] = Resident(forward, pool, Path(message.path))
        blocks, size = len(pool.tensors[0]), sum(t.nbytes for t in pool.tensors)
        return wire.Loaded(writer, blocks, pool.block_size, pool.bytes_per_block, time.perf_counter() - start, size)

    def unload(self, message: wire.Unload) -> wire.Done:
        self.resident.pop((message.artifact_hash, message.layers), None)
        return wire.Done()

    def find(self, message: Any) -> Resident:
        found = self.resident.get((message.artifact_hash, message.layers))
        if found is None:
            raise NotResident(f"candidate {message.artifact_hash[:12]} with layers={message.layers} was not loaded")
        return found

    def step(self, message: wire.Step) -> wire.StepDone:
        from engine.sampler import sample

        start = time.perf_counter()
        batch = to_batch(message.batch)
        logits = self.run(self.find(message), batch)
        done = sample(logits, message.sample) if message.sample else wire.StepDone()
        raw = logits.numpy().tobytes() if message.want_logits else b""
        return msgspec.structs.replace(done, logits=raw, host_s=time.perf_counter() - start)

    def run(self, resident: Resident, batch: Any) -> Any:
        """Float32 logits [R, vocab], checked. Raises BadOutput."""
        import torch

        with torch.inference_mode():
            logits = resident.forward(batch, resident.pool)
            expected = (len(batch.logit_rows), self.model.config.vocab_size)
            if type(logits) is not torch.Tensor or logits.dtype != torch.float32 or tuple(logits.shape) != expected:
                got = f"{type(logits).__name__} {getattr(logits, 'dtype', '')} {tuple(getattr(logits, 'shape', ()))}"
                raise BadOutput(f"expected a float32 tensor {expected}, got {got}")
            if not bool(torch.isfinite(logits.sum())):
                raise BadOutput("the logits hold NaN or infinity")
            return logits

    def prepare(self, message: wire.Prepare) -> wire.Done:
        self.schedules[message.schedule_id] = [to_batch(b) for b in message.steps]
        return wire.Done()

    def timed_block(self, message: wire.TimedBlock) -> wire.BlockDone:
        resident, schedule = self.find(message), self.schedules[message.schedule_id]
        start = time.perf_counter()
        argmax: list[int] = []
        for _ in range(message.repeats):
            argmax = []
            for batch in schedule:
                argmax += self.run(resident, batch).argmax(-1).tolist()
        return wire.BlockDone(time.perf_counter() - start, argmax)

    def trace(self, message: wire.Trace) -> wire.Traced:
        from engine.trace import behaviour

        resident = self.find(message)
        try:
            steps = [to_batch(b) for b in message.steps]
            return wire.Traced(behaviour(resident.forward, resident.pool, steps, resident.folder))
        except Exception as error:  # a program may refuse to be looked at; it is then like no other
            return wire.Traced("", f"{type(error).__name__}: {error}")

    def fill(self, message: wire.Fill) -> wire.Done:
        import numpy as np
        import torch

        blocks = torch.from_numpy(np.frombuffer(message.blocks, np.int32).astype(np.int64))
        with torch.inference_mode():
            for tensor in self.find(message).pool.tensors:
                tensor[blocks] = filling(tensor, message.value)
        return wire.Done()

    def status(self, message: wire.Status) -> wire.HostStatus:
        import torch

        rss = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        newest = next(reversed(self.resident.values()), None)
        report = getattr(newest.forward, "dispatch", {}) if newest else {}
        dispatch = {str(name): str(value) for name, value in report.items()}
        mapping = f"{self.weights_hash}@{next(iter(self.model.weights.values())).data_ptr():x}"
        return wire.HostStatus(
            os.getpid(), rss, torch.get_num_threads(), list(self.resident), mapping, dispatch, self.sandbox_layers
        )


def filling(tensor: Any, value: float) -> float:
    """What poisons `tensor` as `value` does floats: integers, which have no NaN, take their extremes, the largest for NaN."""
    import torch

    if value == 0 or tensor.is_floating_point() or tensor.is_complex():
        return value
    if tensor.dtype == torch.bool:
        return True
    limits = torch.iinfo(tensor.dtype)
    return limits.max if not value < 0 else limits.min or limits.max  # the smallest of unsigned ones is what is clean


def to_batch(raw: wire.WireBatch) -> Any:
    """Raw little-endian arrays to a `contract.Batch` of tensors of its own."""
    import numpy as np
    import torch

    from engine.contract import Batch

    def tensor(data: bytes, dtype: type, to: type) -> Any:
        return torch.from_numpy(np.frombuffer(data, dtype).astype(to))

    return Batch(
        token_ids=tensor(raw.token_ids, np.int32, np.int64),
        positions=tensor(raw.positions, np.int32, np.int64),
        query_start=tensor(raw.query_start, np.int32, np.int32),
        context_len=tensor(raw.context_len, np.int32, np.int32),
        block_table=tensor(raw.block_table, np.int32, np.int32).view(raw.sequences, -1),
        slot=tensor(raw.slot, np.int64, np.int64),
        logit_rows=tensor(raw.logit_rows, np.int32, np.int64),
        request_id=tensor(raw.request_id, np.int64, np.int64),
        phase=tensor(raw.phase, np.int8, np.int8),
    )


def weights_hash(folder: Path, dtype: str) -> str:
    """Names the weights by their files' sizes and headers and the dtype served; cheap, and changes when the files do."""
    digest = hashlib.sha256(dtype.encode())
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as handle:
            digest.update(path.name.encode() + path.stat().st_size.to_bytes(8, "little") + handle.read(1 << 16))
        digest.update(path.stat().st_mtime_ns.to_bytes(8, "little"))
    return digest.hexdigest()


if __name__ == "__main__":
    main()
