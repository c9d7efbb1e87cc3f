"""Names of lower precisions: how several become one, and what a name says of weights and of the cache."""

from __future__ import annotations

import pytest

from kernels import registry
from kernels.precision import LOWEST, exact, lowest, of_cache, of_weights


def test_several_names_become_one_that_says_the_lowest_of_each() -> None:
    assert lowest([]) == lowest(["same"]) == "same"
    assert lowest(["int8", "same", "int4"]) == "int4"
    assert lowest(["kv-int8", "int8"]) == lowest(["int8+kv-int8", "same"]) == "int8+kv-int8"
    assert lowest(["int8+kv-int8", "int4"]) == LOWEST


def test_a_name_says_what_weights_and_what_the_cache_are_kept_in() -> None:
    assert (of_weights("int4+kv-int8"), of_cache("int4+kv-int8")) == ("int4", "kv-int8")
    assert (of_weights("kv-int8"), of_cache("int8")) == ("same", "same")


def test_coded_weights_alone_change_nothing() -> None:
    assert exact("same") and exact("coded")
    assert not any(exact(name) for name in ("fp8", "int8", "kv-int8", "coded+kv-int8"))


def test_an_unknown_name_is_refused_and_promises_nothing() -> None:
    with pytest.raises(
        ValueError, match="no precision is called int3: there are same, coded, fp8, int8, int4, kv-int8"
    ):
        lowest(["int8", "int3"])
    assert of_weights("int3") == of_cache("int3") == "same"


def test_an_operator_names_all_that_its_values_lower() -> None:
    step = registry.load("decode_step")
    assert step.precision() == "same" and step.precision({"PM_KV_BITS": 8}) == "kv-int8"
    assert step.precision({"PM_WEIGHT_BITS": 12}) == "coded"
    assert step.precision({"PM_KV_BITS": 8, "PM_WEIGHT_BITS": 4}) == "int4+kv-int8"


@pytest.mark.parametrize(("name", "source"), [(n, s) for s in registry.SOURCES for n in registry.names(s)])
def test_every_precision_that_parameters_name_is_known(name: str, source: str) -> None:
    for parameter in registry.load(name, source).params:
        lowest(named for _, named in parameter.precision)
