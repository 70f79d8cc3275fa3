"""A run that crashes before it gets any further stops trying the same checkpoint, and then stops for good."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest

from forks import run_fork, run_forks, start_forks
from lightning_resilience import CrashLoop, Keep, ResilientCheckpoint, SetupError, memory
from lightning_resilience.attempts import ATTEMPTS, Attempts
from probes import Witness, die, fit, whole_steps
from support import settle


class Ends(L.Callback):
    """Ends this life in its first step, or before it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_start(self, *_: Any) -> None:
        if "before a step" in self.how:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_rank != trainer.world_size - 1:
            return
        if self.how == "kill":
            die()
        if self.how == "exception":
            raise ZeroDivisionError("a bug in user code")
        if self.how == "exit":
            raise SystemExit(0)
        if self.how == "exit with a status":
            raise SystemExit(2)
        os.kill(os.getpid(), signal.SIGINT if self.how == "interrupt" else signal.SIGTERM)


def a_run(root: Path, ranks: int = 1) -> None:
    """Leaves checkpoints of steps 2, 4 and 6."""
    how = "ddp" if ranks > 1 else "single"
    fit(root, settle(), Witness(root, 2, keep=Keep(last=9)), how=how, world_size=ranks, steps=6)


def live(root: Path, ending: str, ranks: int = 1, **kwargs: Any) -> int | str | None:
    """Resume and end as told: the step it began with, or why it did not begin."""
    witness = Witness(root, 1000, keep=Keep(last=9), **kwargs)
    how = "ddp" if ranks > 1 else "single"
    try:
        fit(root, witness, Ends(ending), how=how, world_size=ranks, steps=1000, resume="last")
    except CrashLoop as error:
        return str(error)
    except (Exception, SystemExit):
        return witness.began
    raise AssertionError("it went on")


def lives(root: Path, endings: list[str], **kwargs: Any) -> list[int | str | None]:
    return [live(root, ending, **kwargs) for ending in endings]


def test_after_as_many_crashes_the_checkpoint_before_it_is_tried_and_then_the_run_stops_with_instructions(
    tmp_path: Path,
) -> None:
    run_fork(a_run, tmp_path)
    with start_forks(live, tmp_path, "kill", world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert run_fork(lives, tmp_path, ["exception"] * 5) == [6, 6, 4, 4, 4]
    told, explicit, mended = run_fork(stop_and_go_on, tmp_path)
    assert "step=6.ckpt: 3 starts from it crashed" in told
    assert "step=4.ckpt: 3 starts from it crashed" in told
    assert str(tmp_path / "run" / ATTEMPTS) in told
    assert "epoch=0-step=2.ckpt" in told
    assert explicit == 6
    assert mended == 6


def crash_with_a_bad_slot(root: Path) -> dict[str, int]:
    """Every start finds the newest checkpoint damaged in memory, while it reads it, and whole in the folder."""
    whole = memory.whole

    def seems_whole(entry: Any, paths: Any, *, by_size: bool = False) -> Path | None:
        if not by_size:
            return None
        copy = root / f"copy-{entry.path}"
        copy.write_bytes(bytes(entry.size))
        return copy

    memory.whole = seems_whole
    memory.MemoryTier.claims = lambda self, manifest: {entry.path: [] for entry in manifest}  # type: ignore[method-assign]
    try:
        live(root, "exception")
    finally:
        memory.whole = whole
    return Attempts(root / "run").read()


def test_a_start_that_chooses_twice_counts_once(tmp_path: Path) -> None:
    run_fork(a_run, tmp_path)
    for count in (1, 2):
        assert run_fork(crash_with_a_bad_slot, tmp_path) == {"epoch=0-step=6.ckpt": count}


def stop_and_go_on(root: Path) -> tuple[Any, int | None, Any]:
    """As the instructions say: an explicit checkpoint, and the newest again without the file."""
    told, witness = live(root, "exception"), Witness(root, 1000)
    with pytest.raises(ZeroDivisionError):
        fit(root, witness, Ends("exception"), steps=1000, resume=root / "run" / "epoch=0-step=6.ckpt")
    (root / "run" / ATTEMPTS).unlink()
    return told, witness.began, live(root, "exception")


def ends_that_are_no_crash(root: Path) -> tuple[list[Any], bool, list[Any]]:
    a_run(root)
    told = lives(root, ["interrupt", "exit", "preemption before a step"] * 2, max_attempts=1)
    there = (root / "run" / ATTEMPTS).exists()
    return told, there, lives(root, ["exit with a status", "exit", "preemption"], max_attempts=1)


def test_interrupts_preemptions_and_exits_do_not_count(tmp_path: Path) -> None:
    told, there, crashes = run_fork(ends_that_are_no_crash, tmp_path)
    assert told == [6, 6, None] * 2
    assert not there
    assert crashes == [6, 4, 4]


def progress_in_between(root: Path) -> tuple[list[Any], dict[str, int], int, bool]:
    a_run(root)
    told = lives(root, ["exception"] * 2)
    counts = json.loads((root / "run" / ATTEMPTS).read_text())
    trainer = fit(root, settle(), Witness(root, 2), steps=9, resume="last")
    return told, counts, trainer.global_step, (root / "run" / ATTEMPTS).exists()


def test_a_commit_makes_attempts_count_anew(tmp_path: Path) -> None:
    told, counts, step, there = run_fork(progress_in_between, tmp_path)
    assert (told, counts, step, there) == ([6, 6], {"epoch=0-step=6.ckpt": 2}, 9, False)
    assert whole_steps(tmp_path)[-1] == 9


class EndsAt7(Ends):
    """Crashes at one and the same step."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            super().on_train_batch_start(trainer)


def crashes_at_7(root: Path) -> list[int | str | None]:
    a_run(root)
    told: list[int | str | None] = []
    while not isinstance(told[-1] if told else None, str):
        witness = Witness(root, 2, keep=Keep(last=9))
        try:
            fit(root, settle(), witness, EndsAt7("exception"), steps=1000, resume="last")
        except CrashLoop as error:
            told.append(str(error))
        except ZeroDivisionError:
            told.append(witness.began)
    return told


def test_steps_that_are_saved_once_more_are_no_progress(tmp_path: Path) -> None:
    *began, told = run_fork(crashes_at_7, tmp_path)
    assert began == [6, 6, 6, 4, 6, 6, 6]
    assert isinstance(told, str)


def for_ever(root: Path) -> list[Any]:
    a_run(root)
    return lives(root, ["exception"] * 5, max_attempts=None)


def test_without_a_limit_the_newest_is_tried_for_ever(tmp_path: Path) -> None:
    assert run_fork(for_ever, tmp_path) == [6] * 5


@pytest.mark.ranks
def test_two_ranks_pass_the_same_checkpoint_over(tmp_path: Path) -> None:
    run_forks(a_run, tmp_path, 2, world_size=2)
    began = [crash_together(tmp_path) for _ in range(3)]
    assert began == [[6, 6], [4, 4], None]


def crash_together(root: Path) -> list[int] | None:
    """Where both ranks began; None where they were told to stop."""
    with start_forks(live_together, root, world_size=2) as ranks:
        ranks.wait()
        if all("crashes again and again" in ranks.log(rank) for rank in (0, 1)):
            return None
    return [int((root / f"began-{rank}").read_text()) for rank in (0, 1)]


def live_together(root: Path) -> None:
    fit(
        root,
        BeganAt(root),
        Witness(root, 1000, keep=Keep(last=9), max_attempts=1),
        Ends("exception"),
        how="ddp",
        world_size=2,
        steps=1000,
        resume="last",
    )


class BeganAt(L.Callback):
    def __init__(self, root: Path) -> None:
        self.root = root

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        (self.root / f"began-{trainer.global_rank}").write_text(str(trainer.global_step))


# -- the record -------------------------------------------------------------------------------------------------------


def test_record_counts_forgives_and_is_gone_when_nothing_counts(tmp_path: Path) -> None:
    for expected in (1, 2):
        attempts = Attempts(tmp_path)
        attempts.begin("a.ckpt")
        assert Attempts(tmp_path).read() == {"a.ckpt": expected}
    attempts.forgive()
    attempts.clear()  # of a start that has ended already
    assert Attempts(tmp_path).read() == {"a.ckpt": 1}
    attempts.begin("b.ckpt", ["a.ckpt"])
    assert attempts.read() == {"a.ckpt": 1, "b.ckpt": 1}
    attempts.begin("c.ckpt", ["a.ckpt"])
    assert attempts.read() == {"a.ckpt": 1, "c.ckpt": 1}
    attempts.clear()
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": "x"}', '{"a": null}'])
def test_damaged_record_counts_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / ATTEMPTS).write_text(content)
    assert Attempts(tmp_path).read() == {}


@pytest.mark.parametrize("value", [0, -1, 1.5, "3", True])
def test_number_of_attempts_is_checked(value: Any) -> None:
    with pytest.raises(SetupError, match="max_attempts"):
        ResilientCheckpoint(max_attempts=value)
