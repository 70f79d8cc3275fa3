"""A killed run goes on from a step no older than the last one it reported, wherever it was killed."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from forks import run_fork, run_forks, start_forks
from lightning_resilience import Keep
from lightning_resilience.ledger import LEDGER
from lightning_resilience.tiers import LocalTier
from probes import Witness, at, die, fit, journal, whole_steps
from support import TinyModel

MOMENTS = [
    ("stage.piece", 1),
    ("staged", 1),
    ("persist.begin", 1),
    *(("persist.file", nth) for nth in range(1, 6)),  # shards, generators, meta.pt, .metadata, manifest
    *(("persist.mid-file", nth) for nth in range(1, 6)),
    ("persist.end", 1),
    ("commit.begin", 1),
    ("commit.manifest", 1),
    ("commit.renamed", 1),
    ("commit.end", 1),
    ("forget.begin", 1),
    ("forget.renamed", 1),
    ("forget.end", 1),
]


def checkpoint(root: Path) -> Witness:
    """Keeps as little as one may keep, so that a removal too early leaves nothing."""
    return Witness(root, 3, keep=Keep(last=1), save_last=True)


def live_and_die(root: Path, point: str, nth: int, world_size: int, victim: int) -> None:
    """Train; when rank 0 is at ``point`` for the ``nth`` time after the first reported commit, the victim dies."""
    rank = int(os.environ.get("RANK", "0"))
    (root / f"pid-{rank}").write_text(str(os.getpid()))

    def strike() -> None:
        os.kill(int((root / f"pid-{victim}").read_text()), signal.SIGKILL)
        if victim == rank:
            threading.Event().wait()

    if rank == 0:
        at(point, strike, nth=nth, when=lambda: bool(journal(root)))
    fit(root, checkpoint(root), how="ddp" if world_size > 1 else "single", world_size=world_size, steps=40)


def live_on(root: Path, world_size: int) -> tuple[int | None, int]:
    """Resume from "last" and train to the end; the step it began with, and its last."""
    witness = checkpoint(root)
    how = "ddp" if world_size > 1 else "single"
    trainer = fit(root, witness, how=how, world_size=world_size, steps=50, resume="last")
    return witness.began, trainer.global_step


def assert_goes_on(root: Path, world_size: int = 1) -> None:
    reported = journal(root)[-1]
    lives = run_forks(live_on, root, world_size, world_size=world_size)
    began = lives[0][0]
    assert began is not None
    assert began >= reported
    assert lives == [(began, 50)] * world_size
    assert whole_steps(root) == [began, 50]  # the one resumed from is in use, so it stays
    assert os.readlink(root / "run" / "last.ckpt").endswith("step=50.ckpt")


@pytest.mark.parametrize(("point", "nth"), MOMENTS)
def test_a_run_killed_at_any_point_of_a_save_goes_on_from_the_last_reported_commit(
    tmp_path: Path, point: str, nth: int
) -> None:
    with start_forks(live_and_die, tmp_path, point, nth, 1, 0, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert_goes_on(tmp_path)


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("point", ["persist.mid-file", "commit.manifest", "commit.renamed", "forget.renamed"])
def test_two_ranks_of_which_one_is_killed_go_on_together(tmp_path: Path, point: str, victim: int) -> None:
    with start_forks(live_and_die, tmp_path, point, 1, 2, victim, world_size=2) as lives:
        assert lives.processes[victim].wait(60) == -signal.SIGKILL, lives.log(victim)
        with suppress(subprocess.TimeoutExpired):
            lives.processes[1 - victim].wait(0.5)  # what the survivor does meanwhile must do no harm
    assert_goes_on(tmp_path, 2)


# -- any time ---------------------------------------------------------------------------------------------------------


def live_again(root: Path) -> None:
    """One of many lives: resume, save after every step, never end by itself."""
    # Killed before their first commit as they are, many in a row: nothing that a scheduler would do to a run.
    witness = Witness(root, 1, keep=Keep(last=1), save_last=True, max_attempts=None)
    (root / "alive").touch()
    fit(root, witness, BeganAt(root), steps=10**6, resume="last")


class BeganAt(L.Callback):
    """Writes down with which step each life began."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        with open(self.root / "began", "a") as file:
            file.write(f"{trainer.global_step}\n")


def text_of(path: Path) -> str:
    """What the life wrote; nothing where it was killed before it wrote, or between opening the file and writing."""
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize("kills", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_a_run_killed_again_and_again_at_random_never_goes_back_behind_what_it_reported(
    tmp_path: Path, kills: int
) -> None:
    delays = random.Random(kills)
    lives_that_trained = 0
    for number in itertools.count():
        if number >= kills and journal(tmp_path):  # on a busy machine no life may have got as far as a commit
            break
        reported = max(journal(tmp_path), default=0)
        (tmp_path / "alive").unlink(missing_ok=True)
        (tmp_path / "began").unlink(missing_ok=True)
        with start_forks(live_again, tmp_path, world_size=1) as life:
            while not (tmp_path / "alive").exists():
                assert life.processes[0].poll() is None, life.log(0)
                time.sleep(0.001)
            time.sleep(delays.uniform(0.0, 0.6) + max(number - kills, 0))
            assert life.processes[0].poll() is None, life.log(0)
        if began := text_of(tmp_path / "began"):
            lives_that_trained += 1
            assert int(began) >= reported
    assert lives_that_trained > kills // 4
    reported = journal(tmp_path)[-1]
    began, ended = run_fork(finish, tmp_path)
    assert began >= reported
    assert whole_steps(tmp_path) == [began, ended]


def finish(root: Path) -> tuple[int | None, int]:
    """The last life: ten more steps, and a proper end."""
    witness = Witness(root, 4, keep=Keep(last=1), save_last=True, max_attempts=None)
    ten_more = max(LocalTier(root / "run").names(), key=step_of)
    trainer = fit(root, witness, steps=step_of(ten_more) + 10, resume="last")
    return witness.began, trainer.global_step


def step_of(name: str) -> int:
    return int(name.removesuffix(".ckpt").rpartition("step=")[2])


# -- one name, twice --------------------------------------------------------------------------------------------------


class SavesTwice(L.Callback):
    """Saves under one name after step 1 and after step 2, and arms the strike in between."""

    def __init__(self, path: Path, moment: str) -> None:
        self.path = path
        self.moment = moment

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == 2:
            if self.moment == "between the renames":
                at("commit.manifest", die_after_a_rename)
            else:
                at(self.moment, die)
        trainer.save_checkpoint(self.path)


def die_after_a_rename() -> None:
    rename = os.rename

    def rename_and_die(*args: Any) -> None:
        rename(*args)
        die()

    os.rename = rename_and_die


def save_twice(root: Path, moment: str) -> None:
    fit(root, Witness(root, 100), SavesTwice(root / "run" / "mine.ckpt", moment), steps=5)


def load(root: Path) -> int:
    model = TinyModel()
    steps: list[int] = []
    model.on_train_start = lambda: steps.append(model.global_step)  # type: ignore[method-assign]
    fit(root, Witness(root, 100), model=model, steps=5, resume=root / "run" / "mine.ckpt")
    return steps[0]


@pytest.mark.parametrize(
    ("moment", "survivor"),
    [
        ("persist.mid-file", 1),
        ("persist.end", 1),
        ("commit.manifest", 1),
        ("between the renames", 2),
        ("commit.renamed", 2),
        ("commit.end", 2),
    ],
)
def test_a_kill_while_a_name_is_saved_again_leaves_the_old_or_the_new_one(
    tmp_path: Path, moment: str, survivor: int
) -> None:
    with start_forks(save_twice, tmp_path, moment, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert run_fork(load, tmp_path) == survivor
    assert whole_steps(tmp_path) == [survivor, 5]


def save_under_a_name_of_its_own(root: Path) -> None:
    at("persist.end", die)
    fit(root, SavesTwice(root / "run" / "mine", "never"), Witness(root, 100), steps=5)


def test_what_a_killed_save_under_any_name_left_is_swept_and_nothing_that_looks_a_little_like_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "run" / "notes.partial-1").mkdir(parents=True)
    with start_forks(save_under_a_name_of_its_own, tmp_path, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert len({*os.listdir(tmp_path / "run")} - {LEDGER}) == 2
    assert run_fork(live_on, tmp_path, 1) == (0, 50)
    there = sorted({*os.listdir(tmp_path / "run")} - {LEDGER})
    assert there[1:] == ["last.ckpt", "notes.partial-1"]
    assert len(there) == 3
