"""Artefacts: named by their content, whole or not there, and never run when changed."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from engine import artifacts as module
from engine.artifacts import Artifact, ArtifactError, ArtifactStore, source_hash

FILES = {"forward.py": "def build(model, settings):\n    return 1\n", "gemm.cpp": "int tile() { return 4; }\n"}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "built.so"
    path.write_bytes(b"\x7fELF something built")
    return path


def put(store: ArtifactStore, library: Path) -> Artifact:
    return store.put(FILES, name="one", libraries={"gemm": library}, settings={"block_size": 16})


def test_the_same_content_is_the_same_artefact(store: ArtifactStore, library: Path) -> None:
    first = put(store, library)
    assert put(store, library) == first == store.get(first.hash)
    assert first.files() == FILES and first.library_paths == {"gemm": first.path / "build" / "gemm.so"}
    assert len(list(store.root.iterdir())) == 1


def test_everything_counts_for_the_name(store: ArtifactStore, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {put(store, library).hash}
    names.add(store.put(FILES | {"gemm.cpp": "int tile() { return 5; }\n"}, name="one").hash)
    names.add(store.put(FILES, name="one", settings={"block_size": 32}).hash)
    names.add(store.put(FILES, name="one", parent="a").hash)
    library.write_bytes(b"\x7fELF built otherwise")
    names.add(put(store, library).hash)
    monkeypatch.setattr(module, "toolchain", lambda: "python 9 torch 9 machine")
    names.add(put(store, library).hash)
    assert len(names) == 6


@pytest.mark.parametrize("name", ["forward.py", "gemm.cpp", "build/gemm.so", "manifest.json"])
def test_a_changed_or_missing_file_is_noticed(store: ArtifactStore, library: Path, name: str) -> None:
    artifact = put(store, library)
    path = artifact.path / name
    path.write_bytes(path.read_bytes().replace(b"4", b"5").replace(b"1", b"2") + b" ")
    if name == "manifest.json":  # still JSON, other words
        path.write_text(json.dumps(json.loads(path.read_text()) | {"name": "another"}))
    with pytest.raises(ArtifactError, match="Store the candidate again"):
        store.get(artifact.hash)
    path.unlink()
    with pytest.raises(ArtifactError, match="Store the candidate again"):
        store.get(artifact.hash)


@pytest.mark.parametrize("digest", ["", "abc", "../" * 20, "g" * 64, "0" * 63])
def test_what_is_no_hash_is_refused(store: ArtifactStore, digest: str) -> None:
    with pytest.raises(ArtifactError, match="64 hexadecimal digits"):
        store.get(digest)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "needs a forward.py"),
        ({"gemm.cpp": ""}, "needs a forward.py"),
        ({"forward.py": "", "../evil.py": ""}, "not a source file name"),
        ({"forward.py": "", "/etc/evil.py": ""}, "not a source file name"),
        ({"forward.py": "", "notes.txt": ""}, "not a source file name"),
        ({"forward.py": "", "9.py": ""}, "not a source file name"),
        ({"forward.py": "x" * ((1 << 20) + 1)}, "at most"),
    ],
)
def test_files_that_no_candidate_may_have(store: ArtifactStore, files: dict[str, str], said: str) -> None:
    with pytest.raises(ArtifactError, match=said):
        store.put(files, name="bad")
    assert not list(store.root.iterdir())


def test_two_writers_of_one_artefact(store: ArtifactStore, library: Path) -> None:
    found: list[Artifact] = []
    threads = [threading.Thread(target=lambda: found.append(put(store, library))) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 8 and len({a.hash for a in found}) == 1
    assert len(list(store.root.iterdir())) == 1, "a staging folder was left"


def test_the_baseline_is_a_candidate_like_any_other(store: ArtifactStore) -> None:
    baseline = store.baseline()
    assert baseline.manifest.name == "baseline" and "def build" in baseline.files()["forward.py"]


SAME = [
    ("x = 1\n", "x = 2\n"),
    ("x = 1\n", "# a comment\nx  =  1.5\n"),
    ("def f():\n    return 3\n", 'def f():\n    """Says what it does."""\n    return 4\n'),
]
DIFFERENT = [
    ("x = 1\n", "y = 1\n"),
    ("x = a + b\n", "x = a - b\n"),
    ("x = 'sdpa'\n", "x = 'math'\n"),
    ("f(1)\n", "f(1, 2)\n"),
]


@pytest.mark.parametrize(("one", "two"), SAME)
def test_a_changed_constant_or_comment_is_the_same_mechanism(one: str, two: str) -> None:
    assert source_hash({"forward.py": one}) == source_hash({"forward.py": two})


@pytest.mark.parametrize(("one", "two"), DIFFERENT)
def test_another_mechanism_has_another_name(one: str, two: str) -> None:
    assert source_hash({"forward.py": one}) != source_hash({"forward.py": two})


def test_c_sources_and_settings_count_by_mechanism() -> None:
    base = {"forward.py": "x = 1\n", "k.cpp": "int a = 16; // rows\n"}
    assert source_hash(base) == source_hash(base | {"k.cpp": "/* tile */ int a   = 0x20;\n"})
    assert source_hash(base) != source_hash(base | {"k.cpp": "long a = 16;\n"})
    assert source_hash(base, {"block": 16}) == source_hash(base, {"block": 32})
    assert source_hash(base, {"policy": "mixed"}) != source_hash(base, {"policy": "prefill_first"})
    assert source_hash({"forward.py": "def broken(:"}) != source_hash({"forward.py": "def broken(("})
