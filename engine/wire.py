"""Messages that cross process boundaries in the engine. Torch-free; no pickle: length-prefixed msgpack of typed structs.

Frame: 4-byte little-endian length, then msgpack. The caller sends one of `Request`, the host answers with one `Reply`, in
order. Index arrays travel as raw little-endian bytes with the dtype named by the field. Times in seconds. A host's own times
are diagnostics: the caller's clock decides.
"""

from __future__ import annotations

from typing import Any

import msgspec

MAX_FRAME = 1 << 30


class Msg(msgspec.Struct, tag_field="type", frozen=True, omit_defaults=True):
    """Base of every message; the class name is the tag."""


class WireBatch(msgspec.Struct, frozen=True):
    """A `contract.Batch` as bytes. S sequences, T query tokens, R logit rows, B block-table columns."""

    sequences: int
    token_ids: bytes  # int32 [T]
    positions: bytes  # int32 [T]
    query_start: bytes  # int32 [S+1]
    context_len: bytes  # int32 [S]
    block_table: bytes  # int32 [S*B]
    slot: bytes  # int64 [T]
    logit_rows: bytes  # int32 [R]
    request_id: bytes  # int64 [S]
    phase: bytes  # int8 [S]


class SampleRow(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to sample one logit row. Everything the sampler needs is here: the host keeps no per-request state."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off
    min_p: float = 0.0
    seed: int = 0  # with `draw`, names the random number: the same pair draws the same number in any batch
    draw: int = 0  # index of the generated token
    logprobs: int = -1  # alternatives to return; -1 is none, 0 the chosen token's only
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    prompt_ids: bytes = b""  # int32, only when a penalty needs it
    output_ids: bytes = b""  # int32, only when a penalty needs it
    logit_bias: dict[int, float] = {}
    banned: list[int] = []  # end-of-sequence and stop ids while min_tokens is not met
    follows: int = -1  # the draft in this row's query; the row counts only when the one before it drew that token


class Load(Msg, frozen=True):
    """Make the candidate in folder `path` resident, with `layers` layers (0: all) and a pool within `kv_bytes`."""

    artifact_hash: str
    path: str
    layers: int = 0
    kv_bytes: int = 0  # 0: the host's default


class Unload(Msg, frozen=True):
    artifact_hash: str
    layers: int = 0


class Step(Msg, frozen=True):
    """Run one step and sample its rows; with `want_logits` the float32 logits come back too."""

    artifact_hash: str
    batch: WireBatch
    sample: list[SampleRow] = []
    layers: int = 0
    want_logits: bool = False


class Prepare(Msg, frozen=True):
    """Keep a schedule of steps for `TimedBlock`, so that decoding it is outside the timed span."""

    schedule_id: str
    steps: list[WireBatch] = []


class TimedBlock(Msg, frozen=True):
    """Run a prepared schedule `repeats` times. The caller's clock around it is the measurement."""

    artifact_hash: str
    schedule_id: str
    layers: int = 0
    repeats: int = 1


class Trace(Msg, frozen=True):
    """Run steps untimed and say what the candidate does in them."""

    artifact_hash: str
    steps: list[WireBatch]
    layers: int = 0


class Fill(Msg, frozen=True):
    """Overwrite whole blocks of a pool with one value (poisoning in verification)."""

    artifact_hash: str
    blocks: bytes  # int32
    value: float
    layers: int = 0


class Status(Msg, frozen=True):
    pass


class Shutdown(Msg, frozen=True):
    pass


Request = Load | Unload | Step | Prepare | TimedBlock | Trace | Fill | Status | Shutdown


class HostError(msgspec.Struct, frozen=True):
    """`code` is stable and machine-readable, `message` says what happened, `mend` what to do about it."""

    code: str
    message: str
    mend: str = ""


class Loaded(Msg, frozen=True):
    writer_hash: str
    blocks: int
    block_size: int
    bytes_per_block: int
    build_s: float
    memory_bytes: int = 0


class StepDone(Msg, frozen=True):
    """One entry a sampled row. `top` pairs (token id, logprob), best first."""

    token_ids: list[int] = []  # -1 for a row that follows a draft which was not drawn
    logprobs: list[float] = []  # of the chosen token; NaN where not asked for
    top: list[list[tuple[int, float]]] = []
    logits: bytes = b""  # float32 [R, vocab] when wanted
    host_s: float = 0.0


class BlockDone(Msg, frozen=True):
    """`argmax` holds, for the last repeat, the greedy token of every logit row of every step, in order."""

    host_s: float
    argmax: list[int] = []


class Traced(Msg, frozen=True):
    """`behaviour` is equal for programs that do the same (`engine.trace`); empty when it could not be recorded."""

    behaviour: str
    problem: str = ""


class HostStatus(Msg, frozen=True):
    pid: int
    rss_bytes: int
    threads: int
    resident: list[tuple[str, int]] = []  # (artifact_hash, layers)
    weights_mapping: str = ""  # names where the weights are mapped; unchanged by a swap
    dispatch: dict[str, str] = {}  # by operator of the newest candidate: which implementation it went to, or calls
    sandbox: list[str] = []  # layers applied


class Done(Msg, frozen=True):
    pass


class Ready(Msg, frozen=True):
    """The host's first message, once the weights are mapped."""

    pid: int
    load_s: float
    weights_hash: str
    vocab_size: int
    max_context: int
    layers: int
    dtype: str
    weight_bytes: int


Body = Loaded | StepDone | BlockDone | Traced | HostStatus | Done | Ready


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    ok: bool
    body: Body | None = None
    error: HostError | None = None
    log_tail: str = ""


class VersionShare(msgspec.Struct, frozen=True):
    """One version in a plan. Roles: `stable` (exactly one) and `canary` (at most one)."""

    version_id: str
    artifact_hash: str
    share: float
    role: str


class ServingPlan(msgspec.Struct, frozen=True):
    """Who answers an endpoint's requests. Applied whole, acknowledged by generation, kept on disk."""

    endpoint: str
    generation: int
    versions: list[VersionShare]


class EndpointSpec(msgspec.Struct, frozen=True):
    """What the gateway needs to serve an endpoint. `slug` is the `model` name that clients send."""

    slug: str
    model_path: str
    dtype: str = "bfloat16"
    threads: int = 0  # 0: all cores
    kv_bytes: int = 512 * 1024 * 1024
    max_context: int = 0  # 0: the model's own
    tensor_parallel: int = 1  # these three say how many devices share a version; fixed for the endpoint's life
    pipeline_parallel: int = 1
    expert_parallel: int = 1


class RequestRecord(msgspec.Struct, frozen=True):
    """The shape of one answered request, never its text."""

    ts: float  # unix time of arrival
    endpoint: str
    version_id: str
    role: str
    isl: int
    osl: int
    cached_tokens: int
    ttft_s: float
    e2el_s: float
    status: int


def encode(message: Any) -> bytes:
    """One frame. Raises ValueError past MAX_FRAME."""
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a message of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return len(body).to_bytes(4, "little") + body
