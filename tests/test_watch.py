"""The schedule at work in a Trainer: what it is told, what it costs, what stays on disk, and that ranks agree."""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from forks import run_forks
from lightning_resilience import AdaptiveSchedule, EverySteps, FirstOf, Keep, LossVariance, ResilientCheckpoint, ranks
from lightning_resilience import ledger as ledgers
from lightning_resilience.decisions import Decisions
from lightning_resilience.ledger import History
from lightning_resilience.losses import SLOTS, LossStream
from lightning_resilience.manifest import MILESTONE
from lightning_resilience.saving import Saving
from lightning_resilience.schedule import Decider, Decision, Progress, Schedule
from lightning_resilience.watch import Watch
from support import TinyModel, committed, data, make_trainer, settle, strategy

NAN = math.nan


class Scripted(TinyModel):
    """Its loss is a script; trains nothing worth mentioning."""

    def __init__(self, script: list[float], key: str = "loss") -> None:
        super().__init__()
        self.script, self.key = script, key

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.net(batch[0]).sum() * 0 + self.script[self.trainer.fit_loop.epoch_loop.total_batch_idx]
        return loss if self.key == "loss" else {"loss": loss * 0, self.key: loss.detach()}


class Clock:
    """A monotonic clock on which a training batch takes ``step`` seconds, for a callback that asks it between two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float = 10.0) -> None:
        self.step, self.trainer = step, None
        for module in ("saving", "watch"):
            monkeypatch.setattr(f"lightning_resilience.{module}.time", self)

    def monotonic(self) -> float:
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready if self.trainer is not None else 0
        return self.step * batches

    perf_counter = staticmethod(time.perf_counter)
    time = staticmethod(time.time)


class Costs(ResilientCheckpoint):
    """Takes every save to cost the same, as far as the schedule is told."""

    STALL, SECONDS = 0.5, 5.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        assert self._fit is not None
        watch = self._fit.watch
        original = watch.committed

        def told(save: Any, now: Progress) -> dict[str, float]:
            save.waited, save.seconds = self.STALL, self.SECONDS
            return original(save, now)

        watch.committed = told  # type: ignore[method-assign]


def fit(
    folder: Path, callback: L.Callback, script: list[float], clock: Clock | None = None, **kwargs: Any
) -> L.Trainer:
    model = kwargs.pop("model", None) or Scripted(script)
    ckpt_path = kwargs.pop("ckpt_path", None)
    trainer = make_trainer(folder, callback, settle(), **{"max_epochs": -1, "max_steps": len(script), **kwargs})
    if clock is not None:
        clock.trainer = trainer
    trainer.fit(model, data(4 * len(script)), ckpt_path=ckpt_path)
    return trainer


def noisy(count: int, level: float = 2.0) -> list[float]:
    generator = torch.Generator().manual_seed(5)
    return (level + 0.02 * torch.randn(count, generator=generator)).tolist()


# -- saves in a Trainer -----------------------------------------------------------------------------------------------

RULE = AdaptiveSchedule(window=10, rpo_seconds=400, max_overhead=0.02)


def test_reason_and_label_of_a_milestone_are_in_the_manifest(tmp_path: Path, monkeypatch, caplog) -> None:
    clock = Clock(monkeypatch)
    falling = [2.0 - step / 100 + extra for step, extra in enumerate(noisy(150, 0.0))]
    with caplog.at_level("INFO", "lightning_resilience"):
        fit(tmp_path, Costs(tmp_path / "run", schedule=RULE, keep=Keep(last=-1)), falling, clock)
    saved = committed(tmp_path / "run")
    marked = [manifest for manifest in saved if MILESTONE in manifest.labels]
    assert len(saved) >= 4
    assert marked
    for manifest in marked:
        assert "milestone: best smoothed loss, " in manifest.reason
    assert "s since the last save, the " in saved[1].reason
    assert saved[1].reason in caplog.text
    steps = [0, *(manifest.step for manifest in saved)]
    assert max(after - before for before, after in itertools.pairwise(steps)) * 10 <= 400


def test_milestone_from_before_a_spike_stays_when_all_later_ones_are_rotated_out(tmp_path: Path, monkeypatch) -> None:
    """T-01, as far as it is the schedule's and retention's."""
    clock = Clock(monkeypatch)
    script = [*noisy(140), *[20 * loss for loss in noisy(5)], *[NAN] * 100]
    rule = AdaptiveSchedule(window=5, rpo_seconds=300, max_overhead=0.02)
    fit(tmp_path, Costs(tmp_path / "run", schedule=rule, keep=Keep(last=2)), script, clock)
    saved = committed(tmp_path / "run")
    assert [MILESTONE in manifest.labels for manifest in saved] == [True, *[False] * (len(saved) - 1)]
    assert saved[0].step <= 140
    assert [manifest.step for manifest in saved if manifest.step > 180] == [manifest.step for manifest in saved[-2:]]
    assert {manifest.health for manifest in saved[-2:]} == {"suspect"}
    good = [manifest.step for manifest in saved if manifest.health == "healthy" and manifest.step < 140]
    assert good[-1] > 140 - 30 - 1  # the last good one, an interval before the spike at most


def test_rolling_saves_and_rarer_archived_ones_are_bounded(tmp_path: Path) -> None:
    """T-02."""
    keep = Keep(last=3, milestones=50)
    script = noisy(200)
    heard = []

    class Counting(ResilientCheckpoint):
        def on_checkpoint_committed(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            heard.append(checkpoint.manifest.step)
            assert self._fit is not None
            assert len(self._fit.destination.standings.committed) <= 3 + 4

    fit(tmp_path, Counting(tmp_path / "run", schedule=EverySteps(5), keep=keep), script)
    assert heard == list(range(5, 201, 5))
    saved = committed(tmp_path / "run")
    assert [manifest.step for manifest in saved] == [50, 100, 150, 190, 195, 200]


@pytest.mark.parametrize(
    "rule",
    [RULE, FirstOf(EverySteps(37), RULE), LossVariance(4e-4, None, window=10, min_seconds=100, max_seconds=500)],
    ids=["adaptive", "first-of", "variance"],
)
def test_saves_after_a_resume_are_those_of_the_run_that_was_left_alone(tmp_path: Path, monkeypatch, rule) -> None:
    """T-03."""
    clock = Clock(monkeypatch)
    script = noisy(130)

    def run(folder: Path, steps: int, **kwargs: Any) -> list[tuple[int, tuple[str, ...]]]:
        callback = Costs(folder, schedule=rule, keep=Keep(last=-1))
        fit(tmp_path, callback, script, clock, max_steps=steps, **kwargs)
        return [(manifest.step, manifest.labels) for manifest in committed(folder)]

    alone = run(tmp_path / "alone", 130)
    at = alone[2][0]
    # It stops right after a save that the schedule asked for, so that the resumed run begins where that one was.
    run(tmp_path / "parts", at)
    parts = run(tmp_path / "parts", 130, ckpt_path="last")
    assert len(alone) > 6
    assert parts == alone


def test_loss_that_is_not_finite_neither_bunches_saves_nor_marks_them(tmp_path: Path, monkeypatch) -> None:
    clock = Clock(monkeypatch)
    fit(tmp_path, Costs(tmp_path / "run", schedule=RULE, keep=Keep(last=-1)), [*noisy(60), *[NAN] * 140], clock)
    saved = committed(tmp_path / "run")
    steps = [manifest.step for manifest in saved]
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    assert all(2 <= gap <= 40 for gap in gaps[:-1])
    assert len(steps) < 30
    assert not any(manifest.labels for manifest in saved if manifest.step > 60)


# -- where the loss comes from ----------------------------------------------------------------------------------------


class Hears(Schedule):
    """Keeps the losses that its decider hears of."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.saves: list[tuple[float, float]] = []
        self.failures: list[tuple[int, float]] = []

    def due(self, now: Progress, last: Progress) -> str | None:
        return "due" if now.step == last.step + 20 else None

    def decider(self) -> Decider:
        return _Hears(self)


class _Hears(Decider):
    wants_losses = True

    def see_loss(self, loss: float) -> None:
        self.rule.losses.append(loss)  # type: ignore[attr-defined]

    def see_save(self, stall: float, seconds: float) -> None:
        self.rule.saves.append((stall, seconds))  # type: ignore[attr-defined]

    def see_failures(self, failures: int, seconds: float) -> None:
        self.rule.failures.append((failures, seconds))  # type: ignore[attr-defined]

    def marks(self) -> dict[str, str]:
        return {"heard": f"{len(self.rule.losses)} losses"}  # type: ignore[attr-defined]

    def decide(self, now: Progress, last: Progress, ahead: int = 0) -> Decision | None:
        return super().decide(now, last, ahead)


class ByHand(Scripted):
    """Optimizes by hand."""

    def __init__(self, script: list[float], returns: str) -> None:
        super().__init__(script)
        self.automatic_optimization, self.returns = False, returns

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return {"tensor": loss, "dict": {"loss": loss, "other": 1}}[self.returns]


@pytest.mark.parametrize("kind", ["automatic", "key", "tensor", "dict"])
def test_every_loss_reaches_the_schedule_in_order_and_before_a_save(tmp_path: Path, kind: str) -> None:
    script = noisy(45)
    rule = Hears()
    model = {"automatic": lambda: Scripted(script), "key": lambda: Scripted(script, "own")}.get(kind)
    key = "own" if kind == "key" else "loss"
    callback = ResilientCheckpoint(tmp_path / "run", schedule=rule, loss_key=key, keep=Keep(last=-1))
    fit(tmp_path, callback, script, model=model() if model else ByHand(script, kind))
    assert rule.losses == pytest.approx(script)
    saved = committed(tmp_path / "run")
    assert [manifest.step for manifest in saved] == [20, 40, 45]
    assert [manifest.reason for manifest in saved] == [
        "due; heard: 20 losses",
        "due; heard: 40 losses",
        "end of training; heard: 45 losses",
    ]
    assert all(manifest.labels == ("heard",) for manifest in saved)
    assert len(rule.saves) == 3
    assert all(0 < stall <= seconds for stall, seconds in rule.saves)


@pytest.mark.parametrize(
    "outputs", [None, {}, {"loss": None}, {"loss": "x"}, {"loss": torch.zeros(2)}, torch.zeros(3), {"other": 1.0}, "x"]
)
def test_outputs_without_a_loss_are_no_loss(outputs: Any) -> None:
    stream = LossStream()
    assert not stream.put(outputs, 1)
    assert stream.take_all() == []


def test_losses_come_several_at_a_time_or_after_a_moment() -> None:
    stream = LossStream()
    assert stream.take(0.0) == []
    for number in range(15):
        assert stream.put({"loss": torch.tensor(float(number))}, number // 4)
        assert stream.take(0.01) == []
    assert stream.put({"loss": torch.tensor(15.0, requires_grad=True)}, 3)
    assert stream.take(0.02) == [(float(number), number // 4) for number in range(16)]
    assert stream.put({"loss": 16}, 4)
    assert stream.take(0.03) == []
    assert stream.take(1.0) == [(16.0, 4)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_losses_from_a_gpu_come_without_waiting_for_it() -> None:
    stream = LossStream()
    values = torch.arange(3 * SLOTS, device="cuda", dtype=torch.bfloat16)
    stream.put({"loss": values[0]}, 0)  # what is allocated is allocated once
    torch.cuda.synchronize()
    assert stream.take(1.0) == [(0.0, 0)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(500_000_000)
        for value in values[1:50]:
            stream.put({"loss": value}, 1)
        assert stream.take(2.0) == []
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert stream.take_all() == [(float(number), 1) for number in range(1, 50)]


# -- what a step costs ------------------------------------------------------------------------------------------------


class Counting(ResilientCheckpoint):
    """Counts, in what it does in a step without a save, the calls that wait for a device or for other ranks."""

    OF_TENSORS = ("item", "cpu", "tolist", "to", "numpy")
    OF_RANKS = ("all_reduce", "broadcast", "barrier", "all_gather", "broadcast_object_list", "all_gather_object")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: dict[str, int] = {}
        self.steps = 0

    def on_train_batch_end(self, *args: Any) -> None:
        with self._counted():
            super().on_train_batch_end(*args)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        between_batches = Decisions.between_batches

        def counted(*args: Any) -> None:
            self.steps += 1
            with self._counted():
                between_batches(*args)

        Decisions.between_batches = counted  # type: ignore[method-assign]
        super().on_train_start(trainer, pl_module)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            owners = [(Tensor, name) for name in self.OF_TENSORS] + [(ranks.dist, name) for name in self.OF_RANKS]
            for owner, name in [*owners, (torch.cuda, "synchronize")]:
                patch.setattr(owner, name, self._counting(name, getattr(owner, name)))
            yield

    def _counting(self, name: str, original: Any) -> Any:
        def counting(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] = self.calls.get(name, 0) + 1
            return original(*args, **kwargs)

        return counting


def count_in_steps(folder: str, steps: int) -> tuple[int, dict[str, int], float]:
    world = int(os.environ["WORLD_SIZE"])
    callback = Counting(folder)
    trainer = make_trainer(
        Path(folder), callback, max_epochs=-1, max_steps=steps, devices=world, strategy=strategy("ddp")
    )
    begin = time.monotonic()
    trainer.fit(Scripted([1.0] * steps), data(4 * world * (steps + 10)))
    return callback.steps, callback.calls, time.monotonic() - begin


@pytest.mark.ranks
def test_deciding_reads_no_tensor_and_asks_the_other_ranks_once_a_second(tmp_path: Path) -> None:
    for steps, calls, seconds in run_forks(count_in_steps, str(tmp_path), 400, world_size=2, timeout=120):
        assert steps >= 400
        questions = calls.pop("all_reduce")
        # While it finds out how long a step takes, it asks at every first, second, fourth, … step.
        assert questions <= seconds + 20
        assert calls.pop("tolist") <= questions  # each answer's integers, on the CPU
        # The end of training is a save; what is left is its own, and does not grow with the steps.
        assert sum(calls.values()) <= steps / 4, calls


# -- ranks agree ------------------------------------------------------------------------------------------------------


class OwnWorld(TinyModel):
    """Each rank has losses of its own, some of them not finite."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.generator = rank, torch.Generator().manual_seed(rank)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        time.sleep(0.002)
        loss = super().training_step(batch, batch_idx)
        value = float(torch.randn(1, generator=self.generator)) * 10**self.rank
        return loss * 0 + (value if self.rank != 1 or batch_idx % 5 else NAN)


def save_by_own_clocks(folder: str, steps: int) -> tuple[list[tuple[int, str]], list[int]]:
    """Train with a clock that is off and runs at a rate of its own on each rank."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    monkeypatch = pytest.MonkeyPatch()
    real = time.monotonic

    class Skewed:
        perf_counter = staticmethod(time.perf_counter)
        time = staticmethod(time.time)

        @staticmethod
        def monotonic() -> float:
            return 1e6 * rank + real() * (1, 5, 0.2, 40)[rank]

    for module in ("saving", "watch"):
        monkeypatch.setattr(f"lightning_resilience.{module}.time", Skewed)
    asked: list[int] = []
    save = Saving.save

    def noted(saving: Saving, *args: Any, **kwargs: Any) -> bool:
        asked.append(trainer.global_step)
        return save(saving, *args, **kwargs)

    monkeypatch.setattr(Saving, "save", noted)
    rule = AdaptiveSchedule(max_overhead=0.9, rpo_seconds=0.4, window=5)
    callback = ResilientCheckpoint(folder, schedule=FirstOf(rule, EverySteps(111)), keep=Keep(last=-1))
    trainer = make_trainer(
        Path(folder), callback, settle(), max_epochs=-1, max_steps=steps, devices=world, strategy=strategy("ddp")
    )
    trainer.fit(OwnWorld(rank), data(4 * world * 50))
    return [(manifest.step, manifest.reason) for manifest in committed(Path(folder))], asked


@pytest.mark.ranks
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_with_clocks_and_losses_of_their_own_save_the_same_steps(tmp_path: Path, world_size: int) -> None:
    """R-08."""
    results = run_forks(save_by_own_clocks, str(tmp_path), 240, world_size=world_size, timeout=180)
    saved, asked = results[0]
    assert all(result == (saved, asked) for result in results)
    by_time = [step for step, reason in saved if "since the last save" in reason]
    assert by_time
    assert {111, 222} <= {step for step, _ in saved}


# -- the ledger -------------------------------------------------------------------------------------------------------


class Breaks(L.Callback):
    def __init__(self, step: int, error: BaseException) -> None:
        self.step, self.error = step, error

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            raise self.error


def test_restarts_are_counted_and_what_the_schedule_is_told(tmp_path: Path) -> None:
    def life(*callbacks: L.Callback, steps: int) -> Hears:
        rule = Hears()
        trainer = make_trainer(
            tmp_path, ResilientCheckpoint(tmp_path / "run", schedule=rule), settle(), *callbacks, max_steps=steps
        )
        trainer.fit(Scripted(noisy(100)), data(400), ckpt_path="last")
        return rule

    assert life(steps=20).failures == [(0, 0.0)]
    with pytest.raises(RuntimeError, match="broken"):
        life(Breaks(30, RuntimeError("broken")), steps=50)
    with pytest.raises(SystemExit):
        life(Breaks(33, KeyboardInterrupt()), steps=50)
    ((failures, seconds),) = life(steps=60).failures
    assert failures == 1
    assert seconds > 0
    lives = ledgers.read(tmp_path / "run").lives
    assert [life.how for life in lives] == ["clean", "exception", "interrupted", "clean"]
    assert [life.last("start")["step"] for life in lives] == [0, 20, 20, 20]
    assert [life.last("end")["step"] for life in lives][-1] == 60
    assert len({life.last("start")["run"] for life in lives}) == 1
    assert all("commit" in life.lines[-2] for life in (lives[0], lives[3]))


def test_failures_are_counted_where_the_folder_and_its_ledger_are_lost(tmp_path: Path) -> None:
    """The checkpoint itself says how many there were."""

    def life(folder: str, steps: int, ckpt_path: str | None, *callbacks: L.Callback) -> Hears:
        rule = Hears()
        checkpoint = ResilientCheckpoint(tmp_path / folder, schedule=rule)
        trainer = make_trainer(tmp_path, checkpoint, settle(), *callbacks, max_steps=steps)
        trainer.fit(Scripted(noisy(100)), data(400), ckpt_path=ckpt_path)
        return rule

    with pytest.raises(RuntimeError, match="broken"):
        life("a", 50, None, Breaks(30, RuntimeError("broken")))
    saved = str(tmp_path / "a" / "epoch=0-step=20.ckpt")
    ((failures, seconds),) = life("b", 60, saved).failures
    assert failures == 1
    assert seconds > 0
    assert ledgers.read(tmp_path / "b").history().failures == 1
    ((failures, _),) = life("c", 70, str(tmp_path / "b" / "epoch=0-step=60.ckpt")).failures
    assert failures == 1  # the life before ended well


def test_watch_of_other_ranks_decides_and_writes_nothing(tmp_path: Path) -> None:
    watch = Watch(AdaptiveSchedule(), 1, "loss")
    watch.begin(Progress(0, 0.0), tmp_path, None, ended=False, run="r")
    watch.see_outputs({"loss": torch.tensor(1.0)}, saving=False)
    watch.look(Progress(1, 1.0))
    assert watch.wish(Progress(10**6, 1e9), Progress(0, 0.0), 0) is None
    assert watch.state() == {}
    watch.end()
    assert os.listdir(tmp_path) == []
    assert ledgers.read(tmp_path).history() == History()
