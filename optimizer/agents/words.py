"""Figures of the run for an agent's hypothesis: each names the bottleneck with a number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from optimizer.agents.base import OPERATORS, SearchView

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
CALLS_A_LAYER = 40  # of the baseline's decode step, counted by a profiler


def figures(view: SearchView) -> dict[str, str]:
    """What `why` texts may name; `{attention}` is a share of a decode step, `{attention_prefill}` of a prefill step."""
    c = view.config
    layers, heads = int(c.get("num_hidden_layers", 1)), int(c.get("num_attention_heads", 1))
    kv_heads = int(c.get("num_key_value_heads", heads))
    named = {op: f"{view.share(op, 'decode'):.0%}" for op in OPERATORS}
    named |= {f"{op}_prefill": f"{view.share(op, 'prefill'):.0%}" for op in OPERATORS}
    numbers = {
        "layers": layers, "heads": heads, "kv_heads": kv_heads, "group": heads // kv_heads, "rows": view.concurrency,
        "norms": 2 * layers + 1, "calls2": 2 * layers, "calls3": 3 * layers, "dispatches": CALLS_A_LAYER * layers,
    }  # fmt: skip
    numbers["experts"] = int((c.get("experts") or {}).get("count", 0))
    named |= {name: f"{value:,}" for name, value in numbers.items()}
    return named | {
        "prefill_time": f"{view.prefill_share:.0%}",
        "decode_time": f"{1 - view.prefill_share:.0%}",
        "stream": stream(view),
        "gpu": str(view.machine.gpu or "a GPU"),
    }


def stream(view: SearchView) -> str:
    """The weight traffic of a decode step against what memory gives, as far as either was measured."""
    size = weight_bytes(view)
    text = f"{size / 1e6:,.0f} MB of weights"
    seconds, ceiling = view.step_s.get("decode", 0.0), largest(view.machine.ceilings.get("read_gbs"))
    if seconds:
        text += f" at {size / seconds / 1e9:.1f} GB/s"
    return text + (f" where this machine reads {ceiling:.0f}" if ceiling else "")


def weight_bytes(view: SearchView) -> int:
    """Bytes of the matrices that a decode step must read: all layers, of experts as many as its tokens may choose, and
    the head."""
    experts = view.config.get("experts") or {}
    c = {k: int(v) for k, v in view.config.items() if isinstance(v, int)}
    hidden, dim = c.get("hidden_size", 0), c.get("head_dim", 0)
    attention = 2 * dim * (c.get("num_attention_heads", 0) + c.get("num_key_value_heads", 0))
    mlp = 3 * c.get("intermediate_size", 0)
    if experts:
        chosen = min(experts["count"], experts["per_token"] * view.concurrency)
        mlp = 3 * experts["intermediate_size"] * chosen
    count = hidden * ((attention + mlp) * c.get("num_hidden_layers", 0) + c.get("vocab_size", 0))
    return count * BYTES.get(view.dtype, 2)


def largest(value: Any) -> float:
    """A ceiling may be one number or one for each size."""
    if isinstance(value, Mapping):
        return max((largest(v) for v in value.values()), default=0.0)
    return float(value) if isinstance(value, int | float) else 0.0
