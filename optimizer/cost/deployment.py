"""A model served on devices that are not here, taken apart into physical times by a maker's specifications alone.

Every time is of one device, in seconds, at the specified peak: `Times` of a decode step and of the prefill of a prompt. How
much slower real serving is, `serving.py` says.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from kernels.hardware import Datasheet
from optimizer.cost.architecture import Architecture

FRAMEWORKS = ("sglang", "trtllm", "vllm")
NUMBER_BYTES = {
    "bfloat16": 2.0,
    "fp8": 1.0,
    "fp4": 0.5 + 1 / 16,
    "int4": 0.5 + 1 / 32,
}  # with a scale for 16 or 64 numbers
MEMORY_SHARE = 0.9  # of a device's memory that engines use, as all three do by default
MICROSECOND = 1e-6
LOAD_DAMPING = 0.9  # how waiting grows with concurrency: a little less than as much


class DeploymentError(ValueError):
    """A deployment that cannot be; the message names the mend."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one device. Launches and exchanges are counts in microseconds: what one costs is fitted."""

    dense: float  # matrices that every token goes through: the longer of reading and multiplying
    experts: float
    context: float  # keys, values and states read
    attention: float  # scores and sums, at the bfloat16 peak
    exchange: float  # activations between devices, at the link's rate in one direction
    exchanges: float
    layers: float
    expert_layers: float

    @property
    def floor(self) -> float:
        """The roofline: no launch, no exchange, everything at its peak, one operator after the other."""
        return self.dense + self.experts + max(self.context, self.attention)

    def values(self) -> tuple[float, ...]:
        return tuple(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True)
class Deployment:
    """One serving replica under a steady load: `concurrency` requests of `isl` tokens in and `osl` out, a new one for each done.

    `tensor` devices share every matrix; `ranks` such groups each serve their part of the requests and share the experts.
    `expert_parallel` is recorded: with all experts as likely, it reads the same bytes as slicing each. Raises DeploymentError.
    """

    device: Datasheet
    model: Architecture
    framework: str
    isl: int
    osl: int
    concurrency: int
    weights: str = "bfloat16"
    kv: str = "bfloat16"
    tensor: int = 1
    ranks: int = 1
    expert_parallel: bool = False
    prefill_apart: bool = False  # prompts are prefilled by devices of their own

    def __post_init__(self) -> None:
        for name, known in (("weights", NUMBER_BYTES), ("kv", ("bfloat16", "fp8"))):
            if (value := getattr(self, name)) not in known:
                raise DeploymentError(f"{name} {value!r} is not known: name one of {', '.join(known)}.")
        for name in ("isl", "osl", "concurrency", "tensor", "ranks"):
            if getattr(self, name) < 1:
                raise DeploymentError(f"{name} is {getattr(self, name)}: give at least 1.")

    @property
    def devices(self) -> int:
        return self.tensor * self.ranks

    @property
    def dense_weights(self) -> str:
        below_eight = NUMBER_BYTES[self.weights] < 1
        return "bfloat16" if below_eight and self.model.four_bit_experts_only else self.weights

    @property
    def kv_copies(self) -> float:
        """Devices of a group that hold the same keys: there are fewer heads than devices."""
        return self.tensor / min(self.tensor, self.model.kv_heads)

    @property
    def weight_bytes(self) -> float:
        """On one device."""
        m = self.model
        outside = (m.attention_numbers + m.mlp_numbers) * NUMBER_BYTES[self.dense_weights] + 2 * m.head_numbers * 2
        experts = m.expert_layers * m.experts * m.expert_numbers * NUMBER_BYTES[self.weights]
        return outside / self.tensor + experts / self.devices

    @property
    def sequence_bytes(self) -> float:
        """That a whole request holds on the devices of its group."""
        kv = self.model.seen(self.isl + self.osl) * self.model.kv_numbers * NUMBER_BYTES[self.kv]
        return kv * self.kv_copies + self.model.state_bytes

    @property
    def fits(self) -> bool:
        return self.weight_bytes < self.device.memory

    @property
    def room(self) -> float:
        """Requests that have room for their keys and values at once, at least one."""
        free = max(MEMORY_SHARE * self.device.memory - self.weight_bytes, 0.02 * self.device.memory) * self.devices
        return max(1.0, free / self.sequence_bytes)

    @property
    def running(self) -> float:
        return min(float(self.concurrency), self.room)

    def decode(self) -> Times:
        """A step of all running requests, halfway through their answers."""
        tokens, seen = self.running, self.model.seen(self.isl + self.osl / 2)
        flops = tokens * seen * self.model.attention_flops(absorbed=True)
        return self._step(tokens, tokens, tokens * seen, flops)

    def prefill(self) -> Times:
        """One prompt on every rank."""
        tokens = float(self.isl * self.ranks)
        flops = tokens * self.model.seen(self.isl) / 2 * self.model.attention_flops(absorbed=False)
        return self._step(tokens, self.ranks, 0.0, flops)

    def prompts_a_step(self) -> float:
        """Prompts that a rank prefills for each step it decodes; 0 when they are prefilled elsewhere."""
        return 0.0 if self.prefill_apart else self.running / self.ranks / self.osl

    def waiting_prompts(self) -> float:
        """The part of a rank's load that a new prompt may find before it."""
        return (self.concurrency / self.ranks) ** LOAD_DAMPING

    def turned_away(self) -> float:
        """Requests that wait for room, for each that runs."""
        return max(0.0, self.concurrency - self.room) / self.room

    def _step(self, tokens: float, rows: float, read: float, attention_flops: float) -> Times:
        """`tokens` of all ranks together, `rows` of them with logits; `read` positions of keys and values."""
        m, d = self.model, self.device
        bandwidth, link = d.read_gbs * 1e9, d.link_gbs * 1e9 / 2
        numbers, head = m.attention_numbers + m.mlp_numbers, m.head_numbers
        dense_read = (numbers * NUMBER_BYTES[self.dense_weights] + head * 2) / self.tensor / bandwidth
        dense_multiplied = 2 * tokens * numbers / self._rate(self.dense_weights) + 2 * rows * head / self._rate(
            "bfloat16"
        )
        experts = m.expert_layers * m.expert_numbers / self.devices
        experts_read = experts * m.experts_touched(tokens) * NUMBER_BYTES[self.weights] / bandwidth
        experts_multiplied = 2 * tokens * experts * m.experts_per_token / self._rate(self.weights)
        kept = read * m.kv_numbers * NUMBER_BYTES[self.kv] * self.kv_copies + 2 * rows * m.state_bytes
        exchange, exchanges = self._exchange(tokens, link)
        return Times(
            dense=max(dense_read, dense_multiplied / self.devices),
            experts=max(experts_read, experts_multiplied),
            context=kept / self.devices / bandwidth,
            attention=attention_flops / self.devices / self._rate("bfloat16"),
            exchange=exchange,
            exchanges=exchanges * MICROSECOND,
            layers=m.layers * MICROSECOND,
            expert_layers=m.expert_layers * MICROSECOND,
        )

    def _exchange(self, tokens: float, link: float) -> tuple[float, int]:
        """Seconds of the bytes that leave one device, and how often devices meet."""
        m, t = self.model, self.tensor
        activations = m.hidden * 2 * tokens / self.ranks
        seconds, meetings = 0.0, 0
        if t > 1:  # two all-reduces a layer, each a scatter and a gather
            seconds += 2 * m.layers * activations * 2 * (t - 1) / t / link
            meetings += 2 * m.layers
        if self.ranks > 1 and m.experts:  # tokens to their experts and back
            copies = min(m.experts_per_token, self.devices)
            seconds += 2 * m.expert_layers * activations / t * copies / link
            meetings += 2 * m.expert_layers
        return seconds, meetings

    def _rate(self, number: str) -> float:
        """Operations a second; a format the device does not multiply is widened to bfloat16 first."""
        native = {"fp8": self.device.gemm_fp8_flops, "fp4": self.device.gemm_fp4_flops}.get(number)
        return native or self.device.gemm_bf16_flops


def plain_roofline(deployment: Deployment) -> tuple[float, float]:
    """TTFT and TPOT at the specified peaks: a prompt alone, and a decode step with the prompts that come in meanwhile."""
    prefill = deployment.prefill().floor
    return prefill, deployment.decode().floor + deployment.prompts_a_step() * prefill
