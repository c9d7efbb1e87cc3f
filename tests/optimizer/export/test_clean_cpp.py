"""A cleaned kernel has no branch that its parameters rule out, and the compiler sees the same tokens."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kernels import registry
from kernels.build import compiler, has_compiler
from optimizer.export.clean_cpp import CleanError, clean_cpp

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")


def tokens(text: str, folder: Path) -> list[str]:
    """What the preprocessor leaves, as words."""
    source = folder / "source.cpp"
    source.write_text(text)
    command = [compiler() or "", "-E", "-P", "-march=native", "-std=c++17", "-fopenmp", str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_it_takes_out_branches_that_a_parameter_rules_out() -> None:
    text = (
        "#define PM_BITS 8\n#if PM_BITS == 16\nlong a;\n#elif PM_BITS == 8\nint a = PM_BITS;\n#else\nchar a;\n#endif\n"
    )
    assert clean_cpp(text) == "#define PM_BITS 8\nint a = PM_BITS;\n"


def test_it_keeps_what_the_processor_decides() -> None:
    text = "#ifdef __AVX2__\nint a;\n#else\nint b;\n#endif\n"
    assert clean_cpp(text) == "#if defined(__AVX2__)\nint a;\n#else\nint b;\n#endif\n"


def test_a_default_is_dropped_where_the_parameter_is_given() -> None:
    given = "#define PM_SPAN 64\n#ifndef PM_SPAN\n#define PM_SPAN 256\n#endif\nint s = PM_SPAN;\n"
    assert clean_cpp(given) == "#define PM_SPAN 64\nint s = PM_SPAN;\n"
    assert clean_cpp(given.split("\n", 1)[1]) == "#define PM_SPAN 256\nint s = PM_SPAN;\n"


def test_a_known_half_settles_a_condition() -> None:
    text = "#define PM_BITS 8\n#if PM_BITS == 16 && defined(__AVX2__)\nint a;\n#elif PM_BITS == 8 || __GNUC__ > 9\nint b;\n#endif\n"
    assert clean_cpp(text) == "int b;\n"


def test_what_a_kept_branch_defines_is_not_believed_behind_it() -> None:
    text = "#ifdef __AVX2__\n#define PM_WIDE 1\n#endif\n#if PM_WIDE\nint a;\n#endif\n"
    assert "#if PM_WIDE\nint a;\n#endif" in clean_cpp(text)


def test_a_parameter_that_nothing_reads_goes() -> None:
    assert (
        clean_cpp("#define PM_A 1\n#define PM_B 2\nint b = PM_B;  // not PM_A\n")
        == "#define PM_B 2\nint b = PM_B;  // not PM_A\n"
    )


@pytest.mark.parametrize("text", ["#if PM_A\nint a;\n", "int a;\n#endif\n", "#else\n"])
def test_conditions_that_do_not_close_are_refused(text: str) -> None:
    with pytest.raises(CleanError):
        clean_cpp(text)


@needs_compiler
@pytest.mark.parametrize("name", registry.names())
def test_the_compiler_sees_the_same_tokens_of_every_kernel(name: str, tmp_path: Path) -> None:
    lower = [{p.name: value} for p in registry.load(name).params for value, _ in p.precision]
    for values in ({}, *lower):
        text = registry.instantiate(name, values)
        cleaned = clean_cpp(text)
        assert tokens(cleaned, tmp_path) == tokens(text, tmp_path)
        assert len(cleaned) < len(text)


@needs_compiler
def test_a_branch_taken_out_wrongly_would_be_seen(tmp_path: Path) -> None:
    text = registry.instantiate("decode_step", {})
    wrong = clean_cpp(text.replace("#define PM_WEIGHT_BITS 16", "#define PM_WEIGHT_BITS 8"))
    assert tokens(wrong, tmp_path) != tokens(text, tmp_path)
