"""The compiler: traffic profiles, agents, board, cost model, tiers, verification, the search loop and its report. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optimizer.library import optimise

__all__ = ["optimise"]


def __getattr__(name: str) -> Any:
    """`from optimizer import optimise` loads the search only for who asks for it."""
    if name == "optimise":
        from optimizer.library import optimise

        return optimise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
