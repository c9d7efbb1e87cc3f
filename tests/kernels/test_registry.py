"""Operators as data: every folder is complete, what parameters are allowed, and what their source becomes."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from kernels import registry

OPERATORS = {
    "cpu": {"decode_step", "moe", "paged_attention", "small_m_matmul", "weight_only_matmul"},
    "triton": {
        "fp8_matmul", "gated_mlp", "kv_copy", "lm_head", "moe", "paged_decode_attention", "prefill_attention",
        "qkv_rope_kv", "rmsnorm_residual", "small_m_matmul", "weight_only_matmul",
    },
}  # fmt: skip
FOLDERS = sorted({p.parent.name for file in registry.SOURCES.values() for p in registry.ROOT.glob(f"*/{file}")})
PAIRS = [(name, source) for source in registry.SOURCES for name in registry.names(source)]
KEYS = {"name", "for", "values", "default", "constraint", "why", "precision", "read"}


@pytest.mark.parametrize("source", registry.SOURCES)
def test_every_operator_is_found_by_its_source(source: str) -> None:
    assert OPERATORS[source] <= set(registry.names(source))


@pytest.mark.parametrize("name", FOLDERS)
def test_every_folder_is_complete(name: str) -> None:
    """One file of parameters, each owned by a source that is there; glue where C++ is called."""
    folder = registry.ROOT / name
    sources = {source for source, file in registry.SOURCES.items() if (folder / file).exists()}
    assert (folder / "glue.py").exists() == ("cpu" in sources)
    assert [p.name for p in folder.glob("*.json")] == ["params.json"]
    rows = registry.rows(folder)
    assert {row.get("for", "cpu") for row in rows} == sources
    assert not set().union(*rows) - KEYS


@pytest.mark.parametrize("name", FOLDERS)
def test_every_reference_is_plain_torch_and_says_its_shapes(name: str) -> None:
    reference = importlib.import_module(f"kernels.{name}.reference")
    own = [f for _, f in inspect.getmembers(reference, inspect.isfunction) if f.__module__ == reference.__name__]
    assert own and all("[" in (f.__doc__ or "") for f in own)
    imports = re.findall(r"^(?:from|import) ([\w.]+)", inspect.getsource(reference), re.MULTILINE)
    allowed = r"__future__|typing|collections\.abc|torch(\.nn)?|kernels\.\w+(\.reference)?"
    assert all(re.fullmatch(allowed, module) for module in imports), imports


@pytest.mark.parametrize(("name", "source"), PAIRS)
def test_parameters_are_sound(name: str, source: str) -> None:
    op = registry.load(name, source)
    assert len({p.name for p in op.params}) == len(op.params) > 0
    for p in op.params:
        assert p.default in p.values and len(p.values) == len(set(p.values)) > 1 and p.why
        assert not p.constraint or registry.holds(p.constraint, op.defaults())
        assert all(value in p.values for value, _ in p.precision)
    assert op.resolve() == op.defaults()


@pytest.mark.parametrize(("name", "source"), PAIRS)
def test_a_source_reads_every_parameter(name: str, source: str) -> None:
    op = registry.load(name, source)
    for p in op.params:
        assert reads(op.source_text, p.name, source), f"{p.name} is in params.json but {source} never reads it"
    assert not reads(op.source_text, "PM_NOWHERE", source)


def reads(text: str, name: str, source: str) -> bool:
    """C++ has a default for each macro; Triton's callers look values up by name, products through `matmul_tiles`."""
    if source == "cpu":
        return f"#ifndef {name}\n" in text or f"#ifndef {name} " in text
    if "matmul_tiles(" in text:
        text += (registry.ROOT / "gpu" / "tiles.py").read_text()
    by_size = "{size}" + name.removeprefix("SMALL").removeprefix("LARGE")
    return f'["{name}"]' in text or f'p[f"{by_size}"]' in text


def test_values_stand_as_defines_at_the_top() -> None:
    text = registry.instantiate("decode_step", {"PM_PREFETCH": 4096})
    assert "#define PM_PREFETCH 4096\n" in text[: text.index("#include")]


def test_sources_of_one_folder_have_parameters_of_their_own() -> None:
    cpu, triton = (registry.load("small_m_matmul", source).defaults() for source in ("cpu", "triton"))
    assert "PM_ROW_TILE" in cpu and "SMALL_BLOCK_N" in triton and not cpu.keys() & triton.keys()
    assert "SMALL_BLOCK_N" not in registry.instantiate("small_m_matmul")


def test_a_wrong_name_value_or_pair_is_refused_with_what_is_allowed() -> None:
    with pytest.raises(registry.ParameterError, match=r"no parameter PM_SPEED: it has .*PM_LAYOUT"):
        registry.instantiate("decode_step", {"PM_SPEED": 1})
    with pytest.raises(registry.ParameterError, match="one of 0, 512"):
        registry.instantiate("decode_step", {"PM_PREFETCH": 3})
    with pytest.raises(registry.ParameterError, match="PM_ROW_TILE \\* PM_PANEL_VECS <= 28"):
        registry.instantiate("decode_step", {"PM_ROW_TILE": 14, "PM_PANEL_VECS": 4})
    assert not registry.load("decode_step").allows({"PM_ROW_TILE": 14, "PM_PANEL_VECS": 4})


def test_an_unknown_operator_or_source_is_named_with_the_known_ones() -> None:
    with pytest.raises(KeyError, match="decode_step"):
        registry.load("conv9d")
    with pytest.raises(KeyError, match="no cpu operator 'lm_head'"):
        registry.load("lm_head")


def test_values_read_at_run_time_can_be_settled() -> None:
    text = registry.instantiate("decode_step", {"PM_SPIN": 1000})
    assert 'extern "C" { long PM_SPIN = 1000; }' in text and "#define PM_SPIN PM_SPIN\n" in text
    settled = registry.settled(text)
    assert "#define PM_SPIN 1000\n" in settled and "#define PM_SPIN PM_SPIN" not in settled and "{ long" not in settled
