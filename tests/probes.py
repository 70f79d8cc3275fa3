"""Callbacks and listeners that break a run on purpose, and what a test asks of the folder afterwards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L

from lightning_resilience import EverySteps, ResilientCheckpoint, points, store
from lightning_resilience.saves import Committed
from lightning_resilience.tiers import LocalTier
from support import TinyModel, data, make_trainer, strategy

JOURNAL = "journal"
"""File beside the run folder with the step of every commit that rank 0 was told of, one a line."""


class Witness(ResilientCheckpoint):
    """Writes each commit it is told of to the journal, durably, and remembers where training began.

    Args:
        root: holds the run folder ``run`` and the journal.
    """

    def __init__(self, root: Path, steps: int = 2, **kwargs: Any) -> None:
        kwargs.setdefault("schedule", EverySteps(steps))
        kwargs.setdefault("dirpath", root / "run")
        super().__init__(**kwargs)
        self.journal = root / JOURNAL
        self.began: int | None = None
        self.heard: list[str] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.began = trainer.global_step

    def on_checkpoint_committed(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: Committed) -> None:
        self.heard.append(checkpoint.path.name)
        if trainer.global_rank == 0:
            with open(self.journal, "a") as journal:
                journal.write(f"{checkpoint.manifest.step}\n")
                journal.flush()
                os.fsync(journal.fileno())


def journal(root: Path) -> list[int]:
    """Steps of the commits that were reported, in order."""
    path = root / JOURNAL
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def fit(
    root: Path,
    *callbacks: L.Callback,
    model: L.LightningModule | None = None,
    how: str = "single",
    world_size: int = 1,
    steps: int = 8,
    resume: str | Path | None = None,
    **kwargs: Any,
) -> L.Trainer:
    """Train up to ``steps``."""
    kwargs.setdefault("strategy", strategy(how, world_size))
    trainer = make_trainer(root, *callbacks, devices=world_size, max_steps=steps, max_epochs=-1, **kwargs)
    trainer.fit(model or TinyModel(), data(64), ckpt_path=resume)
    return trainer


def whole_steps(root: Path) -> list[int]:
    """Steps of the checkpoints in the run folder, oldest first; fails unless each is whole and all there is."""
    tier = LocalTier(root / "run")
    listing = store.list_checkpoints(tier)
    assert listing.unusable == {}
    for name, manifest in listing.committed.items():
        assert store.verify(tier, name, manifest) == [], name
    links = {entry.name for entry in os.scandir(tier.root) if entry.is_symlink()}
    assert {name for name in os.listdir(tier.root) if not name.startswith(".")} - links == {*listing.committed}
    return [listing.committed[name].step for name in reversed(listing.newest_first())]


def die() -> None:
    """End this process as a power cut would: nothing runs any more."""
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def at(point: str, action: Callable[[], None], *, nth: int = 1, when: Callable[[], bool] = lambda: True) -> None:
    """Run ``action`` the ``nth`` time that ``point`` is reached while ``when()``."""
    reached = 0

    def listener(name: str) -> None:
        nonlocal reached
        if name == point and when():
            reached += 1
            if reached == nth:
                action()

    points.listen(listener)


def slow(seconds: float, point: str = "persist.begin") -> None:
    """Let every save take ``seconds`` longer."""
    points.listen(lambda name: time.sleep(seconds) if name == point else None)
