"""Scheduling: which tokens share a step, and what a step does for rows that nobody reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from optimizer.agents.base import SearchView
from optimizer.agents.focused import FocusAgent
from optimizer.agents.programs.program import Program

KNOBS: tuple[dict[str, Any], ...] = (
    {"policy": "prefill_first"},
    {"draft_tokens": 4},
    {"policy": "decode_first"},
    {"draft_tokens": 2},
    {"draft_tokens": 8},
    {"prefill_chunk": 128},
    {"max_batch_tokens": 1024, "prefill_chunk": 1024},
    {"policy": "prefill_first", "prefill_chunk": 256},
    {"max_batch_tokens": 128, "prefill_chunk": 128},
    {"draft_tokens": 8, "draft_ngram": 5},
)
REASONS = {
    "policy": {
        "prefill_first": "a new request's prompt goes first, so that decode steps have more rows a read of the weights",
        "decode_first": "running requests never wait for a prompt, and steps stay of one kind",
        "mixed": "prompts ride along with decodes",
    },
    "prefill_chunk": "a prompt enters in pieces of this many tokens, which bounds how long running requests wait",
    "max_batch_tokens": "this many tokens may share a step: more rows for each read of the weights",
    "max_seqs": "this many requests may run at once",
    "draft_tokens": "so many tokens are guessed from the request's own text and verified in the step that would have run "
    "anyway, so that a read of the weights makes more than one token; it pays as far as answers repeat what was said, and "
    "sampled answers do so less than greedy ones",
    "draft_ngram": "a guess needs up to so many tokens of context said before: fewer guesses, and more of them right",
}


class SchedulingAgent(FocusAgent):
    """Its settings need traffic to be judged (tier 2), so they are proposed on the best program, once there is one."""

    name = focus = "scheduling"
    ideas = (("pure_steps",), ("last_rows",), ("pure_steps", "last_rows", "rms_norm"))
    turns = ("explore", "tune", "combine", "tune", "explore", "tune")

    def tune(self, view: SearchView) -> Iterator[Program]:
        best = self.memory.best()
        if best.parts:
            yield from (best.plus(**knobs) for knobs in KNOBS)

    def reason(self, name: str, value: object, program: Program) -> str:
        text = REASONS.get(name)
        if text is None:
            return super().reason(name, value, program)
        return f"{name} = {value}: {text if isinstance(text, str) else text[str(value)]}."
