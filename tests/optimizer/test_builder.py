"""From a proposal to an artefact: what does not compile is a failure with the compiler's log, never an exception."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine.artifacts import ArtifactError
from kernels import build as build_module
from kernels.build import has_compiler
from optimizer import builder as builder_module
from optimizer.builder import Builder, content_hash, kinds_off, mechanism_hash
from optimizer.records import Proposal

needs_compiler = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
PYTHON = "def build(model, settings):\n    return 8\n"
KERNEL = 'extern "C" int eight() { return 8; }\n'


def proposal(mechanism: str = "python", settings: dict | None = None, **files: str) -> Proposal:
    named = {name.replace("_", "."): text for name, text in files.items()} or {"forward.py": PYTHON}
    return Proposal("p1", "ada", "cache", "idea", "why", mechanism, named, settings or {}, parent="c" * 64)


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


def test_a_python_proposal_becomes_an_artefact_that_says_what_it_is(builder: Builder) -> None:
    built = builder.build(proposal(settings={"block_size": 32}))
    assert not built.failure and built.kind == "python" and built.candidate.build_log == ""
    assert builder.artifacts.get(built.artifact.hash).files() == {"forward.py": PYTHON}
    candidate, manifest = built.candidate, built.artifact.manifest
    assert candidate.artifact_hash == built.artifact.hash and candidate.path == str(built.artifact.path)
    assert (candidate.proposal_id, candidate.agent, candidate.parent) == ("p1", "ada", "c" * 64)
    assert (manifest.focus, manifest.hypothesis, manifest.settings) == ("cache", "why", {"block_size": 32})
    assert candidate.build_s > 0


@pytest.mark.parametrize(("mechanism", "kind"), [("settings", "settings"), ("compile", "compile"), ("cpp", "python")])
def test_the_kind_of_swap_follows_from_what_was_built(builder: Builder, mechanism: str, kind: str) -> None:
    assert builder.build(proposal(mechanism)).kind == kind


@needs_compiler
def test_a_kernel_is_compiled_once(builder: Builder) -> None:
    files = {"forward_py": PYTHON, "eight_cpp": KERNEL}
    fresh, cached = builder.build(proposal("cpp", **files)), builder.build(proposal("cpp", **files))
    assert (fresh.kind, cached.kind) == ("cpp_fresh", "cpp_cached")
    assert fresh.artifact.hash == cached.artifact.hash and list(fresh.artifact.library_paths) == ["eight"]
    other = builder.build(proposal("cpp", forward_py=PYTHON, eight_cpp=KERNEL.replace("8", "9")))
    assert other.kind == "cpp_fresh" and other.artifact.hash != fresh.artifact.hash


@needs_compiler
def test_what_does_not_compile_is_a_failure_with_the_compilers_log(builder: Builder) -> None:
    broken = proposal("cpp", forward_py=PYTHON, a_cpp=KERNEL, b_cpp="int b( { return undeclared; }\n")
    for _ in range(2):  # the second time from the cache of failures
        built = builder.build(broken)
        assert built.failure.startswith("b.cpp did not compile: ") and "error" in built.failure
        assert "b.cpp" in built.candidate.build_log and "error" in built.candidate.build_log
        assert built.artifact.library_paths == {}, "half of its kernels are none"
    assert builder.artifacts.get(built.artifact.hash).files()["b.cpp"].startswith("int b("), "its source is kept"


@needs_compiler
def test_a_long_log_is_kept_at_its_end_and_the_sentence_is_short(builder: Builder) -> None:
    lines = "".join(f"undeclared_type_with_a_long_name_{i} v{i};\n" for i in range(200))
    built = builder.build(proposal("cpp", forward_py=PYTHON, long_cpp=lines))
    assert len(built.candidate.build_log) == builder_module.LOG_TAIL and len(built.failure) < 400


def test_a_compiler_that_takes_too_long_is_a_failure(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(source: Path, **given: object) -> build_module.BuildResult:
        return build_module.BuildResult(None, "", 60.0, False, False)

    monkeypatch.setattr(builder_module, "compile_cpp", never)
    built = builder.build(proposal("cpp", forward_py=PYTHON, eight_cpp=KERNEL))
    assert built.failure == "eight.cpp did not compile: the compiler said nothing"


def test_without_a_compiler_a_kernel_fails_and_says_so(builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_module, "compiler", lambda: None)
    built = builder.build(proposal("cpp", forward_py=PYTHON, eight_cpp=KERNEL))
    assert "compiler" in built.failure.lower() and not built.artifact.library_paths


def test_kinds_that_are_off_are_named_with_the_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder_module, "has_compiler", lambda: False)
    (sentence,) = kinds_off()
    assert "C++" in sentence and "torch.compile" in sentence and "Install g++" in sentence
    monkeypatch.setattr(builder_module, "has_compiler", lambda: True)
    assert kinds_off() == []


@pytest.mark.parametrize(
    "files", [{"other.py": PYTHON}, {"forward.py": PYTHON, "../escape.py": PYTHON}, {"forward.py": "#" * (2 << 20)}]
)
def test_files_that_no_candidate_may_have_are_refused(builder: Builder, files: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        builder.build(replace(proposal(), files=files))
    assert not (tmp_path.parent / "escape.py").exists()


def test_a_kernel_with_a_bad_name_writes_nothing_outside(builder: Builder, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError):
        builder.build(replace(proposal(), files={"forward.py": PYTHON, "../../../escape.cpp": KERNEL}))
    assert not list(tmp_path.parent.glob("**/escape.cpp"))


def test_programs_that_differ_in_a_number_are_one_mechanism_and_two_contents() -> None:
    one, two = proposal(), proposal(forward_py=PYTHON.replace("8", "16"))
    assert mechanism_hash(one) == mechanism_hash(two) and content_hash(one) != content_hash(two)
    other = proposal(forward_py=PYTHON.replace("return 8", "return model"))
    assert mechanism_hash(other) != mechanism_hash(one)
    assert content_hash(proposal(settings={"block_size": 32})) != content_hash(proposal(settings={"block_size": 16}))
