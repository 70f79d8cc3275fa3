"""After a kill the next process on the node reads its shards from memory, and only what is this run's and is whole."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.loggers import CSVLogger

from forks import run_fork, run_forks, start_forks
from lightning_resilience import Keep, memory, slots
from lightning_resilience.manifest import MANIFEST
from lightning_resilience.slots import Slot
from probes import Witness, at, die, fit, whole_steps
from processes import TESTS
from support import TinyModel, data, settle

COMMITTED = 4
"""Step of the last save that was committed in a life that is killed."""
STEPS = 8


class Listening(logging.Handler):
    """What the package logs in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        logger = logging.getLogger("lightning_resilience")
        logger.setLevel(logging.INFO)
        logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def tiers(self) -> str:
        """Where the log says that the checkpoint was read from."""
        (line,) = [line for line in self.lines if line.startswith("event=resume step")]
        return " ".join(word for word in line.split() if word.startswith(("tier=", "memory=", "fetched=")))


class CountsSlots(L.Callback):
    """The most slots that there were on tmpfs before a batch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.most = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self.most = max(self.most, len(slots_in(self.folder)))


def slots_in(folder: Path) -> list[Path]:
    return sorted(folder.rglob("slot-*"))


def witness(root: Path, folder: Any, **kwargs: Any) -> Witness:
    where = str(folder) if isinstance(folder, Path) else folder
    return Witness(root, 2, keep=Keep(last=-1), memory=where, filename="{step}", **kwargs)


def train_and_die(root: Path, folder: Any, how: str, world_size: int, point: str, nth: int, **kwargs: Any) -> None:
    """All ranks die when rank 0 is at ``point`` for the ``nth`` time."""
    rank = int(os.environ.get("RANK", "0"))
    (root / f"pid-{rank}").write_text(str(os.getpid()))

    def strike() -> None:
        for other in range(1, world_size):
            os.kill(int((root / f"pid-{other}").read_text()), signal.SIGKILL)
        die()

    if rank == 0:
        at(point, strike, nth=nth)
    fit(root, settle(), witness(root, folder, **kwargs), how=how, world_size=world_size, steps=STEPS)


def live_on(
    root: Path, folder: Any, how: str = "single", world_size: int = 1, **kwargs: Any
) -> tuple[int | None, str, dict[int, float], int]:
    """Resume; where it began, from which tiers, the losses, and the most slots there were."""
    heard, model, counts = Listening(), TinyModel(), CountsSlots(folder if isinstance(folder, Path) else root)
    checkpoint = witness(root, folder, **kwargs)
    fit(root, settle(), counts, checkpoint, model=model, how=how, world_size=world_size, steps=STEPS, resume="last")
    return (
        checkpoint.began,
        heard.tiers() if "RANK" not in os.environ or os.environ["RANK"] == "0" else "",
        dict(model.history),
        counts.most,
    )


def live_undisturbed(root: Path, how: str, world_size: int) -> dict[int, float]:
    model = TinyModel()
    fit(root, settle(), witness(root, False), model=model, how=how, world_size=world_size, steps=STEPS)
    return dict(model.history)


def kill(
    root: Path, folder: Any, how: str = "single", world_size: int = 1, at: tuple[str, int] = ("commit.end", 2)
) -> None:
    """Leave a run that was killed, with checkpoints of the steps 2 and 4."""
    with start_forks(train_and_die, root, folder, how, world_size, *at, world_size=world_size) as lives:
        assert lives.wait() == [-signal.SIGKILL] * world_size, lives.log(0)


def damage(root: Path, pattern: str = "*.distcp", step: int = COMMITTED) -> None:
    """Flip a bit in files of the folder, whose sizes stay."""
    files = [*(root / "run" / f"step={step}.ckpt").glob(pattern)]
    assert files
    for path in files:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


# -- it is read -------------------------------------------------------------------------------------------------------

KINDS = [
    ("single", 1),
    pytest.param("ddp", 2, marks=pytest.mark.ranks),
    pytest.param("fsdp2", 2, marks=pytest.mark.ranks),
]


@pytest.mark.parametrize(("how", "world_size"), KINDS)
def test_a_killed_run_goes_on_from_memory_alone_although_all_of_its_folder_is_damaged(
    tmp_path: Path, tmpfs: Path, how: str, world_size: int
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    undisturbed = run_forks(live_undisturbed, tmp_path / "a", how, world_size, world_size=world_size)
    kill(tmp_path / "b", tmpfs, how, world_size)
    assert len(slots_in(tmpfs)) == 2 * world_size
    for pattern in ("*.distcp", "*.pt", ".metadata"):
        damage(tmp_path / "b", pattern)
    lives = run_forks(live_on, tmp_path / "b", tmpfs, how, world_size, world_size=world_size)
    for (began, _, losses, most), whole in zip(lives, undisturbed, strict=True):
        assert began == COMMITTED
        assert losses == {step: loss for step, loss in whole.items() if step >= COMMITTED}
        assert most <= 2 * world_size  # what the dead left goes before there is more
    assert lives[0][1] == f"tier=memory memory={world_size}/{world_size}"
    assert list(tmpfs.iterdir()) == []


def test_what_the_folder_lacks_and_memory_has_is_brought_to_the_folder(tmp_path: Path, tmpfs: Path) -> None:
    kill(tmp_path, tmpfs)
    for path in (tmp_path / "run" / f"step={COMMITTED}.ckpt").iterdir():
        if path.name != MANIFEST:
            path.unlink()
    began, tiers, *_ = run_fork(live_on, tmp_path, tmpfs)
    assert (began, tiers) == (COMMITTED, "tier=memory memory=1/1")
    assert whole_steps(tmp_path) == [2, COMMITTED, 6, STEPS]


def test_a_run_behind_a_url_fetches_nothing_that_is_in_memory(tmp_path: Path, tmpfs: Path) -> None:
    url = f"local://{tmp_path}/bucket"
    with start_forks(train_url_and_die, tmp_path, tmpfs, url, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    for path in (tmp_path / "bucket" / f"step={COMMITTED}.ckpt").iterdir():
        if path.name != MANIFEST:
            path.unlink()
    began, tiers, *_ = run_fork(live_on_url, tmp_path, tmpfs, url)
    assert (began, tiers) == (COMMITTED, "tier=memory memory=1/1")


class AtURL(Witness):
    """A witness of saves without a folder."""

    def on_checkpoint_committed(self, *args: Any) -> None:
        pass


def fit_url(root: Path, folder: Path, url: str, **kwargs: Any) -> tuple[int | None, Listening]:
    heard = Listening()
    checkpoint = AtURL(root, 2, dirpath=url, keep=Keep(last=-1), memory=str(folder), filename="{step}")
    fit(root, settle(), checkpoint, steps=STEPS, **kwargs)
    return checkpoint.began, heard


def train_url_and_die(root: Path, folder: Path, url: str) -> None:
    at("commit.end", die, nth=2)
    fit_url(root, folder, url)


def live_on_url(root: Path, folder: Path, url: str) -> tuple[int | None, str]:
    began, heard = fit_url(root, folder, url, resume="last")
    return began, heard.tiers()


def fit_numbered(root: Path, folder: Path, resume: str | None = None) -> tuple[int | None, Listening]:
    """Under a logger that gives each life a folder of its own."""
    heard = Listening()
    checkpoint = Witness(root, 2, dirpath=None, keep=Keep(last=-1), memory=str(folder), filename="{step}")
    fit(root, settle(), checkpoint, steps=STEPS, resume=resume, logger=CSVLogger(root))
    return checkpoint.began, heard


def train_numbered_and_die(root: Path, folder: Path) -> None:
    at("commit.end", die, nth=2)
    fit_numbered(root, folder)


def live_on_numbered(root: Path, folder: Path) -> tuple[int | None, str]:
    began, heard = fit_numbered(root, folder, "last")
    return began, heard.tiers()


def test_a_run_whose_logger_numbers_its_lives_finds_what_the_one_before_left(tmp_path: Path, tmpfs: Path) -> None:
    with start_forks(train_numbered_and_die, tmp_path, tmpfs, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert run_fork(live_on_numbered, tmp_path, tmpfs) == (COMMITTED, "tier=memory memory=1/1")
    assert list(tmpfs.iterdir()) == []


@pytest.mark.ranks
def test_where_one_ranks_memory_is_lost_its_shards_are_read_in_the_folder(tmp_path: Path, tmpfs: Path) -> None:
    kill(tmp_path, tmpfs, "ddp", 2)
    (lost,) = tmpfs.glob("*-rank1")
    shutil.rmtree(lost)
    damage(tmp_path, "__0_*")
    lives = run_forks(live_on, tmp_path, tmpfs, "ddp", 2, world_size=2)
    assert [life[0] for life in lives] == [COMMITTED] * 2
    assert lives[0][1] == "tier=memory,hot memory=1/2"


@pytest.mark.ranks
def test_one_rank_goes_on_from_what_two_left_in_memory(tmp_path: Path, tmpfs: Path) -> None:
    kill(tmp_path, tmpfs, "ddp", 2)
    damage(tmp_path)
    began, tiers, _, most = run_fork(live_on, tmp_path, tmpfs)
    assert (began, tiers) == (COMMITTED, "tier=memory memory=2/2")
    assert most == 2


def on_its_own_node(function: Callable[..., Any], root: Path, folder: Path, *args: Any) -> Any:
    """Each rank on a machine of its own: another memory, another disk."""
    os.environ["NODE"] = os.environ["RANK"]
    mine = folder / os.environ["RANK"]
    mine.mkdir(exist_ok=True)
    return function(root, mine, *args, dirpath=f"{root}/$NODE/run")


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_each_node_has_a_memory_of_its_own_and_gives_to_the_others_what_they_lack(
    tmp_path: Path, tmpfs: Path, how: str
) -> None:
    arguments = (train_and_die, tmp_path, tmpfs, how, 2, "commit.end", 2)
    with start_forks(on_its_own_node, *arguments, world_size=2) as lives:
        assert lives.wait() == [-signal.SIGKILL] * 2, lives.log(0)
    for node in "01":
        damage(tmp_path / node)
    lives_after = run_forks(on_its_own_node, live_on, tmp_path, tmpfs, how, 2, world_size=2)
    assert [life[0] for life in lives_after] == [COMMITTED] * 2
    assert "tier=memory" in lives_after[0][1]
    assert lives_after[0][1].endswith("memory=2/2")
    assert slots_in(tmpfs) == []


# -- it is not read ---------------------------------------------------------------------------------------------------


def half_fill_and_die(root: Path, folder: Path) -> None:
    """Die in the middle of the copy into the slot that holds step 2."""
    fill, filled = Slot.fill, []

    def fill_half(slot: Slot, *args: Any) -> None:
        filled.append(slot)
        before = bytes(slot.view())
        fill(slot, *args)
        if len(filled) == 3:
            assert slot is filled[0]
            half = len(before) // 2
            slot.view()[half:] = before[half:]
            assert bytes(slot.view()) != before
            die()

    Slot.fill = fill_half  # type: ignore[method-assign]
    train_and_die(root, folder, "single", 1, "never", 1)


@pytest.mark.parametrize("moment", ["half filled", "persist.mid-file"])
def test_a_slot_that_was_being_refilled_is_not_used_for_what_it_held_before(
    tmp_path: Path, tmpfs: Path, moment: str
) -> None:
    if moment == "half filled":
        with start_forks(half_fill_and_die, tmp_path, tmpfs, world_size=1) as life:
            assert life.wait() == [-signal.SIGKILL], life.log(0)
    else:
        shards_of_the_third = ("persist.file", 2 * 5 + 2)  # five files a save; the shards of it are written
        kill(tmp_path, tmpfs, at=shards_of_the_third)
    shutil.rmtree(tmp_path / "run" / f"step={COMMITTED}.ckpt")
    saved = [slot for slot in slots_in(tmpfs) if (slot / memory.SAVED).exists()]
    assert len(saved) == 2  # both say that they hold a save
    began, tiers, *_ = run_fork(live_on, tmp_path, tmpfs)
    assert (began, tiers) == (2, "tier=hot")


def opened(slot: Path) -> None:
    slot.chmod(0o755)


def readable(slot: Path) -> None:
    (slot / "__0_0.distcp").chmod(0o644)


def linked(slot: Path) -> None:
    real = slot / "__0_0.distcp"
    real.rename(slot / "real")
    real.symlink_to(slot / "real")


def of_another_user(slot: Path) -> None:
    os.chown(slot / "__0_0.distcp", 12345, -1)


def folder_of_another_user(slot: Path) -> None:
    os.chown(slot.parent, 12345, -1)


def folder_linked(slot: Path) -> None:
    if not slot.parent.is_symlink():
        real = slot.parent.rename(slot.parent.with_name("real"))
        slot.parent.symlink_to(real)


def flipped(slot: Path) -> None:
    with open(slot / "__0_0.distcp", "r+b") as file:
        file.seek(1000)
        byte = file.read(1)
        file.seek(1000)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    "spoil", [opened, readable, linked, of_another_user, folder_of_another_user, folder_linked, flipped]
)
def test_memory_that_is_not_private_or_not_whole_is_not_used(
    tmp_path: Path, tmpfs: Path, spoil: Callable[[Path], None]
) -> None:
    if "another" in spoil.__name__ and os.getuid() != 0:
        pytest.skip("only root can give files away")
    kill(tmp_path, tmpfs)
    for slot in slots_in(tmpfs):
        spoil(slot)
    began, tiers, *_ = run_fork(live_on, tmp_path, tmpfs)
    assert began == COMMITTED
    assert tiers == "tier=hot"


def test_the_memory_of_another_run_is_neither_read_nor_touched(tmp_path: Path, tmpfs: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    kill(tmp_path / "a", tmpfs)
    left = slots_in(tmpfs)
    shutil.copytree(tmp_path / "a" / "run", tmp_path / "b" / "run")
    began, tiers, *_ = run_fork(live_on, tmp_path / "b", tmpfs)
    assert (began, tiers) == (COMMITTED, "tier=hot")
    assert slots_in(tmpfs) == left
    damage(tmp_path / "a")
    began, tiers, *_ = run_fork(live_on, tmp_path / "a", tmpfs)
    assert (began, tiers) == (COMMITTED, "tier=memory memory=1/1")
    assert slots_in(tmpfs) == []


def hang_after_a_commit(root: Path, folder: Path) -> None:
    def hang() -> None:
        (root / "hangs").touch()
        time.sleep(1000)

    at("commit.end", hang, nth=2)
    fit(root, settle(), witness(root, folder), steps=STEPS)


def test_the_memory_of_a_living_process_is_neither_read_nor_touched_by_another_one_of_the_same_folder(
    tmp_path: Path, tmpfs: Path
) -> None:
    with start_forks(hang_after_a_commit, tmp_path, tmpfs, world_size=1) as living:
        while not (tmp_path / "hangs").exists():
            assert living.processes[0].poll() is None, living.log(0)
            time.sleep(0.01)
        of_the_living = slots_in(tmpfs)
        assert len(of_the_living) == 2
        began, tiers, *_ = run_fork(live_on, tmp_path, tmpfs)
        assert (began, tiers) == (COMMITTED, "tier=hot")
        assert slots_in(tmpfs) == of_the_living


# -- it goes ----------------------------------------------------------------------------------------------------------


def start_over(root: Path, folder: Path) -> int:
    counts = CountsSlots(folder)
    fit(root, settle(), counts, witness(root, folder), steps=STEPS)
    return counts.most


def test_a_start_of_the_same_run_from_nothing_gives_back_what_was_left(tmp_path: Path, tmpfs: Path) -> None:
    kill(tmp_path, tmpfs)
    assert len(slots_in(tmpfs)) == 2
    assert run_fork(start_over, tmp_path, tmpfs) == 2
    assert slots_in(tmpfs) == []


def validate(root: Path, folder: Path) -> str:
    from support import make_trainer

    heard = Listening()
    trainer = make_trainer(root, witness(root, folder))
    trainer.validate(TinyModel(), data(64), ckpt_path="last", verbose=False)
    return heard.tiers()


def test_a_validation_reads_what_is_in_memory_and_leaves_it_there(tmp_path: Path, tmpfs: Path) -> None:
    kill(tmp_path, tmpfs)
    damage(tmp_path)
    for _ in "12":
        assert run_fork(validate, tmp_path, tmpfs) == "tier=memory memory=1/1"
    assert len(slots_in(tmpfs)) == 2


@pytest.mark.parametrize("small", [False, True], ids=["memory=False", "a small tmpfs"])
def test_without_a_ram_tier_a_killed_run_goes_on_from_its_folder(tmp_path: Path, tmpfs: Path, small: bool) -> None:
    where = tmpfs if small else False
    with start_forks(die_with_little_room, tmp_path, where, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert slots_in(tmpfs) == []
    began, tiers, *_ = run_fork(live_on, tmp_path, where)
    assert (began, tiers) == (COMMITTED, "tier=hot")


def die_with_little_room(root: Path, where: Any) -> None:
    slots._free_bytes = lambda folder: 4096
    train_and_die(root, where, "single", 1, "commit.end", 2)


def die_with_what_the_dead_left(root: Path, where: Path) -> None:
    """On a tmpfs that has room once nothing of a dead run is in it."""
    slots._free_bytes = lambda folder: 4096 if len(slots_in(where)) else 2**30
    train_and_die(root, where, "single", 1, "commit.end", 2)


def test_where_there_is_no_room_left_what_dead_runs_left_goes_at_once(tmp_path: Path, tmpfs: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    kill(tmp_path / "a", tmpfs)
    with start_forks(die_with_what_the_dead_left, tmp_path / "b", tmpfs, world_size=1) as life:
        assert life.wait() == [-signal.SIGKILL], life.log(0)
    assert len(slots_in(tmpfs)) == 2
    damage(tmp_path / "b")
    assert run_fork(live_on, tmp_path / "b", tmpfs)[1] == "tier=memory memory=1/1"


# -- torchrun ---------------------------------------------------------------------------------------------------------


class Dies(L.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            die()


def launched(root: Path, folder: Path) -> None:
    """What torchrun runs on each rank: the second rank is killed in the first life, and in the second one all shards
    of the folder are damaged."""
    rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    callbacks = [settle(), *([Dies(COMMITTED + 1)] if life == 0 and rank == 1 else [])]
    if life == 1 and rank == 0:
        damage(root)
    heard, model, checkpoint = Listening(), TinyModel(), witness(root, folder)
    fit(root, *callbacks, checkpoint, model=model, how="ddp", world_size=2, steps=STEPS, resume="last")
    said = heard.tiers() if rank == 0 else ""
    (root / f"life-{life}-{rank}").write_text(f"{checkpoint.began} {said}")


@pytest.mark.ranks
@pytest.mark.slow
def test_torchrun_starts_a_killed_rank_again_and_all_ranks_go_on_from_memory(tmp_path: Path, tmpfs: Path) -> None:
    main = tmp_path / "main.py"
    main.write_text(
        f"import pathlib, test_memory as t\nt.launched(pathlib.Path({str(tmp_path)!r}), pathlib.Path({str(tmpfs)!r}))"
    )
    paths = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    done = subprocess.run([*torchrun, str(main)], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "life-1-0").read_text() == f"{COMMITTED} tier=memory memory=2/2"
    assert (tmp_path / "life-1-1").read_text() == f"{COMMITTED} "
    assert list(tmpfs.iterdir()) == []
