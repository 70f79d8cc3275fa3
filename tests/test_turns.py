"""Two callbacks of one Trainer, of which one would save at every step: the other one's saves are made all the same."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from forks import run_forks
from lightning_resilience import EverySteps, Keep, ResilientCheckpoint, points
from lightning_resilience.schedule import Progress, Schedule
from lightning_resilience.session import Session
from support import TinyModel, committed, data, make_trainer, strategy


class SeldomByAgreement(Schedule):
    """What rank 0 decides, as with time or a loss; in steps, so that a test can count on it."""

    def due(self, now: Progress, last: Progress) -> str | None:
        return "it is time" if now.step - last.step >= 4 else None


class Held(L.Callback):
    """Keeps each save from ending until the beginning of the next batch whose number is a multiple of four.

    Args:
        last: number of the last batch, from which on none is kept.
    """

    def __init__(self, last: int) -> None:
        self._last = last
        self._go_on = threading.Event()

    def __enter__(self) -> Held:
        self._stop = points.listen(lambda name: name == "persist.begin" and self._go_on.wait(60))  # type: ignore[arg-type]
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if index % 4 == 0:
            self._go_on.set()
            session = Session.of(trainer)
            assert session is not None
            session.engine.drain(60)
            if index < self._last:
                self._go_on.clear()


def save_often_and_seldom(root: Path, seldom: Schedule, steps: int, devices: int = 1) -> tuple[list[int], list[int]]:
    """The steps that each of two callbacks has saved."""
    keep = Keep(last=-1)
    often = ResilientCheckpoint(root / "often", schedule=EverySteps(1), keep=keep, grace_seconds=0.01)
    other = ResilientCheckpoint(root / "seldom", schedule=seldom, keep=keep, grace_seconds=0.01)
    with Held(steps - 1) as held:
        trainer = make_trainer(
            root, held, often, other, max_steps=steps, max_epochs=-1, devices=devices,
            strategy=strategy("ddp" if devices > 1 else "single", devices),
        )  # fmt: skip
        trainer.fit(TinyModel(), data(4 * devices * (steps + 4)))
    return tuple([one.step for one in committed(root / name)] for name in ("often", "seldom"))  # type: ignore[return-value]


@pytest.mark.parametrize("seldom", [EverySteps(4), SeldomByAgreement()], ids=["by step", "by agreement"])
def test_save_that_another_callbacks_save_kept_from_being_made_is_the_next(tmp_path: Path, seldom: Schedule) -> None:
    often, other = save_often_and_seldom(tmp_path, seldom, 25)
    assert often == [1, 9, 17, 25]
    assert other == [5, 13, 21, 25]
    reasons = [one.reason for one in committed(tmp_path / "seldom")]
    assert "wanted at step 4" in reasons[0]
    assert all("wanted at step" in reason for reason in reasons[:-1])


@pytest.mark.ranks
def test_ranks_take_turns_alike(tmp_path: Path) -> None:
    saved, same = run_forks(save_often_and_seldom, tmp_path, SeldomByAgreement(), 49, 2, world_size=2, timeout=120)
    assert saved == same
    often, other = saved
    assert len(often) >= 4
    assert len(other) >= 4
    assert not {*often[:-1]} & {*other[:-1]}
