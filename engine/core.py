"""The engine: schedule, run, postprocess. Torch-free: the model runs in a host, behind a pipe.

One *lane* for each resident version: its own scheduler, block manager and pool. New requests go to the newest lane; older
ones drain, or after a time limit have their sequences recomputed on the newest. Keys and values written by one version are
never read by another.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from engine.artifacts import Artifact
from engine.batching import make_batch
from engine.client import HostClient, HostFailure
from engine.kv_cache import BlockManager
from engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from engine.sequence import GenerationRequest, InvalidRequest, Sequence, TokenEvent
from engine.wire import Load, Loaded, Step, StepDone, Unload

STEP_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 180.0
SWAP_POLICIES = ("drain", "recompute")


@dataclass
class Lane:
    """One version at work."""

    artifact: Artifact
    loaded: Loaded
    scheduler: Scheduler
    drain_until: float = math.inf
    sequences: dict[int, Sequence] = field(default_factory=dict)


class Engine:
    """Generates tokens for many requests with one host. Not thread-safe: one thread steps it and talks to it."""

    def __init__(self, host: HostClient, artifact: Artifact, *, layers: int = 0, kv_bytes: int = 0, max_context: int = 0) -> None:
        if host.ready is None:
            raise RuntimeError("start the host before its engine")
        self.host, self.layers = host, layers
        # while a swap drains, two pools stand side by side: each gets half of the budget
        self.kv_bytes = kv_bytes or host.kv_bytes // 2
        self.max_context = min(max_context or host.ready.max_context, host.ready.max_context)
        self.steps = self.prompt_tokens = self.generated_tokens = 0
        self.lanes: list[Lane] = [self._open(artifact)]

    @property
    def artifact(self) -> Artifact:
        """The version that new requests run on."""
        return self.lanes[-1].artifact

    @property
    def has_work(self) -> bool:
        return any(lane.scheduler.has_work for lane in self.lanes)

    def add(self, request: GenerationRequest) -> None:
        """Queues a request. Raises InvalidRequest for one that can never run, before anything is scheduled."""
        lane = self.lanes[-1]
        self.validate(request)
        sequence = Sequence(request)
        lane.sequences[request.id] = sequence
        lane.scheduler.waiting.append(sequence)

    def validate(self, request: GenerationRequest) -> None:
        prompt, lane = len(request.prompt_ids), self.lanes[-1]
        if prompt == 0:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")
        if prompt >= self.max_context:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and the context holds {self.max_context}, the answer included",
                "prompt",
                "context_length_exceeded",
            )
        vocab = self.host.ready.vocab_size if self.host.ready else 0
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
            raise InvalidRequest(f"a prompt token id is outside 0..{vocab - 1}", "prompt")
        blocks = lane.scheduler.blocks
        most = min(prompt + request.max_tokens, self.max_context)
        if -(-most // blocks.block_size) > blocks.total:
            raise InvalidRequest(
                f"prompt and answer may take {most} tokens and the KV cache holds {blocks.total * blocks.block_size}; ask for fewer",
                "max_tokens",
                "context_length_exceeded",
            )

    def abort(self, request_id: int) -> bool:
        """Drops a request; its blocks are free at once. False when it is not here."""
        for lane in self.lanes:
            sequence = lane.sequences.pop(request_id, None)
            if sequence is not None:
                lane.scheduler.remove(sequence)
                return True
        return False

    def step(self) -> list[TokenEvent]:
        """One step of every lane that has work: schedule, run, postprocess."""
        self._retire()
        events: list[TokenEvent] = []
        for lane in self.lanes:
            plan = lane.scheduler.schedule()
            if plan:
                events += self._postprocess(lane, plan, self._run(lane, plan))
        return events

    def swap(self, artifact: Artifact, policy: str = "drain", deadline_s: float = 30.0) -> float:
        """Makes `artifact` the version of new requests and returns the seconds it took. The host and its weights stay.

        `drain` lets running sequences end on their version for `deadline_s`, then recomputes the rest on the new one;
        `recompute` moves them at once. Raises HostFailure, leaving everything as it was.
        """
        if policy not in SWAP_POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(SWAP_POLICIES)}")
        start = time.perf_counter()
        if artifact.hash != self.artifact.hash:
            back = next((lane for lane in self.lanes if lane.artifact.hash == artifact.hash), None)
            if back is None:
                back = self._open(artifact)
            else:
                self.lanes.remove(back)
                back.drain_until = math.inf
            limit = 0.0 if policy == "recompute" else deadline_s
            for lane in self.lanes:
                lane.drain_until = min(lane.drain_until, time.monotonic() + limit)
            self.lanes.append(back)
            self._retire()
        return time.perf_counter() - start

    def reset(self, artifact: Artifact) -> list[TokenEvent]:
        """After the host was restarted: every request ends with an error event and one fresh lane is open."""
        lost = [s for lane in self.lanes for s in lane.sequences.values()]
        version = self.artifact.hash
        self.lanes = [self._open(artifact)]
        reason = "the engine was restarted while this request ran; send it again"
        return [TokenEvent(s.id, -1, version, finish_reason="error", error=reason) for s in lost]

    def stats(self) -> dict[str, float]:
        schedulers = [lane.scheduler for lane in self.lanes]
        return {
            "running": sum(len(s.running) for s in schedulers),
            "waiting": sum(len(s.waiting) for s in schedulers),
            "preemptions": sum(s.preemptions for s in schedulers),
            "lanes": len(self.lanes),
            "kv_blocks": schedulers[-1].blocks.total,
            "kv_blocks_free": schedulers[-1].blocks.available,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
        }

    def _open(self, artifact: Artifact) -> Lane:
        message = Load(artifact.hash, str(artifact.path), self.layers, self.kv_bytes)
        loaded = self.host.call(message, LOAD_TIMEOUT_S)
        assert isinstance(loaded, Loaded)
        blocks = BlockManager(loaded.blocks, loaded.block_size, loaded.writer_hash)
        return Lane(artifact, loaded, Scheduler(SchedulerConfig.from_settings(artifact.manifest.settings), blocks))

    def _run(self, lane: Lane, plan: list[Scheduled]) -> StepDone:
        batch = make_batch([p.step() for p in plan], lane.loaded.block_size)
        rows = [p.sequence.sample_row() for p in plan if p.samples]
        done = self.host.call(Step(lane.artifact.hash, batch, rows, self.layers), STEP_TIMEOUT_S)
        assert isinstance(done, StepDone)
        if len(done.token_ids) != len(rows):
            raise HostFailure("bad_output", f"{len(rows)} rows were sampled and {len(done.token_ids)} tokens came back")
        self.steps += 1
        return done

    def _postprocess(self, lane: Lane, plan: list[Scheduled], done: StepDone) -> list[TokenEvent]:
        events, row = [], 0
        for p in plan:
            sequence = p.sequence
            sequence.computed = p.stop
            self.prompt_tokens += p.stop - p.start if not sequence.output else 0
            if p.stop // lane.loaded.block_size > sequence.allocation.published:
                lane.scheduler.blocks.publish(sequence.allocation, sequence.tokens(0, p.stop), p.stop)
            if not p.samples:
                continue
            token = done.token_ids[row]
            sequence.output.append(token)
            reason = sequence.finish_reason(token, self.max_context)
            events.append(
                TokenEvent(
                    sequence.id, token, lane.artifact.hash, done.logprobs[row], done.top[row], reason, sequence.cached_tokens
                )
            )
            row += 1
            if reason:
                del lane.sequences[sequence.id]
                lane.scheduler.remove(sequence)
        self.generated_tokens += row
        return events

    def _retire(self) -> None:
        """Moves what outstayed its drain to the newest lane and unloads lanes that are empty."""
        newest = self.lanes[-1]
        for lane in self.lanes[:-1]:
            if lane.scheduler.has_work and time.monotonic() >= lane.drain_until:
                for sequence in sorted(lane.sequences.values(), key=lambda s: s.id):
                    lane.scheduler.remove(sequence)
                    sequence.computed = 0
                    newest.sequences[sequence.id] = sequence
                    newest.scheduler.waiting.append(sequence)
                lane.sequences.clear()
            if not lane.scheduler.has_work:
                self.lanes.remove(lane)
                self.host.call(Unload(lane.artifact.hash, self.layers))
