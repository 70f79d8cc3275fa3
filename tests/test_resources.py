"""A run gives back what it takes: memory, threads, files, slots; and what a dead one took is freed in the end."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import stat
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import Tensor, nn

from forks import run_fork, run_forks, start_forks
from lightning_resilience import Keep, SetupError, slots
from lightning_resilience.session import Session
from probes import Witness, at, die, fit
from support import TinyModel, settle

MIB = 2**20


# -- memory -----------------------------------------------------------------------------------------------------------


class Wide(TinyModel):
    """Parameters of ``mib`` MiB and two moments of each."""

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.wide = nn.Linear(2**9, mib * 2**9)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) + 0.0 * self.wide.weight[batch_idx, 0]


def resident() -> float:
    """MiB of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / MIB


class Meter(L.Callback):
    """Notes the resident memory before each batch, when the save after the one before it is done."""

    def __init__(self) -> None:
        self.readings: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.readings.append(resident())


def save_many_times(root: Path, saves: int, mib: int) -> tuple[list[float], int]:
    ctypes.CDLL(None).mallopt(
        -3, MIB
    )  # M_MMAP_THRESHOLD: what torch frees goes back at once, so that it does not count
    meter = Meter()
    checkpoint = Witness(root, 1, keep=Keep(last=1))
    fit(root, settle(), meter, checkpoint, model=Wide(mib), steps=saves)
    return meter.readings, len(checkpoint.heard)


@pytest.mark.parametrize(("saves", "mib"), [(20, 10), pytest.param(50, 33, marks=pytest.mark.slow)])
def test_the_last_save_needs_no_more_memory_than_the_third(tmp_path: Path, saves: int, mib: int) -> None:
    readings, heard = run_fork(save_many_times, tmp_path, saves, mib, timeout=120)
    assert heard == saves
    assert min(readings[-3:]) - readings[3] < 20, readings


def keys_on_the_board(root: Path) -> list[int]:
    """How many keys rank 0's store holds as the run goes on."""
    counts: list[int] = []

    class Count(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.is_global_zero:
                counts.append(Session.of(trainer).ranks._server.num_keys())  # type: ignore[union-attr]

    checkpoint = Witness(root, 1)
    fit(root, settle(), Count(), checkpoint, how="ddp", world_size=2, steps=20)
    return counts


@pytest.mark.ranks
def test_the_board_does_not_fill_up_with_the_saves_of_a_long_run(tmp_path: Path) -> None:
    counts, _ = run_forks(keys_on_the_board, tmp_path, world_size=2)
    assert max(counts[:5]) > 0
    assert max(counts[5:]) == max(counts[:5])


# -- threads and files ------------------------------------------------------------------------------------------------


def held(memory: Path) -> dict[str, Any]:
    """What this process has open and running, and what it left in its folder on tmpfs."""
    gc.collect()
    files = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that was used to list them
            files.append(os.readlink(f"/proc/self/fd/{name}"))
    with open("/proc/self/maps") as maps:
        mapped = [line for line in maps if "lightning_resilience-" in line]
    return {
        "ours": [file for file in files if "resilience" in file] + mapped + os.listdir(memory),
        "files": len(files),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "kernel threads": len(os.listdir("/proc/self/task")),
    }


def fit_three_times(root: Path, memory: Path, how: str, world_size: int, fails: bool) -> list[dict[str, Any]]:
    class Model(TinyModel):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if fails and self.global_step == 5:
                raise ZeroDivisionError

    memory = memory / os.environ.get("RANK", "0")
    memory.mkdir()
    seen = []
    for life in "123":
        checkpoint = Witness(root / life, 2, memory=str(memory))
        try:
            fit(root / life, checkpoint, model=Model(), how=how, world_size=world_size)
        except ZeroDivisionError:
            assert fails
        seen.append(held(memory))
    return seen


@pytest.mark.parametrize("fails", [False, True], ids=["", "exception"])
@pytest.mark.parametrize(("how", "world_size"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.ranks)])
def test_no_thread_file_or_slot_outlives_a_fit(
    tmp_path: Path, tmpfs: Path, how: str, world_size: int, fails: bool
) -> None:
    for seen in run_forks(fit_three_times, tmp_path, tmpfs, how, world_size, fails, world_size=world_size):
        for after in seen:
            assert after["ours"] == []
            assert not [name for name in after["threads"] if "resilience" in name]
        assert seen[2]["threads"] == seen[1]["threads"]
        assert seen[2]["kernel threads"] <= seen[1]["kernel threads"]
        assert seen[2]["files"] <= seen[1]["files"]


# -- slots ------------------------------------------------------------------------------------------------------------


def train_for_ever(root: Path, memory: Path) -> None:
    checkpoint = Witness(root, 2, memory=str(memory))
    at("commit.end", lambda: (root / "has saved").touch())
    fit(root, checkpoint, steps=10**7)


def train_and_die(root: Path, memory: Path) -> None:
    at("persist.mid-file", die, nth=2)
    fit(root, Witness(root, 2, memory=str(memory)), steps=20)


def train_briefly(root: Path, memory: Any) -> int:
    checkpoint = Witness(root, 2, memory=str(memory) if isinstance(memory, Path) else memory)
    fit(root, settle(), checkpoint, steps=4)
    return len(checkpoint.heard)


def an_hour_passes(memory: Path) -> None:
    for path in memory.rglob("*"):
        os.utime(path, (time.time() - 3601, time.time() - 3601))


def test_the_slots_of_a_killed_process_are_freed_after_an_hour_and_those_of_a_living_one_are_not(
    tmp_path: Path, tmpfs: Path
) -> None:
    with start_forks(train_for_ever, tmp_path / "a", tmpfs, world_size=1) as living:
        while not (tmp_path / "a" / "has saved").exists():
            assert living.processes[0].poll() is None, living.log(0)
            time.sleep(0.01)
        of_the_living = sorted(tmpfs.rglob("slot-*"))
        assert len(of_the_living) == 2
        with start_forks(train_and_die, tmp_path / "b", tmpfs, world_size=1) as dead:
            assert dead.wait() == [-signal.SIGKILL], dead.log(0)
        assert len(sorted(tmpfs.rglob("slot-*"))) == 4
        assert run_fork(train_briefly, tmp_path / "c", tmpfs) == 2
        assert len(sorted(tmpfs.rglob("slot-*"))) == 4  # its own run may start any time
        an_hour_passes(tmpfs)
        assert run_fork(train_briefly, tmp_path / "d", tmpfs) == 2
        assert sorted(tmpfs.rglob("slot-*")) == of_the_living
        assert living.processes[0].poll() is None, living.log(0)
    an_hour_passes(tmpfs)
    assert run_fork(train_briefly, tmp_path / "e", tmpfs) == 2
    assert list(tmpfs.iterdir()) == []


def look_at_slots(root: Path, memory: Path) -> list[tuple[str, int, int]]:
    """Name, permissions and owner of all that there is on tmpfs in the middle of a run."""
    seen: list[tuple[str, int, int]] = []

    class Look(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                for path in sorted(memory.rglob("*")):
                    status = path.stat()
                    seen.append((path.name, stat.S_IMODE(status.st_mode), status.st_uid))

    os.umask(0)
    fit(root, settle(), Look(), Witness(root, 2, memory=str(memory)), steps=4)
    return seen


def test_slots_are_private_to_the_user_whatever_the_umask(tmp_path: Path, tmpfs: Path) -> None:
    seen = run_fork(look_at_slots, tmp_path, tmpfs)
    folders = {"lightning_resilience", "slot"}
    kinds = [(name.partition("-")[0], mode, uid) for name, mode, uid in seen]
    assert {mode for name, mode, _ in kinds if name in folders} == {0o700}
    assert {mode for name, mode, _ in kinds if name not in folders} == {0o600}
    assert {uid for _, _, uid in kinds} == {os.getuid()}
    names = [name for name, _, _ in kinds]
    assert [names.count(name) for name in ("lightning_resilience", "slot", "lock", "__0_0.distcp")] == [1, 2, 1, 2]
    assert "meta.pt" in names


def watch_tmpfs(root: Path, memory: Any, free: int | None) -> tuple[int, list[str], list[str]]:
    """Saves made, what appeared on tmpfs meanwhile, and the log."""
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_resilience").addHandler(handler)
    mine: list[str] = []
    if free is not None:
        slots._free_bytes = lambda folder: free

    class Look(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            with open("/proc/self/maps") as maps:
                mine.extend(line for line in maps if str(slots.TMPFS) in line and "resilience" in line)

    checkpoint = Witness(root, 2, memory=memory)
    fit(root, settle(), Look(), checkpoint, steps=4)
    return len(checkpoint.heard), mine, records


def test_tmpfs_is_used_by_default_and_left_alone_without_memory(tmp_path: Path) -> None:
    saves, mapped, _ = run_fork(watch_tmpfs, tmp_path / "with", "auto", None)
    assert saves == 2
    assert mapped
    saves, mapped, _ = run_fork(watch_tmpfs, tmp_path / "without", False, None)
    assert saves == 2
    assert mapped == []


def test_a_tmpfs_that_is_too_small_is_left_alone_and_that_is_said(tmp_path: Path) -> None:
    saves, mapped, records = run_fork(watch_tmpfs, tmp_path, "auto", 4096)
    assert saves == 2
    assert mapped == []
    (line,) = [record for record in records if "event=memory" in record]
    assert "anonymous memory" in line
    assert "0 MiB free" in line


def test_a_memory_folder_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(SetupError, match="memory="):
        Witness(Path("run"), memory="/nonexistent/folder")
