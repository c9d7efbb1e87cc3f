"""Operators as data: what parameters are allowed, and what their source becomes."""

from __future__ import annotations

import pytest

from kernels import registry

OPERATORS = ("decode_step", "small_m_matmul", "paged_attention")


def test_every_operator_is_found() -> None:
    assert set(OPERATORS) <= set(registry.names())


@pytest.mark.parametrize("name", registry.names())
def test_parameters_are_sound(name: str) -> None:
    op = registry.load(name)
    assert len({p.name for p in op.params}) == len(op.params) > 0
    for p in op.params:
        assert p.default in p.values and len(p.values) == len(set(p.values)) > 1 and p.why
    assert op.resolve() == op.defaults()


def test_values_stand_as_defines_at_the_top() -> None:
    text = registry.instantiate("decode_step", {"PM_PREFETCH": 4096})
    assert "#define PM_PREFETCH 4096\n" in text[: text.index("#include")]


def test_a_wrong_name_value_or_pair_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(registry.ParameterError, match=r"no parameter PM_SPEED: it has .*PM_LAYOUT"):
        registry.instantiate("decode_step", {"PM_SPEED": 1})
    with pytest.raises(registry.ParameterError, match="one of 0, 512"):
        registry.instantiate("decode_step", {"PM_PREFETCH": 3})
    with pytest.raises(registry.ParameterError, match="PM_ROW_TILE \\* PM_PANEL_VECS <= 28"):
        registry.instantiate("decode_step", {"PM_ROW_TILE": 14, "PM_PANEL_VECS": 4})
    assert not registry.load("decode_step").allows({"PM_ROW_TILE": 14, "PM_PANEL_VECS": 4})


def test_an_unknown_operator_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="decode_step"):
        registry.load("conv9d")
