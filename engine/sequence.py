"""A request as the engine sees it: token ids in, token events out. No text. Torch-free."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.kv_cache import Allocation
from engine.wire import SampleRow

ID_BYTES = array("i").itemsize

LIMITS = (
    ("temperature", 0, 2),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("top_k", -1, 1 << 31),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("repetition_penalty", 0.01, 100),
    ("min_tokens", 0, 1 << 31),
)


class InvalidRequest(ValueError):
    """A request that can never run; `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.code = param, code


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Raises InvalidRequest naming the field that is out of range."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1 are off
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int = -1  # alternatives to return; -1 is none, 0 the chosen token's only
    ignore_eos: bool = False
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, low, high in LIMITS:
            value = getattr(self, name)
            if not low <= value <= high:
                raise InvalidRequest(f"{name} must lie between {low} and {high}, not {value}", name)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    id: int
    prompt_ids: list[int]
    max_tokens: int
    sampling: SamplingParams = SamplingParams()
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One generated token, or the end of a request that yields none (`token_id` -1).

    `version` is the hash of the artefact that ran.
    """

    request_id: int
    token_id: int
    version: str
    logprob: float = float("nan")
    top: list[tuple[int, float]] = field(default_factory=list)
    finish_reason: str | None = None  # stop | length | abort | error
    cached_tokens: int = 0
    error: str = ""
    error_code: str = ""  # engine_failed: the step was refused; engine_restarted: it may well work when sent again


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in flight. `computed` counts tokens whose keys and values are in the cache."""

    request: GenerationRequest
    output: list[int] = field(default_factory=list)
    allocation: Allocation = field(default_factory=Allocation)
    computed: int = 0
    cached_tokens: int = 0
    admitted: bool = False
    arrival: int = 0  # order within its scheduler; the lower goes first
    restarts: int = 0  # engine hosts that ended while it ran
    _packed: bytearray = field(default_factory=bytearray, init=False, repr=False)

    @property
    def id(self) -> int:
        return self.request.id

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids start..stop of prompt and output together."""
        prompt = self.request.prompt_ids
        n = len(prompt)
        if start >= n:
            return self.output[start - n : stop - n]
        return prompt[start:stop] + (self.output[: stop - n] if stop > n else [])

    def packed(self) -> bytearray:
        """Prompt and output as int32, to be searched and not to be changed. Costs what was added since last asked."""
        known = len(self._packed) // ID_BYTES
        self._packed += array("i", self.tokens(known, self.length)).tobytes()
        return self._packed

    def sample_rows(self, drafts: tuple[int, ...] = ()) -> list[SampleRow]:
        """How to draw the next token, and then the one after each of `drafts`, should those before hold."""
        return [self._sample_row(drafts[:i]) for i in range(len(drafts) + 1)]

    def _sample_row(self, drafts: tuple[int, ...]) -> SampleRow:
        s, n = self.request.sampling, len(self.output) + len(drafts)
        penalised = s.penalised
        return SampleRow(
            temperature=s.temperature,
            top_p=s.top_p,
            top_k=max(s.top_k, 0),
            min_p=s.min_p,
            seed=s.seed,
            draw=n,
            logprobs=s.logprobs,
            repetition_penalty=s.repetition_penalty,
            presence_penalty=s.presence_penalty,
            frequency_penalty=s.frequency_penalty,
            prompt_ids=array("i", self.request.prompt_ids).tobytes() if penalised else b"",
            output_ids=array("i", [*self.output, *drafts]).tobytes() if penalised else b"",
            logit_bias=s.logit_bias,
            banned=[*self.request.eos_ids, *s.stop_token_ids] if n < s.min_tokens else [],
            follows=drafts[-1] if drafts else -1,
        )

    def finish_reason(self, token: int, limit: int) -> str | None:
        """Why `token`, just appended, ends the sequence, or None. `limit` is in tokens, prompt included."""
        s = self.request.sampling
        if len(self.output) >= s.min_tokens and self.stops(token):
            return "stop"
        return "length" if len(self.output) >= self.request.max_tokens or self.length >= limit else None

    def stops(self, token: int) -> bool:
        s = self.request.sampling
        return token in s.stop_token_ids or (not s.ignore_eos and token in self.request.eos_ids)
