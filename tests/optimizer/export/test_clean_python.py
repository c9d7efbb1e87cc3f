"""Cleaned Python has nothing that cannot run, and does what it did."""

from __future__ import annotations

import ast

import pytest

from engine.artifacts import baseline_files
from optimizer.agents.programs.edit import parts
from optimizer.agents.programs.program import Program
from optimizer.export.clean_python import clean_python

HEAD = "import math\nimport ctypes\nfrom os import path, sep\n\n\n"


def cleaned(text: str) -> str:
    return clean_python({"forward.py": text})["forward.py"]


def test_what_stands_behind_a_return_goes() -> None:
    assert cleaned("def build(model):\n    return model\n    print(1)\n") == "def build(model):\n    return model\n"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("if False:\n    a = 1\nelse:\n    a = 2\n", "a = 2\n"),
        ("if True:\n    a = 1\n    b = a\nelse:\n    a = 2\n", "a = 1\nb = a\n"),
        ("if 0:\n    a = 1\nelif path:\n    a = 2\n", "if path:\n    a = 2\n"),
        ("def build(m):\n    if None:\n        m = 1\n    return m\n", "def build(m):\n    pass\n    return m\n"),
    ],
)
def test_a_constant_condition_leaves_the_side_that_is_taken(text: str, left: str) -> None:
    assert cleaned(text) == left


def test_helpers_and_imports_that_nothing_names_go_with_what_only_they_used() -> None:
    text = (
        HEAD
        + "def old(x):\n    return older(math.pi)\n\n\ndef older(x):\n    return x\n\n\ndef build(m):\n    return sep\n"
    )
    assert cleaned(text) == "from os import sep\n\n\ndef build(m):\n    return sep\n"


def test_what_is_looked_up_by_text_stays() -> None:
    text = "class Forward:\n    def fast(self):\n        return 3\n\n\ndef build(m):\n    return getattr(Forward(), 'fast')\n"
    assert cleaned(text) == text


def test_what_another_file_of_the_candidate_imports_stays() -> None:
    files = {
        "forward.py": "from helper import rotate\n\n\ndef build(m):\n    return rotate\n",
        "helper.py": "def rotate(x):\n    return x\n",
    }
    assert clean_python(files) == files


def test_tuning_numbers_get_a_name_each_value_its_own() -> None:
    text = "def build(m, s):\n    return run(s.get('block', 32), depth=4, dim=3), run(1, depth=8), run(2, depth=8)\n"
    found = cleaned(text)
    assert {"DEFAULT_BLOCK = 32", "DEPTH = 8", "DEPTH_4 = 4"} <= set(found.splitlines())
    assert "dim=3" in found
    run = {"run": lambda *values, **named: (values, tuple(named.items()))}
    exec(compile(text, "before", "exec"), before := dict(run))
    exec(compile(found, "after", "exec"), after := dict(run))
    assert before["build"](None, {}) == after["build"](None, {})


def test_comments_stay() -> None:
    text = "def build(m):\n    # why it is so\n    return m  # and here\n"
    assert cleaned(text) == text


def test_it_refuses_what_is_not_python() -> None:
    with pytest.raises(SyntaxError):
        cleaned("def build(:\n")


@pytest.mark.parametrize("name", ["llama", "grouped", "latent"])
def test_a_baseline_loses_nothing_but_unnamed_numbers(name: str) -> None:
    before, after = baseline_files(name), clean_python(baseline_files(name))
    for file in before:
        assert defined(after[file]) == defined(before[file])


@pytest.mark.parametrize("part", sorted(parts()))
def test_every_part_s_program_stays_whole(part: str) -> None:
    """What a program's Python says twice is said twice still: only unused definitions may be gone."""
    baseline = "llama" if "llama" in parts()[part].baselines else "grouped"
    before = Program.of([part]).files(baseline)
    after = clean_python(before)
    gone = defined(before["forward.py"]) - defined(after["forward.py"])
    left = after["forward.py"]
    assert not [name for name in gone if f"{name}(" in left or f".{name}" in left]
    assert clean_python(after) == after  # and there is nothing more to clean


def defined(text: str) -> set[str]:
    return {n.name for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
