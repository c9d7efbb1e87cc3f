"""Names of what weights and cache are kept in: fewer bits than the endpoint's dtype has, for either or both, as in `int8+kv-int8`.

`coded` weights take 12 bits and change no value (kernels/common/weights_coded.hpp); all others lose some. Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable

SAME = "same"
CODED = "coded"
WEIGHTS = (SAME, CODED, "fp8", "int8", "int4")  # each lower than the one before
CACHE = (SAME, "kv-int8")
LOWEST = f"{WEIGHTS[-1]}+{CACHE[-1]}"


def lowest(precisions: Iterable[str]) -> str:
    """One name for several: the lowest of the weights' and the lowest of the cache's. Raises ValueError for an unknown one."""
    names = "+".join(precisions)
    if unknown := set(filter(None, names.split("+"))) - {*WEIGHTS, *CACHE}:
        known = ", ".join((*WEIGHTS, *CACHE[1:]))
        raise ValueError(f"no precision is called {', '.join(sorted(unknown))}: there are {known}")
    return "+".join(name for name in (of_weights(names), of_cache(names)) if name != SAME) or SAME


def exact(precision: str) -> bool:
    """Whether nothing is changed: an endpoint that declares no tolerance for a lower precision may be served so."""
    return of_weights(precision) in (SAME, CODED) and of_cache(precision) == SAME


def of_weights(precision: str) -> str:
    """What a name says of weights; `same` where it says nothing that is known."""
    return _lowest(WEIGHTS, precision)


def of_cache(precision: str) -> str:
    """What a name says of the cache; `same` where it says nothing that is known."""
    return _lowest(CACHE, precision)


def _lowest(kinds: tuple[str, ...], precision: str) -> str:
    return max(set(kinds) & set(precision.split("+")), key=kinds.index, default=SAME)
