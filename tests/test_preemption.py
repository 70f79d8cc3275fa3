"""A signal to any rank, at any moment: one commit of the same step on all ranks, then an end that says "not finished"."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from forks import run_fork, run_forks, start_forks
from lightning_resilience import EverySteps, ResilientCheckpoint, SetupError, store
from lightning_resilience.preemption import WALL_TIME, Preempted, Preemption, check_signals, status_of
from lightning_resilience.tiers import LocalTier
from probes import Witness, fit, whole_steps
from support import TinyModel, data

NEVER = 10**6
TERM, USR1 = int(signal.SIGTERM), int(signal.SIGUSR1)


def kill_self(signum: int = TERM) -> None:
    os.kill(os.getpid(), signum)


class Sent(L.Callback):
    """Sends this process signals in a hook: ``moment`` is the hook's name, ``step`` the global step it is at."""

    def __init__(self, moment: str, step: int = 3, signals: Sequence[int] = (TERM,), ranks: Sequence[int] = (0,)) -> None:
        self.moment = moment
        self.step = step
        self.left = list(signals) if int(os.environ.get("RANK", "0")) in ranks else []
        setattr(self, moment, self._send)

    def _send(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step and not (trainer.sanity_checking and self.moment == "on_validation_start"):
            while self.left:
                kill_self(self.left.pop(0))


class Slow(L.Callback):
    """Steps of 10 ms, so that there is time for an answer."""

    def on_train_batch_end(self, *_: Any) -> None:
        time.sleep(0.01)


def commits(root: Path) -> list[tuple[int, str]]:
    """Step and reason of each checkpoint, oldest first; all are whole."""
    steps = whole_steps(root)
    manifests = store.list_checkpoints(LocalTier(root / "run")).committed.values()
    found = sorted((manifest.step, manifest.reason) for manifest in manifests)
    assert [step for step, _ in found] == steps
    return found


def preempted(root: Path, *callbacks: L.Callback, ranks: int = 1, steps: int = NEVER, **kwargs: Any) -> tuple[int, int]:
    """Train until a signal ends it; the step and the exit status."""
    how = "ddp" if ranks > 1 else "single"
    witness = kwargs.pop("checkpoint", None) or Witness(root, kwargs.pop("every", NEVER), grace_seconds=2.0)
    before = [signal.getsignal(one) for one in (TERM, USR1)]
    with pytest.raises(Preempted) as stop:
        fit(root, *callbacks, Slow(), witness, how=how, world_size=ranks, steps=steps, **kwargs)
    assert [signal.getsignal(one) for one in (TERM, USR1)] == before
    return stop.value.step, stop.value.code  # type: ignore[return-value]


# -- one process ------------------------------------------------------------------------------------------------------


def test_signal_in_a_step_saves_that_step_and_stops_with_the_signals_status(tmp_path: Path) -> None:
    assert run_fork(preempted, tmp_path, Sent("on_after_backward")) == (4, 143)
    assert commits(tmp_path) == [(4, "SIGTERM")]
