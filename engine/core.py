"""The engine: schedule, run, postprocess. Torch-free: the model runs in a host, behind a pipe.

One *lane* for each resident version: its own scheduler, block manager and pool. New requests go to the newest lane;
older ones drain, or after a time limit have their sequences recomputed on the newest. Keys and values written by one
version are never read by another.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.artifacts import Artifact
from engine.batching import SeqStep, make_batch
from engine.client import HostClient, HostFailure
from engine.kv_cache import Allocation, BlockManager
from engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from engine.sequence import GenerationRequest, InvalidRequest, Sequence, TokenEvent
from engine.speculate import accepted
from engine.wire import Load, Loaded, SampleRow, Step, StepDone, Unload

STEP_TIMEOUT_S = 120.0
LOAD_TIMEOUT_S = 180.0
SWAP_POLICIES = ("drain", "recompute")
MAX_RESTARTS = 1  # engine hosts that may end under a request before it is blamed


@dataclass
class Lane:
    """One version at work. No sequence in it grows past `limit` tokens."""

    artifact: Artifact
    loaded: Loaded
    scheduler: Scheduler
    limit: int
    drain_until: float = math.inf
    sequences: dict[int, Sequence] = field(default_factory=dict)

    def add(self, sequence: Sequence) -> None:
        self.sequences[sequence.id] = sequence
        self.scheduler.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        del self.sequences[sequence.id]
        self.scheduler.remove(sequence)


class Engine:
    """Generates tokens for many requests with one host. Not thread-safe: one thread steps it and talks to it."""

    def __init__(
        self,
        host: HostClient,
        artifact: Artifact,
        config: SchedulerConfig | None = None,
        *,
        layers: int = 0,
        kv_bytes: int = 0,
        max_context: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`config` overrides the artefacts' scheduler settings. Raises HostFailure when `artifact` does not run."""
        if host.ready is None:
            raise RuntimeError("start the host before its engine")
        self.host, self.config, self.layers, self.clock = host, config, layers, clock
        # while a swap drains, two pools stand side by side: each gets half of the budget
        self.kv_bytes = kv_bytes or host.kv_bytes // 2
        self.max_context = min(max_context or host.ready.max_context, host.ready.max_context)
        self.steps = self.prompt_tokens = self.generated_tokens = self.cached_tokens = self._preemptions = 0
        self.drafted_tokens = self.accepted_tokens = 0
        self._events: list[TokenEvent] = []
        self._current: tuple[Lane, list[Scheduled]] | None = None
        self.lanes: list[Lane] = [self._open(artifact)]

    @property
    def artifact(self) -> Artifact:
        """The version that new requests run on."""
        return self.lanes[-1].artifact

    @property
    def has_work(self) -> bool:
        return any(lane.sequences for lane in self.lanes) or len(self.lanes) > 1

    def add(self, request: GenerationRequest) -> None:
        """Queues a request. Raises InvalidRequest for one that can never run, before anything is scheduled."""
        self.validate(request)
        self.lanes[-1].add(Sequence(request))

    def validate(self, request: GenerationRequest) -> None:
        prompt, limit = len(request.prompt_ids), self.lanes[-1].limit
        vocab = self.host.ready.vocab_size if self.host.ready else 0
        if prompt == 0:
            raise InvalidRequest("the prompt is empty", "prompt")
        if request.max_tokens < 1:
            raise InvalidRequest(f"max_tokens must be at least 1, not {request.max_tokens}", "max_tokens")
        if prompt >= limit:
            raise InvalidRequest(
                f"the prompt has {prompt} tokens and the context holds {limit}, the answer included; shorten it",
                "prompt",
                "context_length_exceeded",
            )
        if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= vocab:
            raise InvalidRequest(f"a prompt token id is outside 0..{vocab - 1}", "prompt")

    def abort(self, request_id: int) -> bool:
        """Drops a request; its blocks are free at once. False when it is not here."""
        for lane in self.lanes:
            if request_id in lane.sequences:
                lane.remove(lane.sequences[request_id])
                return True
        return False

    def step(self) -> list[TokenEvent]:
        """One step of every lane that has work: schedule, run, postprocess.

        Raises HostFailure. When it is fatal, restart the host and call `recover`; otherwise call `fail_step`.
        """
        self._retire()
        for lane in list(self.lanes):
            plan = lane.scheduler.schedule()
            if plan:
                self._current = lane, plan
                self._postprocess(lane, plan, self._run(lane, plan))
        self._current = None
        return self._take_events()

    def swap(self, artifact: Artifact, policy: str = "drain", deadline_s: float = 30.0) -> float:
        """Makes `artifact` the version of new requests and returns the seconds it took, its first steps included.

        `drain` lets running sequences end on their version for `deadline_s`, then recomputes the rest on the new one;
        `recompute` moves them at once. At most two versions are resident: what still drains from an earlier swap moves
        on first. The host and its weights stay. Raises HostFailure, leaving the version of new requests as it was.
        """
        if policy not in SWAP_POLICIES:
            raise ValueError(f"policy {policy!r} is not one of {', '.join(SWAP_POLICIES)}")
        start = time.perf_counter()
        if artifact.hash == self.artifact.hash:
            return 0.0
        back = next((lane for lane in self.lanes if lane.artifact.hash == artifact.hash), None)
        if back is not None:
            self.lanes.remove(back)
            back.drain_until = math.inf
        else:
            for lane in self.lanes[:-1]:
                lane.drain_until = -math.inf
            self._retire()
            back = self._open(artifact)
        until = -math.inf if policy == "recompute" else self.clock() + deadline_s
        for lane in self.lanes:
            lane.drain_until = min(lane.drain_until, until)
        self.lanes.append(back)
        return time.perf_counter() - start

    def recover(self) -> list[TokenEvent]:
        """After the host was restarted: one fresh lane, which computes every request again from its tokens so far.

        A request that was running when two hosts ended gets an error event instead. Raises HostFailure.
        """
        lost = [s for lane in self.lanes for s in lane.sequences.values()]
        artifact, self._current = self.artifact, None
        fresh = self._open(artifact)
        self._preemptions += sum(lane.scheduler.preemptions for lane in self.lanes)
        self.lanes = [fresh]
        for sequence in sorted(lost, key=lambda s: s.id):
            sequence.restarts += sequence.admitted
            sequence.allocation = Allocation()  # the blocks went with the host
            if sequence.restarts > MAX_RESTARTS:
                reason = "the engine ended twice while it ran this request; send it again"
                self._lose(sequence, reason, "engine_restarted")
            else:
                self._move(sequence, fresh)
        return self._take_events()

    def fail_step(self, reason: str) -> list[TokenEvent]:
        """Ends the sequences of a step that the host refused, with error events that give `reason`."""
        if self._current is not None:
            lane, plan = self._current
            self._current = None
            for p in plan:
                lane.remove(p.sequence)
                self._lose(p.sequence, reason, "engine_failed")
        return self._take_events()

    def fail_all(self, reason: str, code: str = "engine_restarted") -> list[TokenEvent]:
        """Ends every request with an error event, for when the host cannot be restarted."""
        self._current = None
        for lane in self.lanes:
            for sequence in list(lane.sequences.values()):
                lane.remove(sequence)
                self._lose(sequence, reason, code)
        return self._take_events()

    def stats(self) -> dict[str, float]:
        schedulers = [lane.scheduler for lane in self.lanes]
        return {
            "running": sum(len(s.running) for s in schedulers),
            "waiting": sum(len(s.waiting) for s in schedulers),
            "preemptions": self._preemptions + sum(s.preemptions for s in schedulers),
            "lanes": len(self.lanes),
            "kv_blocks": schedulers[-1].blocks.total,
            "kv_blocks_free": schedulers[-1].blocks.available,
            "steps": self.steps,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
        }

    def _open(self, artifact: Artifact) -> Lane:
        """Loads a version and runs its first steps, so that one that does not run never meets a request."""
        try:
            config = self.config or SchedulerConfig.from_settings(artifact.manifest.settings)
        except ValueError as error:
            message = f"The candidate's settings cannot be used: {error}."
            raise HostFailure("bad_settings", message, "Mend its manifest.") from None
        loaded = self.host.call(Load(artifact.hash, str(artifact.path), self.layers, self.kv_bytes), LOAD_TIMEOUT_S)
        assert isinstance(loaded, Loaded)
        try:
            self._warm_up(artifact, loaded, config.draft_tokens)
        except HostFailure as failure:
            if not failure.fatal:
                self.host.call(Unload(artifact.hash, self.layers))
            raise
        blocks = BlockManager(loaded.blocks, loaded.block_size, loaded.writer_hash)
        limit = min(self.max_context, loaded.blocks * loaded.block_size)
        return Lane(artifact, loaded, Scheduler(config, blocks, limit), limit)

    def _warm_up(self, artifact: Artifact, loaded: Loaded, drafts: int) -> None:
        """A prefill of two tokens, a decode and, with `drafts`, a verification. Nobody ever reads what they wrote."""
        table = list(range(-(-4 // loaded.block_size)))
        steps = [([0, 1], 0), ([2], 2), ([2, 3], 2)]
        for tokens, start in steps if drafts else steps[:2]:
            batch = make_batch([SeqStep(0, tokens, start, table, all_logits=start > 0)], loaded.block_size)
            rows = [SampleRow(temperature=0)] * (len(tokens) if start else 1)
            self.host.call(Step(artifact.hash, batch, rows, self.layers), STEP_TIMEOUT_S)

    def _run(self, lane: Lane, plan: list[Scheduled]) -> StepDone:
        batch = make_batch([p.step(lane.loaded.block_size) for p in plan], lane.loaded.block_size)
        rows = [row for p in plan if p.samples for row in p.sequence.sample_rows(p.drafts)]
        done = self.host.call(Step(lane.artifact.hash, batch, rows, self.layers), STEP_TIMEOUT_S)
        assert isinstance(done, StepDone)
        if len(done.token_ids) != len(rows):
            raise HostFailure("bad_output", f"{len(rows)} rows were sampled, {len(done.token_ids)} tokens came back.")
        self.steps += 1
        return done

    def _postprocess(self, lane: Lane, plan: list[Scheduled], done: StepDone) -> None:
        ended: list[Sequence] = []
        row = 0
        for p in plan:
            if not p.sequence.output:
                self.prompt_tokens += p.stop - p.start
            if p.samples:
                if self._keep(lane, p, done, row):
                    ended.append(p.sequence)
                row += 1 + len(p.drafts)
        lane.scheduler.finished(plan)
        for sequence in ended:
            lane.remove(sequence)

    def _keep(self, lane: Lane, p: Scheduled, done: StepDone, first: int) -> bool:
        """Appends the tokens from row `first` on that hold, up to the sequence's end. True when it has ended."""
        sequence, reason = p.sequence, None
        if not sequence.output:
            self.cached_tokens += sequence.cached_tokens
        held = accepted(p.drafts, done.token_ids[first:])
        for row in range(first, first + held + 1):
            token = done.token_ids[row]
            sequence.output.append(token)
            reason = sequence.finish_reason(token, lane.limit)
            logprob, top = done.logprobs[row], done.top[row]
            event = TokenEvent(sequence.id, token, lane.artifact.hash, logprob, top, reason, sequence.cached_tokens)
            self._events.append(event)
            self.generated_tokens += 1
            if reason:
                break
        self.drafted_tokens += len(p.drafts)
        self.accepted_tokens += min(held, row - first + 1)
        return reason is not None

    def _retire(self) -> None:
        """Moves what outstayed its drain to the newest lane and unloads lanes that are empty."""
        for lane in self.lanes[:-1]:
            if self.clock() >= lane.drain_until:
                for sequence in sorted(lane.sequences.values(), key=lambda s: s.arrival):
                    lane.remove(sequence)
                    self._move(sequence, self.lanes[-1])
            if not lane.sequences:
                self.lanes.remove(lane)
                self._preemptions += lane.scheduler.preemptions
                self.host.call(Unload(lane.artifact.hash, self.layers))

    def _move(self, sequence: Sequence, lane: Lane) -> None:
        if sequence.length < lane.limit:
            lane.add(sequence)
        else:
            reason = f"the new version's KV cache holds {lane.limit} tokens, fewer than this request needs"
            self._lose(sequence, reason, "engine_failed")

    def _lose(self, sequence: Sequence, reason: str, code: str) -> None:
        version = self.artifact.hash
        event = TokenEvent(sequence.id, -1, version, finish_reason="error", error=reason, error_code=code)
        self._events.append(event)

    def _take_events(self) -> list[TokenEvent]:
        """What happened since last asked. Tokens of a lane that ran survive the failure of the next lane's step."""
        events, self._events = self._events, []
        return events
