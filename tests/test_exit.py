"""However a process ends, short of a kill: the save under way is committed first, and the end is not long in coming.

A real launch, because it is the interpreter's own shutdown that is tried here.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor

from forks import run_fork, run_forks
from lightning_resilience import Keep, replication, store
from lightning_resilience import fit as fits
from lightning_resilience.tiers import LocalTier
from probes import Witness, fit, slow, whole_steps
from processes import run_alone
from support import TinyModel

WRITER = 1.5
"""Seconds that a save takes longer than usual: more than any of these processes would last by themselves."""


class EndsAt3(TinyModel):
    """Ends in some way in the step after the one that is being saved."""

    def __init__(self, ending: str) -> None:
        super().__init__()
        self.ending = ending

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 2:
            if self.ending == "sys.exit in a step":
                sys.exit(3)
            if self.ending == "exception in a step":
                raise ZeroDivisionError("a bug in user code")
            if self.ending == "interrupt in a step":
                os.kill(os.getpid(), signal.SIGINT)
        return super().training_step(batch, batch_idx)


def script(root: Path, ending: str) -> None:
    slow(WRITER)
    fit(root, Witness(root, 2), model=EndsAt3(ending), steps=2 if "fit" in ending else 8)
    if ending == "exception after fit":
        raise ZeroDivisionError("a bug in user code")
    if ending == "sys.exit after fit":
        sys.exit(3)


ENDINGS = {
    "end after fit": 0,
    "sys.exit after fit": 3,
    "exception after fit": 1,
    "sys.exit in a step": 3,
    "exception in a step": 1,
    "interrupt in a step": 1,
}


def end_in_all_ways(root: Path) -> dict[str, int]:
    """Exit statuses of as many forks of this process, each of which ends as a script does: through the interpreter."""
    faulthandler.cancel_dump_traceback_later()  # its thread would be missing in the forks, which would wait for it
    forked = {}
    for ending in ENDINGS:
        folder = root / ending
        folder.mkdir()
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
            log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            script(folder, ending)
            return {}
        forked[ending] = pid
    return {ending: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for ending, pid in forked.items()}


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    """All of them at once, each in a folder of its own, and how they ended."""
    root = tmp_path_factory.mktemp("exit")
    return root, run_alone(end_in_all_ways, root)


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_that_ends_commits_the_save_under_way(ends: tuple[Path, dict[str, int]], ending: str) -> None:
    root, statuses = ends
    log = (root / ending / "log").read_text()
    assert statuses[ending] == ENDINGS[ending], log
    assert whole_steps(root / ending) == [2]
    assert ("a bug in user code" in log) == ("exception" in ending)


def hang_and_raise(root: Path) -> None:
    """Raise while the writer is stuck for good."""
    slow(10_000)
    fits.DRAIN_AFTER_EXCEPTION = 1.0
    with pytest.raises(ZeroDivisionError):
        fit(root, Witness(root, 2), model=EndsAt3("exception in a step"))


def test_a_writer_that_is_stuck_holds_up_an_exception_for_a_bounded_time(tmp_path: Path) -> None:
    began = time.monotonic()
    run_fork(hang_and_raise, tmp_path)
    assert time.monotonic() - began < 20
    assert LocalTier(tmp_path / "run").names() == []


def end_with_a_slow_upload(root: Path) -> tuple[float, list[str]]:
    """How long the end takes while an upload is stuck, and what the log says of it."""
    slow(60.0, "replicate.file")
    replication.ABANDON = 0.5
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_resilience").addHandler(handler)
    began = time.monotonic()
    fit(root, Witness(root, 100, remote=(root / "cold").as_uri(), save_timeout=1.5), steps=3)
    return time.monotonic() - began, [line for line in said if "drain" in line]


def test_an_upload_that_is_stuck_holds_the_end_up_for_a_bounded_time_and_is_told_of(tmp_path: Path) -> None:
    seconds, said = run_fork(end_with_a_slow_upload, tmp_path)
    assert seconds < 20
    assert "left=1" in said[-1]
    assert "the next start goes on with them" in said[-1]
    assert whole_steps(tmp_path) == [3]


# -- what users are told of exists ------------------------------------------------------------------------------------


class Auditor(Logger):
    """Looks, whenever it is told of a checkpoint, whether what it is told is there and whole."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    name = version = "auditor"  # type: ignore[assignment]

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        pass

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        paths = {checkpoint_callback.best_model_path, checkpoint_callback.last_model_path}
        for path in {*paths, *checkpoint_callback.best_k_models} - {""}:
            tier, name = LocalTier(Path(path).parent), Path(path).name
            assert store.verify(tier, name, store.read_manifest(tier, name)) == []
        self.told.append(Path(checkpoint_callback.last_model_path).name)


class Scored(TinyModel):
    """Its score goes up and down, so that the best one is now this, now that."""

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("score", float(self.global_step % 3))


def train_with_an_auditor(root: Path, monitor: str | None) -> tuple[list[str], list[str], int]:
    """What the logger was told of and what subclasses were; and how often a polled path was missing."""
    auditor = Auditor()
    checkpoint = Witness(root, 1, keep=Keep(last=1), monitor=monitor, filename="{step}", save_last=True)
    missing, stop = [], threading.Event()

    def poll() -> None:
        while not stop.is_set():
            for name in ("best_model_path", "last_model_path"):
                path = getattr(checkpoint, name)
                # A path that is replaced while it is looked at does not count: users hold on to no path for that long.
                if path and not os.path.exists(path) and getattr(checkpoint, name) == path:
                    missing.append(path)

    slow(0.03, "persist.mid-file")
    thread = threading.Thread(target=poll)
    thread.start()
    try:
        fit(root, Paced(), checkpoint, model=Scored(), steps=150, logger=auditor)
    finally:
        stop.set()
        thread.join()
    return auditor.told, checkpoint.heard, len(missing)


class Paced(L.Callback):
    """Steps of 20 ms, so that saves end in the middle of them."""

    def on_train_batch_end(self, *args: Any) -> None:
        time.sleep(0.02)


@pytest.mark.parametrize("monitor", [None, "score"])
def test_paths_that_users_see_exist_at_every_instant(tmp_path: Path, monitor: str | None) -> None:
    told, heard, missing = run_fork(train_with_an_auditor, tmp_path, monitor)
    assert len(told) > 5
    assert told == heard
    assert missing == 0


def end_together(root: Path) -> tuple[list[str], str]:
    slow(0.5)
    checkpoint = Witness(root, 2)
    fit(root, checkpoint, how="ddp", world_size=2, steps=5)
    return checkpoint.heard, checkpoint.last_model_path


@pytest.mark.ranks
def test_when_fit_returns_on_two_ranks_the_last_step_is_committed_and_known_to_both(tmp_path: Path) -> None:
    first, second = run_forks(end_together, tmp_path, world_size=2)
    assert first == second
    assert first[1].endswith("step=5.ckpt")
    assert whole_steps(tmp_path)[-1] == 5
