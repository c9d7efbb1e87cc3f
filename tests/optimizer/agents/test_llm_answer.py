"""A model's answer becomes a program that the engine runs, or a sentence that says what was wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.artifacts import baseline_files
from engine.models.weights import load_model
from kernels.build import has_compiler
from optimizer.agents.llm.answer import Allowed, Answer, Base, read_answer
from optimizer.agents.llm.check import AnswerError, check_program, modules_of
from optimizer.agents.programs.edit import parts
from optimizer.agents.programs.program import Program, ProgramError
from tests.optimizer.agents.llm_programs import FUSED, KERNEL, WRONG, hunks
from tests.optimizer.agents.llm_server import answer
from tests.optimizer.agents.support import build, build_files, play

BASE = Base(baseline_files("llama"))
FORWARD = BASE.files["forward.py"]
OLD = "        return F.linear(x, self.head).float()"
EDIT = hunks((OLD, OLD + "  # as it was"))


def read(text: str, base: Base = BASE, **allowed: Any) -> Answer:
    return read_answer(text, base, Allowed(**allowed))


@pytest.mark.parametrize(
    ("text", "mechanism"),
    [
        (FUSED, "python"),
        pytest.param(KERNEL, "cpp", marks=pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")),
    ],
)
def test_a_models_program_gives_the_baselines_logits(tiny_model: Path, text: str, mechanism: str) -> None:
    found, model = read(text), load_model(tiny_model, "float32")
    assert found.mechanism == mechanism
    ours = play(build_files(found.files, model, found.settings), model.config.vocab_size)
    torch.testing.assert_close(ours, play(build(Program(), model), model.config.vocab_size), atol=2e-4, rtol=1e-4)


def test_the_fields_are_read() -> None:
    fields = {"name": "tie", "focus": "cache", "settings": {"block_size": 32}, "expected": 1.25}
    found = read(answer(fields, edit_forward=EDIT))
    assert (found.name, found.focus, found.expected, found.settings) == ("tie", "cache", 1.25, {"block_size": 32})
    assert found.hypothesis == "Fewer calls a layer." and found.precision == "same"


def test_a_whole_file_is_taken_as_it_is() -> None:
    assert read(answer(forward=FORWARD + "\nX = 1")).files == {"forward.py": FORWARD + "\nX = 1\n"}


def test_thinking_aloud_is_not_the_answer() -> None:
    aloud = "<think>Perhaps:\n```json\n{}\n```\n</think>\n"
    assert read(aloud + FUSED).name == "fused qkv"


def test_settings_alone_are_a_program() -> None:
    found = read(answer({"settings": {"policy": "prefill_first"}}))
    assert found.mechanism == "settings" and found.files == dict(BASE.files)


def test_an_edit_keeps_the_kernels_settings_and_precision_of_its_base() -> None:
    program = Program.of(["paged_attention"])
    base = Base(program.files(), program.name, {"block_size": 32, "layers_apart": 1}, "a" * 64, "int8")
    found = read(answer({"settings": {"block_size": 64}}, edit_forward=EDIT), base, precisions=("same", "int8"))
    assert set(found.files) == set(base.files) and found.mechanism == "cpp" and found.precision == "int8"
    assert found.settings == {"block_size": 64, "layers_apart": 1}


def test_a_kernel_that_nothing_calls_any_more_is_left_out() -> None:
    program = Program.of(["paged_attention"])
    found = read(answer(forward=FORWARD + "\nX = 1"), Base(program.files(), program.name))
    assert set(found.files) == {"forward.py"} and found.mechanism == "python"


WRONG_ANSWERS = {
    "no fields": (FUSED.replace("```json", "```text"), "0 json blocks"),
    "two sets of fields": (FUSED + "\n```json\n{}\n```\n", "2 json blocks"),
    "broken json": (FUSED.replace('"name":', "name:"), "json block cannot be read"),
    "a list": ("```json\n[1]\n```", "no object"),
    "deep json": ("```json\n" + "[" * 100_000 + "\n```", "cannot be read"),
    "an unknown field": (answer({"speed": 2}, edit_forward=EDIT), "unknown field 'speed'"),
    "no name": (answer({"name": ""}, edit_forward=EDIT), "lacks 'name'"),
    "a focus of its own": (answer({"focus": "everything"}, edit_forward=EDIT), "focus is 'everything'"),
    "a precision that was not allowed": (answer({"precision": "int8"}, edit_forward=EDIT), "precision is 'int8'"),
    "an odd expectation": (answer({"expected": "much"}, edit_forward=EDIT), "a number such as 1.08"),
    "nothing new": (answer(), "unchanged"),
    "an edit without hunks": (answer(edit_forward="return 1"), "no hunk"),
    "an edit of nothing": (answer(edit_forward=hunks(("no such text", "x"))), "finds it 0 times"),
    "an edit of something common": (answer(edit_forward=hunks(("\n", "\n\n"))), "finds it 0 times"),
    "an edit of another file": (FUSED.replace("edit forward.py", "edit other.py"), "no 'other.py' to edit"),
    "two blocks of a file": (answer(edit_forward=EDIT) + f"\n```python forward.py\n{FORWARD}```\n", "Two blocks"),
    "no Python": (answer(forward="def build(model, settings:"), "is no Python"),
    "deep Python": (answer(forward="x = " + "(" * 5000 + ")" * 5000), "is no Python"),
    "a long sum": (answer(forward=FORWARD + "\nX = " + "+".join("1" * 200)), "nested too deeply"),
    "no build": (answer(forward="X = 1"), "does not define build"),
    "a build without settings": (answer(forward="def build(model):\n    return model"), "does not define build"),
    "os": (answer(forward="import os\n" + FORWARD), "imports os"),
    "the engine's inside": (
        answer(forward="from engine.client import HostClient\n" + FORWARD),
        "imports engine.client",
    ),
    "an import inside a function": (answer(forward=FORWARD + "\ndef f():\n    import socket\n"), "imports socket"),
    "open": (answer(forward=FORWARD + "\nopen('/etc/passwd')\n"), "calls open()"),
    "a path": (FUSED.replace("edit forward.py", "python ../forward.py"), "is not a source file name"),
    "a shell script": (FUSED.replace("edit forward.py", "sh run.sh"), "is not a source file name"),
    "a header": (FUSED + "\n```cpp x.h\nint x;\n```\n", "x.h: put what it holds"),
    "a kernel with a header of its own": (KERNEL.replace("<cmath>", '"fast.h"'), "includes 'fast.h'"),
    "a kernel that exports nothing": (KERNEL.replace('extern "C" ', ""), "exports nothing"),
    "a library that is not there": (KERNEL.replace("cpp silu.cpp", "cpp other.cpp"), "no silu.cpp"),
    "an unknown setting": (answer({"settings": {"turbo": 1}}), "no setting 'turbo'"),
    "a setting out of range": (answer({"settings": {"max_seqs": 0}}), "scheduler refuses"),
    "a policy of its own": (answer({"settings": {"policy": "mine"}}), "policy 'mine'"),
    "an odd block size": (answer({"settings": {"block_size": "16"}}), "block_size is '16'"),
    "a setting that is a list": (answer({"settings": {"policy": [1]}}), "give a number or a word"),
}


@pytest.mark.parametrize("case", WRONG_ANSWERS)
def test_a_wrong_answer_is_told_what_was_wrong(case: str) -> None:
    text, said = WRONG_ANSWERS[case]
    with pytest.raises(AnswerError) as caught:
        read(text)
    assert said in str(caught.value)


def test_no_cpp_without_a_compiler() -> None:
    with pytest.raises(AnswerError, match=r"no C\+\+ compiler"):
        read(KERNEL, compiler=False)


@pytest.mark.parametrize(
    "name", ["whole_step", "base (names=3)", "fused_qkv + rms_norm", "x (PM_SPIN=1, policy=mixed)"]
)
def test_a_name_cannot_pass_for_a_built_in_program(name: str) -> None:
    found = read(answer({"name": name}, edit_forward=EDIT))
    with pytest.raises(ProgramError):
        Program.parse(f"llm-1: {found.name}")


def test_what_is_shown_to_people_cannot_steer_a_terminal() -> None:
    found = read(answer({"name": "\x1b[2Jgone\x07", "hypothesis": "fast\x1b[31m\nand\u202e red"}, edit_forward=EDIT))
    assert found.name.isprintable() and found.hypothesis.isprintable()


@pytest.mark.parametrize("part", parts())
def test_every_built_in_program_would_pass_the_check(part: str) -> None:
    program = Program.of([part])
    base = Base(program.files(min(parts()[part].baselines)), program.name, program.settings)
    known = modules_of(base.files) if parts()[part].device == "cuda" else frozenset()  # the engine's own GPU kernels
    check_program(base.files, base.settings, known_settings=frozenset(), compiler=True, known_modules=known)


def test_an_edit_may_keep_what_its_base_imports_and_nothing_more() -> None:
    base = Base({"forward.py": "from kernels.gpu.graphs import x\n" + FORWARD}, "on a GPU")
    assert "kernels.gpu.graphs" in read(answer(edit_forward=EDIT), base).files["forward.py"]
    more = hunks(("from kernels.gpu.graphs import x", "from kernels.gpu.launch import x"))
    with pytest.raises(AnswerError, match=r"imports kernels\.gpu\.launch"):
        read(answer(edit_forward=more), base)


def test_wrong_values_are_the_engines_to_find() -> None:
    assert "roll(1, -1)" in read(WRONG).files["forward.py"]
