"""What a forward pass does, as a hash: two programs of other text that do the same have one behaviour.

Recorded are, in order, the operators that a step dispatches to with shapes, types and numbers, and the calls into the candidate's
libraries with the numbers they are given; besides them the bytes of those libraries and the layout of the pool. Names,
comments and constants that change none of this change nothing.
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LARGEST_NUMBER = 1 << 24  # a larger integer in a call is an address, which differs from load to load
_libraries: weakref.WeakSet[ctypes.CDLL] = weakref.WeakSet()


def watch_libraries() -> None:
    """From here on every library that is opened through ctypes is known. Call once, before any candidate is loaded."""
    begin = ctypes.CDLL.__init__

    def opened(self: ctypes.CDLL, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        _libraries.add(self)

    ctypes.CDLL.__init__ = opened  # type: ignore[method-assign]


def behaviour(forward: Any, pool: Any, batches: Iterable[Any], folder: Path) -> str:
    """Runs the steps and says what was done. `folder` holds the candidate's libraries."""
    notes: list[str] = [f"threads {torch.get_num_threads()}", *layout(pool)]
    own = [lib for lib in _libraries if Path(str(lib._name)).is_relative_to(folder)]
    notes += sorted(hashlib.sha256(Path(lib._name).read_bytes()).hexdigest() for lib in own)
    with torch.inference_mode():
        for batch in batches:
            with calls_noted(own, notes), Recorder(notes):
                forward(batch, pool)
    digest = hashlib.sha256()
    for note in notes:
        digest.update(len(note).to_bytes(8, "little") + note.encode())
    return digest.hexdigest()


def layout(pool: Any) -> list[str]:
    head = f"pool of blocks of {pool.block_size}, {pool.bytes_per_block} bytes each"
    return [head, *(f"{t.dtype} {tuple(t.shape[1:])} {t.stride()}" for t in pool.tensors)]


class Recorder(TorchDispatchMode):
    def __init__(self, notes: list[str]) -> None:
        super().__init__()
        self.notes = notes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.notes.append(f"{func} {described(args)} {described(kwargs or {})}")
        return func(*args, **(kwargs or {}))


@contextmanager
def calls_noted(libraries: Iterable[ctypes.CDLL], notes: list[str]) -> Iterator[None]:
    """Inside, calls into these libraries are noted. Each library has a function type of its own, so no others are."""
    kinds = [lib._FuncPtr for lib in libraries]

    def noting(kind: Any) -> Any:
        def call(self: Any, *args: Any) -> Any:
            notes.append(f"{self.__name__} {described(args)}")
            return super(kind, self).__call__(*args)

        return call

    for kind in kinds:
        kind.__call__ = noting(kind)
    try:
        yield
    finally:
        for kind in kinds:
            del kind.__call__


def described(value: Any) -> str:
    """Shapes and numbers; never contents, never addresses."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{tuple(value.shape)}{value.stride()}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, dict):
        return described([item for pair in sorted(value.items()) for item in pair])
    if isinstance(value, ctypes.Structure):
        return described([getattr(value, field[0]) for field in value._fields_])
    if isinstance(value, ctypes._SimpleCData):
        return described(value.value)
    if isinstance(value, ctypes._Pointer):
        return described(value.contents) if value else "null"
    if type(value).__name__ == "CArgObject":
        return described(value._obj)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= LARGEST_NUMBER:
        return "address"
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    return repr(value) if isinstance(value, (int, float, str, bytes, type(None))) else type(value).__name__
