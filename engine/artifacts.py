"""Candidates on disk, named by what they are: `<data>/artifacts/<hash>/{manifest.json, sources, build/*.so}`. Torch-free."""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from engine.models.config import ModelConfig
from engine.models.structure import baseline_of

CONTRACT_VERSION = 1
BASELINE_FOLDER = Path(__file__).resolve().parent / "baseline"
MAX_SOURCE_BYTES = 1 << 20


class ArtifactError(Exception):
    """An artefact is missing, damaged or not a candidate; the text names the mend."""


class Manifest(msgspec.Struct, frozen=True):
    """What a candidate says of itself. `files` maps each source to its sha256, `libraries` each built library to its own."""

    name: str
    contract_version: int = CONTRACT_VERSION
    parent: str = ""
    focus: str = ""
    hypothesis: str = ""
    mechanism: str = "python"
    settings: dict[str, Any] = {}
    precision: str = "same"
    batch_invariant: bool = False
    device: str = "cpu"
    files: dict[str, str] = {}
    libraries: dict[str, str] = {}


@dataclass(frozen=True, slots=True)
class Artifact:
    hash: str
    path: Path
    manifest: Manifest
    source_hash: str

    @property
    def library_paths(self) -> dict[str, Path]:
        """Built libraries by the name of their source, without suffix."""
        return {name: self.path / "build" / f"{name}.so" for name in self.manifest.libraries}

    def files(self) -> dict[str, str]:
        return {name: (self.path / name).read_text() for name in sorted(self.manifest.files)}


class ArtifactStore:
    """Artefacts under `data_dir`/artifacts. Writing the same content twice gives the same artefact."""

    def __init__(self, data_dir: Path) -> None:
        self.root = Path(data_dir).resolve() / "artifacts"
        self.root.mkdir(parents=True, exist_ok=True)

    def put(
        self, files: Mapping[str, str], *, name: str, libraries: Mapping[str, Path] | None = None, **described: Any
    ) -> Artifact:
        """Stores sources and built libraries; `described` are further `Manifest` fields. Raises ArtifactError for bad input."""
        libraries = libraries or {}
        check_files(files)
        manifest = Manifest(
            name=name,
            files={n: _sha(text.encode()) for n, text in sorted(files.items())},
            libraries={n: _sha(Path(p).read_bytes()) for n, p in sorted(libraries.items())},
            **described,
        )
        digest = artifact_hash(manifest)
        target = self.root / digest
        if not target.is_dir():
            self._write(target, manifest, files, libraries)
        return self.get(digest)

    def get(self, digest: str) -> Artifact:
        """The artefact, every file checked against its hash. Raises ArtifactError when it is not there or not intact."""
        if not re.fullmatch(r"[0-9a-f]{64}", digest):
            raise ArtifactError(f"{digest!r} is not an artefact hash (64 hexadecimal digits).")
        return read_artifact(self.root / digest, digest)

    def baseline(self, config: ModelConfig | None = None) -> Artifact:
        """The baseline candidate of models of this shape (None: Llama's), stored like any other."""
        described = msgspec.json.decode((BASELINE_FOLDER / "manifest.json").read_bytes())
        return self.put(baseline_files(baseline_of(asdict(config)) if config else "llama"), **described)

    def _write(self, target: Path, manifest: Manifest, files: Mapping[str, str], libraries: Mapping[str, Path]) -> None:
        staging = Path(tempfile.mkdtemp(prefix=".put-", dir=self.root))
        try:
            (staging / "build").mkdir()
            for name, text in files.items():
                (staging / name).write_text(text)
            for name, path in libraries.items():
                shutil.copyfile(path, staging / "build" / f"{name}.so")
            (staging / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(manifest), indent=1))
            os.chmod(staging, 0o755)
            try:
                staging.rename(target)
            except OSError:
                if not target.is_dir():  # someone else may have stored the same content first
                    raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def baseline_files(name: str) -> dict[str, str]:
    """The sources of a baseline: Llama's stands alone, the others (`engine.models.structure.baseline_of`) build on it."""
    if name == "llama":
        return {"forward.py": (BASELINE_FOLDER / "forward.py").read_text()}
    sources = {"forward.py": f"{name}.py", "llama.py": "forward.py", "experts.py": "experts.py"}
    return {file: (BASELINE_FOLDER / source).read_text() for file, source in sources.items()}


def read_artifact(path: Path, digest: str) -> Artifact:
    """Reads and checks an artefact folder against `digest`."""
    again = "Store the candidate again."
    try:
        manifest = msgspec.json.decode((path / "manifest.json").read_bytes(), type=Manifest)
    except FileNotFoundError as error:
        raise ArtifactError(f"There is no artefact {digest[:12]} in {path.parent}. {again}") from error
    except msgspec.DecodeError as error:
        raise ArtifactError(f"The manifest of artefact {digest[:12]} cannot be read: {error}. {again}") from error
    if artifact_hash(manifest) != digest:
        raise ArtifactError(f"The manifest of artefact {digest[:12]} does not match its name. {again}")
    expected = dict(manifest.files) | {f"build/{n}.so": sha for n, sha in manifest.libraries.items()}
    for name, sha in expected.items():
        if not (path / name).is_file() or _sha((path / name).read_bytes()) != sha:
            raise ArtifactError(f"{name} of artefact {digest[:12]} is missing or was changed. {again}")
    texts = {n: (path / n).read_text() for n in manifest.files}
    return Artifact(digest, path, manifest, source_hash(texts, manifest.settings))


def toolchain() -> str:
    """What turns sources into running code here: Python, torch and machine."""
    return f"python {platform.python_version()} torch {importlib.metadata.version('torch')} {platform.machine()}"


def artifact_hash(manifest: Manifest) -> str:
    """sha256 over length-delimited fields: the manifest (with every file's hash), the toolchain."""
    return _delimited([msgspec.json.encode(manifest, order="sorted"), toolchain().encode()])


def source_hash(files: Mapping[str, str], settings: Mapping[str, Any] | None = None) -> str:
    """Names the mechanism: two programs that differ in comments, layout or a constant only are one.

    Of the settings the names count and the words, not the numbers.
    """
    parts = []
    for name, text in sorted(files.items()):
        parts += [
            Path(name).suffix.encode(),
            (_normal_python(text) if name.endswith(".py") else _normal_cpp(text)).encode(),
        ]
    for key, value in sorted((settings or {}).items()):
        parts.append(f"{key}={value if isinstance(value, str) else type(value).__name__}".encode())
    return _delimited(parts)


@lru_cache(256)
def _normal_python(text: str) -> str:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return text
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            node.value = 0 if isinstance(node.value, (int, float, complex)) else node.value
        body = getattr(node, "body", None)
        if isinstance(body, list):  # docstrings and other constants standing alone say nothing to the machine
            node.body = [n for n in body if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))] or [
                ast.Pass()
            ]
    return ast.dump(tree)


@lru_cache(256)
def _normal_cpp(text: str) -> str:
    text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"\b\d[\w.]*", "0", text)
    return re.sub(r"\s+", " ", text).strip()


def check_files(files: Mapping[str, str]) -> None:
    """Raises ArtifactError for files that no candidate may have."""
    if "forward.py" not in files:
        raise ArtifactError("A candidate needs a forward.py that defines build(model, settings).")
    for name, text in files.items():
        if not re.fullmatch(r"[A-Za-z_]\w*\.(py|cpp|h)", name):
            raise ArtifactError(
                f"{name!r} is not a source file name: use letters, digits and _, ending in .py, .cpp or .h."
            )
        if len(text.encode()) > MAX_SOURCE_BYTES:
            raise ArtifactError(f"{name} holds {len(text)} characters; at most {MAX_SOURCE_BYTES} bytes are taken.")


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _delimited(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
