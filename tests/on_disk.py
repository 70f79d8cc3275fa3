"""Real checkpoints in real folders, without torch: what the tests of the lower modules start from."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import points, store
from lightning_resilience.manifest import Manifest
from lightning_resilience.tiers import LocalTier

FILES = {"__0_0.distcp": b"weights of rank 0" * 50, "__1_0.distcp": b"weights of rank 1" * 70, "meta.pt": b"loops"}


class Crash(BaseException):
    """The process dies here: nothing may catch it, as nothing catches SIGKILL."""


def manifest(step: int = 100, **changes: Any) -> Manifest:
    """A manifest of a checkpoint at ``step``, later ones with a larger sequence."""
    plain = Manifest(
        run="5f0c",
        step=step,
        epoch=0,
        created="2026-11-29T16:00:00Z",
        reason="every 100 steps",
        files=(),
        sequence=step,
    )
    return replace(plain, **changes)


def begin(
    tier: LocalTier, partial: str, *, step: int = 100, files: Mapping[str, bytes] = FILES, **changes: Any
) -> Manifest:
    """Write the files of a checkpoint into ``partial``, and return the manifest that would commit it."""
    tier.begin(partial)
    entries = tuple(tier.write(partial, file, data, rank) for rank, (file, data) in enumerate(files.items()))
    return manifest(step, files=entries, world_size=2, **changes)


def save(
    tier: LocalTier, name: str = "", *, step: int = 100, files: Mapping[str, bytes] = FILES, **changes: Any
) -> str:
    """Commit a checkpoint; returns its name."""
    name = name or f"step={step}.ckpt"
    partial = f"{name}.partial-1234"
    store.commit(tier, partial, name, begin(tier, partial, step=step, files=files, **changes))
    return name


def stock_folder(root: Path, name: str = "stock.ckpt") -> Path:
    """A sharded checkpoint as stock Lightning leaves it."""
    folder = root / name
    folder.mkdir(parents=True)
    for file in (".metadata", "meta.pt", "__0_0.distcp"):
        (folder / file).write_bytes(b"stock")
    return folder


def flip(path: Path, position: int = 0) -> None:
    """Flip one bit of a file."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


@contextmanager
def listening(listener: Callable[[str], None]) -> Iterator[None]:
    """Have ``listener`` told of every point in the block."""
    stop = points.listen(listener)
    try:
        yield
    finally:
        stop()


@contextmanager
def crash_at(point: str) -> Iterator[None]:
    """Die when the pipeline reaches ``point``; fail if it never does."""

    def die(name: str) -> None:
        if name == point:
            raise Crash(name)

    with pytest.raises(Crash), listening(die):
        yield


def tree(root: Path) -> dict[str, bytes]:
    """Every file under ``root`` with its content."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def dies_before(k: int, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run ``action`` and die before its ``k``-th change to the file system; False where it makes fewer and finished."""
    left = k

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Crash
            left -= 1
            return call(*args, **kwargs)

        return wrapper

    with monkeypatch.context() as patch:
        for name in ("rename", "fsync", "write", "unlink", "rmdir", "mkdir"):
            patch.setattr(os, name, mortal(getattr(os, name)))
        try:
            action()
        except Crash:
            return True
    return False
