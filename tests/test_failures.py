"""What goes wrong while a run trains and saves costs that save and no more, on every rank alike, and is said once."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import threading
import time
import warnings
from collections import deque
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from forks import run_fork, run_forks, start_forks
from lightning_resilience import EverySeconds, Keep, SaveFailed, points
from lightning_resilience.ledger import LEDGER
from lightning_resilience.manifest import META
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.tiers import LocalTier
from lightning_resilience.trusted import load_trusted
from probes import Witness, fit, slow, whole_steps
from support import FEATURES, Settle, TinyModel, settle


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


@contextmanager
def counting_warnings(about: str) -> Any:
    """The warnings of the block that mention ``about``; repeated ones are counted too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        texts: list[str] = []
        yield texts
    texts += [str(warning.message) for warning in caught if about in str(warning.message)]


def step_of(name: str) -> int:
    return int(name.removesuffix(".ckpt").rpartition("step=")[2])


def train(root: Path, checkpoint: Witness, *callbacks: L.Callback, **kwargs: Any) -> dict[str, Any]:
    """What a rank has to tell of a fit: how it ended, what it heard of, what it was warned of."""
    error = None
    with counting_warnings("was dropped") as texts:
        try:
            fit(root, checkpoint, *callbacks, **kwargs)
        except SaveFailed as failure:
            error = failure.message
    heard = [step_of(name) for name in checkpoint.heard]
    return {"heard": heard, "names": checkpoint.heard, "warned": texts, "error": error}


# -- one point in time ------------------------------------------------------------------------------------------------


class Stamp(L.Callback):
    """After every step, sets each parameter, buffer, moment and piece of Python state to the number of that step.

    Args:
        gate: lets the writer, which is blocked in every save, go on; only after three more steps.
    """

    def __init__(self, gate: threading.Event) -> None:
        self.gate = gate
        self.nested: dict[str, Any] = {"count": 0, "deep": {"list": [0]}}
        self.recent: deque[int] = deque([0], maxlen=3)
        self.array = np.zeros(4)
        self.tensor = torch.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"nested": self.nested, "recent": self.recent, "array": self.array, "tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        self.stamp(pl_module, trainer.global_step)
        if trainer.global_step % 4 == 3:
            self.gate.set()
            Settle._wait(trainer)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.stamp(pl_module, 999)
        self.gate.set()

    def stamp(self, module: L.LightningModule, number: int) -> None:
        moments = [value for state in module.trainer.optimizers[0].state.values() for value in state.values()]
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers(), *moments):
                getattr(tensor, "_local_tensor", tensor).fill_(number)
        self.nested["count"] = number
        self.nested["deep"]["list"][0] = number
        self.recent.append(number)
        self.array[:] = number
        self.tensor.fill_(number)


def train_with_a_blocked_writer(root: Path, how: str, world_size: int, memory: Any) -> None:
    gate = threading.Event()

    def block(name: str) -> None:
        if name == "persist.begin":
            assert gate.wait(60)
            gate.clear()

    points.listen(block)
    checkpoint = Witness(root, 4, keep=Keep(last=-1), memory=memory)
    fit(root, Stamp(gate), checkpoint, how=how, world_size=world_size, steps=12)


def saved_values(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Every saved tensor of the model and the optimizer, and the state of ``Stamp``."""
    reader = CheckpointReader(lambda file: folder / file, plain=True)
    tensors = dict(reader.read_full("model"))
    moments = reader.read_tree("optimizer_0", lambda path, entry: torch.empty(entry.size))["state"]
    tensors |= {f"{name}/{key}": value for name, state in moments.items() for key, value in state.items()}
    return tensors, load_trusted((folder / META).read_bytes())["callbacks"]["Stamp"]


@pytest.mark.parametrize(
    ("how", "world_size", "memory"),
    [
        ("single", 1, "auto"),
        ("single", 1, False),
        pytest.param("ddp", 2, "auto", marks=pytest.mark.ranks),
        pytest.param("fsdp", 2, "auto", marks=pytest.mark.ranks),
        pytest.param("fsdp2", 2, "auto", marks=pytest.mark.ranks),
    ],
)
def test_a_save_is_one_point_in_time_while_training_changes_everything_and_the_writer_is_stuck(
    tmp_path: Path, how: str, world_size: int, memory: Any
) -> None:
    run_forks(train_with_a_blocked_writer, tmp_path, how, world_size, memory, world_size=world_size)
    assert whole_steps(tmp_path) == [4, 8, 12]
    for name in LocalTier(tmp_path / "run").names():
        step = step_of(name)
        tensors, state = saved_values(tmp_path / "run" / name)
        assert len(tensors) == 9 + 3 * 6  # parameters and buffers; two moments and a counter for each parameter
        for key, value in tensors.items():
            assert value.numel()
            assert (value == step).all(), (name, key, value)
        assert state["nested"] == {"count": step, "deep": {"list": [step]}}
        assert list(state["recent"]) == [step - 2, step - 1, step]
        assert (state["array"] == step).all()
        assert (state["tensor"] == step).all()


# -- slow writers -----------------------------------------------------------------------------------------------------


def train_and_save_every_step(root: Path) -> list[str]:
    """Points in the order rank 0 reached them, with a writer that takes longer than a step."""
    reached: list[str] = []
    points.listen(lambda name: reached.append(name) if name in ("staged", "persist.begin", "commit.end") else None)
    slow(0.05)
    fit(root, Witness(root, 1, keep=Keep(last=-1)), how="ddp", world_size=2, steps=200)
    return reached


@pytest.mark.ranks
def test_saving_at_every_step_with_a_writer_slower_than_a_step_never_has_two_saves_in_flight(tmp_path: Path) -> None:
    reached, _ = run_forks(train_and_save_every_step, tmp_path, world_size=2)
    saves = len(reached) // 3
    assert saves > 5
    in_turn = [reached[start : start + 3] for start in range(0, len(reached), 3)]
    assert [sorted(points[:2]) for points in in_turn] == [["persist.begin", "staged"]] * saves  # side by side
    assert [points[2:] for points in in_turn] == [["commit.end"]] * saves
    assert len(whole_steps(tmp_path)) == saves
    assert whole_steps(tmp_path)[-1] == 200


def train_with_a_late_rank(root: Path, save_timeout: float, delay: float, strategy_timeout: float) -> dict[str, Any]:
    """Rank 1's part of the second save takes ``delay`` seconds."""
    saves = 0

    def listener(name: str) -> None:
        nonlocal saves
        if name == "persist.begin":
            saves += 1
            if saves == 2 and rank() == 1:
                time.sleep(delay)

    points.listen(listener)

    class Steps(L.Callback):
        """Goes on training while the late rank is late, at a pace."""

        def on_train_batch_end(self, *args: Any) -> None:
            time.sleep(0.05)

    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=strategy_timeout))
    checkpoint = Witness(root, 3, keep=Keep(last=-1), save_timeout=save_timeout)
    return train(root, checkpoint, Steps(), strategy=strategy, world_size=2, steps=20)


@pytest.mark.ranks
def test_a_save_that_takes_longer_than_its_timeout_is_dropped_and_training_ends_well(tmp_path: Path) -> None:
    first, second = run_forks(train_with_a_late_rank, tmp_path, 1.0, 4.0, 600.0, world_size=2)
    assert first["error"] is second["error"] is None
    assert len(first["warned"]) == 1
    assert "Not every rank finished its part of the save within 1 s (rank 1)" in first["warned"][0]
    dropped = int(re.search(r"step (\d+)", first["warned"][0]).group(1))  # type: ignore[union-attr]
    assert first["heard"] == second["heard"] == whole_steps(tmp_path)
    assert first["heard"][0] == 3
    assert first["heard"][-1] == 20
    assert 3 < dropped < 20
    assert dropped not in first["heard"]


@pytest.mark.ranks
def test_a_save_may_take_longer_than_the_timeout_of_the_training_process_group(tmp_path: Path) -> None:
    first, second = run_forks(train_with_a_late_rank, tmp_path, 1800.0, 4.0, 2.0, world_size=2)
    assert first["error"] is second["error"] is None
    assert first["warned"] == []
    assert first["heard"] == second["heard"] == whole_steps(tmp_path)
    assert len(first["heard"]) >= 3
    assert first["heard"][0] == 3
    assert first["heard"][-1] == 20


def train_while_rank_0_is_slow_to_commit(root: Path, point: str) -> dict[str, Any]:
    """In the second save, rank 0 takes longer than the timeout between deciding to commit and having done so."""
    saves = 0

    def listener(name: str) -> None:
        nonlocal saves
        saves += name == "persist.begin"
        if name == point and saves == 2 and rank() == 0:
            time.sleep(3.0)

    points.listen(listener)
    return train(root, Witness(root, 3, keep=Keep(last=-1), save_timeout=1.0), how="ddp", world_size=2, steps=20)


@pytest.mark.ranks
@pytest.mark.parametrize("point", ["commit.begin", "commit.manifest"])
def test_a_rank_out_of_patience_takes_no_files_from_a_save_that_is_being_committed(tmp_path: Path, point: str) -> None:
    first, second = run_forks(train_while_rank_0_is_slow_to_commit, tmp_path, point, world_size=2)
    assert first["error"] is second["error"] is None
    assert first["warned"] == second["warned"] == []
    assert first["heard"] == second["heard"] == whole_steps(tmp_path)
    assert first["heard"][0] == 3
    assert first["heard"][-1] == 20  # at the latest this save is the second one, which takes so long


# -- storage that fails -----------------------------------------------------------------------------------------------


def break_saves(numbers: tuple[int, ...], on_rank: int, point: str) -> None:
    """Let the disk of one rank be full in the saves of these numbers, counted from 1."""
    saves = 0

    def listener(name: str) -> None:
        nonlocal saves
        if name == "persist.begin":
            saves += 1
        if name == point and saves in numbers and rank() == on_rank:
            raise OSError(errno.ENOSPC, "No space left on device")

    points.listen(listener)


def train_on_a_full_disk(root: Path, numbers: tuple[int, ...], on_rank: int, point: str, **kwargs: Any) -> Any:
    break_saves(numbers, on_rank, point)
    checkpoint = Witness(root, 3, keep=Keep(last=-1), **kwargs)
    return train(root, checkpoint, settle(), how="ddp", world_size=2, steps=9)


FULL = [
    (1, "persist.begin"),
    (1, "persist.file"),
    (1, "persist.mid-file"),
    (1, "persist.end"),
    (0, "persist.begin"),
    (0, "persist.mid-file"),
    (0, "persist.end"),
    (0, "commit.begin"),
    (0, "commit.manifest"),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("on_rank", "point"), FULL)
def test_a_save_that_fails_on_one_rank_is_dropped_on_all_and_leaves_nothing(
    tmp_path: Path, on_rank: int, point: str
) -> None:
    first, second = run_forks(train_on_a_full_disk, tmp_path, (2,), on_rank, point, world_size=2)
    assert first["heard"] == second["heard"] == whole_steps(tmp_path) == [3, 9]
    assert_one_clear_warning(first, second, on_rank)


def assert_one_clear_warning(first: dict[str, Any], second: dict[str, Any], on_rank: int) -> None:
    assert first["error"] is second["error"] is None
    (warning,) = first["warned"]
    assert second["warned"] == []
    for part in ("step 6", f"Rank {on_rank}", "No space left on device"):
        assert part in warning


def train_on_full_node_local_disks(root: Path, on_rank: int, point: str) -> dict[str, Any]:
    os.environ["NODE"] = str(rank())
    return train_on_a_full_disk(root, (2,), on_rank, point, dirpath=f"{root}/$NODE")


@pytest.mark.ranks
@pytest.mark.parametrize(("on_rank", "point"), [*FULL, (1, "commit.begin"), (1, "commit.manifest")])
def test_a_save_that_fails_on_one_node_leaves_nothing_on_any(tmp_path: Path, on_rank: int, point: str) -> None:
    first, second = run_forks(train_on_full_node_local_disks, tmp_path, on_rank, point, world_size=2)
    assert first["heard"] == second["heard"] == [3, 9]
    assert_one_clear_warning(first, second, on_rank)
    assert [sorted(name for name in os.listdir(tmp_path / node) if name != LEDGER) for node in "01"] == [
        first["names"]
    ] * 2


@pytest.mark.ranks
@pytest.mark.parametrize("on_rank", [0, 1])
def test_after_as_many_failures_in_a_row_as_are_allowed_training_stops_on_all_ranks(
    tmp_path: Path, on_rank: int
) -> None:
    outcomes = run_forks(train_until_it_stops, tmp_path, on_rank, world_size=2)
    for outcome in outcomes:
        assert outcome["heard"] == whole_steps(tmp_path) == [1]
        assert "2 saves in a row have failed" in outcome["error"]
        assert "No space left on device" in outcome["error"]
        assert outcome["stopped at"] == 4


def train_until_it_stops(root: Path, on_rank: int) -> dict[str, Any]:
    break_saves(tuple(range(2, 100)), on_rank, "persist.file")
    checkpoint = Witness(root, 1, keep=Keep(last=-1), max_failures=2)
    model = TinyModel()
    outcome = train(root, checkpoint, settle(), model=model, how="ddp", world_size=2, steps=9)
    return outcome | {"stopped at": model.trainer.global_step}


@pytest.mark.ranks
def test_a_success_in_between_makes_failures_count_anew(tmp_path: Path) -> None:
    outcomes = run_forks(train_through_failures, tmp_path, world_size=2)
    for outcome in outcomes:
        assert outcome["error"] is None
        assert outcome["heard"] == whole_steps(tmp_path) == [1, 3, 6, 8]


def train_through_failures(root: Path) -> dict[str, Any]:
    break_saves((2, 4, 5, 7), 1, "persist.file")
    return train(root, Witness(root, 1, keep=Keep(last=-1)), settle(), how="ddp", world_size=2, steps=8)


@pytest.mark.ranks
def test_with_on_save_error_raise_the_first_failure_stops_training_on_all_ranks(tmp_path: Path) -> None:
    outcomes = run_forks(train_strictly, tmp_path, world_size=2)
    for outcome in outcomes:
        assert outcome["heard"] == whole_steps(tmp_path) == [3]
        assert "Rank 1: OSError" in outcome["error"]


def train_strictly(root: Path) -> dict[str, Any]:
    return train_on_a_full_disk(root, (2,), 1, "persist.file", on_save_error="raise")


def train_under_a_file_size_limit(root: Path) -> dict[str, Any]:
    """No file may grow beyond 64 KiB between the steps 4 and 7, as on a disk that is full."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    class Limit(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step in (4, 7):
                limit = 2**16 if trainer.global_step == 4 else unlimited[0]
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, unlimited[1]))

    checkpoint = Witness(root, 3, keep=Keep(last=1))
    return train(root, checkpoint, settle(), Limit(), model=TinyModel(width=4096), steps=9)


def test_a_disk_that_fills_up_costs_the_save_and_neither_training_nor_the_older_copy(tmp_path: Path) -> None:
    outcome = run_fork(train_under_a_file_size_limit, tmp_path)
    assert outcome["error"] is None
    assert outcome["heard"] == [3, 9]
    (warning,) = outcome["warned"]
    assert "File too large" in warning
    assert whole_steps(tmp_path) == [9]


# -- a rank that raises -----------------------------------------------------------------------------------------------


class Raises(TinyModel):
    """Raises on rank 1 in its ``at``-th step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if rank() == 1 and self.global_step == self.at:
            raise ZeroDivisionError("a bug in user code")
        return super().training_step(batch, batch_idx)


def train_with_a_bug(root: Path, how: str, delay: float) -> None:
    slow(delay)
    fit(root, settle() if not delay else L.Callback(), Witness(root, 2), model=Raises(3), how=how, world_size=2)


@pytest.mark.ranks
@pytest.mark.parametrize("delay", [0.0, 1.0], ids=["idle", "while saving"])
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_one_ranks_exception_ends_the_job_within_seconds_and_is_shown(tmp_path: Path, how: str, delay: float) -> None:
    began = time.monotonic()
    with start_forks(train_with_a_bug, tmp_path, how, delay, world_size=2) as ranks:
        statuses = ranks.wait()
        assert time.monotonic() - began < 20
        assert all(status not in (0, -signal.SIGKILL) for status in statuses), statuses
        assert "ZeroDivisionError: a bug in user code" in ranks.log(1)
    assert whole_steps(tmp_path) == [2]
    assert run_forks(go_on, tmp_path, how, world_size=2) == [(2, [2, 8])] * 2


def go_on(root: Path, how: str) -> tuple[int | None, list[int]]:
    checkpoint = Witness(root, 100)
    fit(root, checkpoint, how=how, world_size=2, resume="last")
    return checkpoint.began, whole_steps(root)


# -- ranks that see things differently --------------------------------------------------------------------------------


class Disagreeing(TinyModel):
    """Logs another number on every rank, unsynchronised."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("train_loss", float(rank()) + batch_idx / 100)
        time.sleep(0.01)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", rank() * 1.0 - self.global_step * (1 - 2 * rank()), sync_dist=False)


def train_in_disagreement(root: Path) -> dict[str, Any]:
    """Rank 1's clock is another and runs at another speed; its losses rise where rank 0's fall."""
    if rank() == 1:
        true_clock = time.monotonic
        time.monotonic = lambda: 12345.0 + 3 * true_clock()
    checkpoint = Witness(
        root,
        schedule=EverySeconds(0.1),
        keep=Keep(last=-1, top_k=2),
        monitor="val_loss",
        filename="{step}-{val_loss:.1f}-{train_loss:.2f}",
    )
    loader = _loader()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=6,
        val_check_interval=4,
        callbacks=[checkpoint],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=root,
    )
    trainer.fit(Disagreeing(), loader, loader)
    return {
        "heard": checkpoint.heard,
        "best": checkpoint.best_model_path,
        "last": checkpoint.last_model_path,
        "top": {path: float(score) for path, score in checkpoint.best_k_models.items()},
        "score": float(checkpoint.best_model_score),
        "kth": checkpoint.kth_best_model_path,
    }


def _loader() -> Any:
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(torch.randn(64, FEATURES), torch.randn(64, 1)), batch_size=4
    )


@pytest.mark.ranks
def test_ranks_whose_clocks_and_metrics_differ_save_the_same_steps_under_the_same_names(tmp_path: Path) -> None:
    first, second = run_forks(train_in_disagreement, tmp_path, world_size=2)
    assert len(first["heard"]) > 5
    assert first == second
    assert len(whole_steps(tmp_path)) == len(first["heard"])


# -- what stays -------------------------------------------------------------------------------------------------------


def train_with_a_slow_writer(root: Path) -> list[str]:
    slow(0.02, "persist.mid-file")
    checkpoint = Witness(root, keep=Keep(last=1), schedule=EverySeconds(0.0))
    fit(root, checkpoint, steps=500)
    return checkpoint.heard


def test_with_one_checkpoint_to_keep_there_is_one_at_every_instant_after_the_first(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "run")
    counts: set[int] = set()
    with start_forks(train_with_a_slow_writer, tmp_path, world_size=1) as run:
        while run.processes[0].poll() is None:
            count = len(tier.names())
            if count or counts:
                counts.add(count)
        (heard,) = run.results()
    assert len(heard) > 2  # as many as a busy machine gets done
    assert 0 not in counts
    assert max(counts) <= 3  # a list that is read while one appears and one goes may have both
    assert len(whole_steps(tmp_path)) == 1


def train_five_saves(root: Path, how: str) -> dict[str, Any]:
    class Metric(TinyModel):
        def on_train_batch_end(self, *args: Any) -> None:
            self.log("score", float(abs(self.global_step - 5) + rank()))

    checkpoint = Witness(
        root, 2, monitor="score", save_top_k=2, save_last=True, filename="{step}-{score:.0f}", keep=Keep(last=2)
    )
    fit(root, settle(), checkpoint, model=Metric(), how=how, world_size=2, steps=10)
    names = ("best_model_path", "last_model_path", "kth_best_model_path", "dirpath", "best_k_models")
    state = {name: getattr(checkpoint, name) for name in (*names, "best_model_score")}
    return {"state": state, "callback state": checkpoint.state_dict(), "heard": checkpoint.heard, "seen": exist(state)}


def exist(state: dict[str, Any]) -> bool:
    paths = [state["best_model_path"], state["last_model_path"], *state["best_k_models"]]
    return all(Path(path).is_dir() for path in paths)


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
def test_after_five_saves_the_callback_says_the_same_on_both_ranks(tmp_path: Path, how: str) -> None:
    first, second = run_forks(train_five_saves, tmp_path, how, world_size=2)
    assert first == second
    assert first["seen"]
    assert len(first["heard"]) == 5
    assert first["state"]["best_model_path"] != first["state"]["last_model_path"]
