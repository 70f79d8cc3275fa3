"""A run whose loss leaves its course: what it keeps, what it calls suspect, and how it goes back."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers.logger import Logger

from forks import run_forks
from lightning_resilience import Diverged, EverySteps, Keep, ResilientCheckpoint, Rollback, housekeeping, store
from lightning_resilience.manifest import LAST_GOOD, Manifest
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import LocalTier
from support import TinyModel, committed, data, make_trainer, settle, strategy

WINDOW = 100
"""Losses that a course is made of."""


class Poisoned(TinyModel):
    """Some batches make its loss huge, and its weights with it; from ``at`` to before ``until``, counted in batches, or
    until the run goes back."""

    def __init__(self, at: int, until: int = 10**6, scale: float = 1e3, heals: bool = False) -> None:
        super().__init__(lr=0.003)
        self.at, self.until, self.scale, self.heals = at, until, scale, heals
        self.batches: list[int] = []
        self.steps: list[int] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        number = self.number(batch)
        self.batches.append(number)
        if self.heals and self.global_step < max(self.steps, default=0):
            self.at = self.until
        self.steps.append(self.global_step)
        loss = super().training_step(batch[:2], batch_idx)
        return loss * self.scale if self.at <= number < self.until else loss

    def number(self, batch: list[torch.Tensor]) -> int:
        return int(batch[2][0]) // len(batch[2])


class PoisonedAfter(Poisoned):
    """The same, counting those that this rank has seen: several ranks get them shuffled."""

    def number(self, batch: list[torch.Tensor]) -> int:
        return len(self.batches)


def numbered(samples: int) -> torch.utils.data.DataLoader[Any]:
    """Samples in order, each with its number."""
    plain = data(samples).dataset
    assert isinstance(plain, torch.utils.data.TensorDataset)
    return torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(*plain.tensors, torch.arange(samples)), batch_size=4
    )


class Remembers(Logger):
    """A logger that keeps what it hears of checkpoints."""

    def __init__(self) -> None:
        self.heard: list[tuple[int | None, dict[str, float]]] = []

    name = version = "remembers"

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        mine = {key: value for key, value in metrics.items() if key.startswith("resilience/")}
        self.heard += [(step, mine)] if mine else []

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


def train(root: Path, model: L.LightningModule, batches: int = 300, **kwargs: Any) -> L.Trainer:
    kwargs.setdefault("schedule", EverySteps(10))
    trainer_arguments = {
        name: kwargs.pop(name) for name in ("strategy", "devices", "logger", "log_every_n_steps") if name in kwargs
    }
    callback = ResilientCheckpoint(root / "run", **kwargs)
    trainer = make_trainer(root, callback, settle(), max_epochs=1, **trainer_arguments)
    ckpt_path = "last" if (root / "run").exists() else None
    trainer.fit(model, numbered(4 * batches), ckpt_path=ckpt_path)
    return trainer


def test_checkpoint_from_before_a_spike_stays_until_it_is_over(tmp_path: Path) -> None:
    kept: dict[int, list[int]] = {}

    class Looks(ResilientCheckpoint):
        def on_checkpoint_committed(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            assert self._fit is not None
            known = self._fit.destination.standings.committed
            kept[checkpoint.manifest.step] = sorted(one.step for one in known.values())

    model = Poisoned(155, 170)
    callback = Looks(tmp_path / "run", schedule=EverySteps(10), keep=Keep(last=1))
    make_trainer(tmp_path, callback, settle(), max_epochs=1).fit(model, numbered(4 * 600))
    assert kept[150] == [150]
    for step in range(180, 250, 10):
        assert kept[step] == [150, step]
    assert kept[600] == [600]


@pytest.mark.parametrize("at", [157, 158, 159])
def test_checkpoint_that_is_saved_as_a_spike_begins_does_not_replace_the_one_before_it(tmp_path: Path, at: int) -> None:
    model = Poisoned(at, heals=True)
    train(tmp_path, model, rollback=Rollback(patience=20), keep=Keep(last=1))
    back = next(place for place in range(1, len(model.steps)) if model.steps[place] < model.steps[place - 1])
    assert model.steps[back] == 150


def test_damaged_last_good_checkpoint_is_passed_over_or_healed(tmp_path: Path) -> None:
    for cold in (False, True):
        root = tmp_path / str(cold)

        class Damages(L.Callback):
            def on_train_batch_start(self, trainer: L.Trainer, *args: Any, root: Path = root) -> None:
                if trainer.global_step == 165 and (file := root / "run/epoch=0-step=150.ckpt/meta.pt").exists():
                    file.write_bytes(b"x" + file.read_bytes()[1:])

        model = Poisoned(155, heals=True)
        remote = f"file://{root}/cold" if cold else None
        callback = ResilientCheckpoint(
            root / "run", schedule=EverySteps(10), rollback=Rollback(patience=20), keep=Keep(last=8), remote=remote
        )
        trainer = make_trainer(root, callback, settle(), Damages(), max_epochs=1)
        if cold:
            trainer.fit(model, numbered(1200))
        else:
            with pytest.warns(UserWarning, match="cannot go back to epoch=0-step=150"):
                trainer.fit(model, numbered(1200))
        back = next(place for place in range(1, len(model.steps)) if model.steps[place] < model.steps[place - 1])
        assert model.steps[back] == (150 if cold else 140)


class Goes(Exception):
    """The run has gone back, and the checkpoint that says so is committed."""


class StopsOnceBack(ResilientCheckpoint):
    def on_checkpoint_committed(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        if LAST_GOOD in checkpoint.manifest.labels:
            raise Goes


def one_that_went_back(root: Path, **kwargs: Any) -> dict[str, Manifest]:
    """What a run leaves that is stopped as soon as it went back from a spike at step 155."""
    callback = StopsOnceBack(
        root / "run", schedule=EverySteps(10), rollback=Rollback(patience=20), keep=Keep(last=-1), **kwargs
    )
    with pytest.raises(Goes):
        make_trainer(root, callback, settle(), max_epochs=1).fit(Poisoned(155, heals=True), numbered(1200))
    return store.list_checkpoints(LocalTier(root / "run")).committed


def test_no_start_is_led_to_what_the_run_went_back_from_also_where_what_it_saved_then_is_lost(tmp_path: Path) -> None:
    left = one_that_went_back(tmp_path)
    health = {one.step: one.health for one in left.values() if one.step >= 150 and LAST_GOOD not in one.labels}
    assert health.pop(150) == "healthy"
    assert set(health.values()) == {"suspect"}
    assert left["epoch=0-step=160.ckpt"].extra["suspicion"] == "the run went back from it to step 150"
    shutil.rmtree(tmp_path / "run" / "epoch=0-step=150-v1.ckpt")
    again = Poisoned(10**6)
    train(tmp_path, again)
    assert again.steps[0] == 150


def test_cold_tier_hears_of_what_the_run_went_back_from(tmp_path: Path) -> None:
    left = one_that_went_back(tmp_path, remote=f"file://{tmp_path}/cold")
    callback = ResilientCheckpoint(  # what the stopped process did not get to do, the next one does
        tmp_path / "run", schedule=EverySteps(10), keep=Keep(last=-1), remote=f"file://{tmp_path}/cold"
    )
    make_trainer(tmp_path, callback, settle(), max_epochs=1).fit(Poisoned(10**6), numbered(1200), ckpt_path="last")
    cold = store.list_checkpoints(RemoteTier(f"file://{tmp_path}/cold")).committed
    suspect = {one.save_id for one in left.values() if one.health == "suspect"}
    assert {one.save_id for one in cold.values() if one.health == "suspect"} == suspect
    assert suspect
    assert all(store.verify(RemoteTier(f"file://{tmp_path}/cold"), name, one) == [] for name, one in cold.items())


def test_cold_tier_alone_has_what_the_run_went_back_from_and_what_was_said_of_it_there(tmp_path: Path) -> None:
    cold = RemoteTier(f"file://{tmp_path}/cold")

    class Pins(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 165:
                until = time.monotonic() + 60
                while (manifest := store.list_checkpoints(cold).committed.get("epoch=0-step=160.ckpt")) is None:
                    assert time.monotonic() < until
                    time.sleep(0.01)
                housekeeping.label(cold, "epoch=0-step=160.ckpt", manifest, pinned=True)

    callback = ResilientCheckpoint(
        tmp_path / "run",
        schedule=EverySteps(10),
        keep=Keep(last=1),
        remote=cold.where(),
        remote_keep=Keep(last=-1),
        rollback=Rollback(patience=20),
    )
    make_trainer(tmp_path, callback, settle(), Pins(), max_steps=190).fit(Poisoned(155, heals=True), numbered(1200))
    assert "epoch=0-step=160.ckpt" not in store.list_checkpoints(LocalTier(tmp_path / "run")).committed
    there = store.list_checkpoints(cold).committed
    good = there["epoch=0-step=150.ckpt"]
    left = {name: one for name, one in there.items() if good.order < one.order and one.step > 150 and "-v" not in name}
    back = next(one for one in there.values() if LAST_GOOD in one.labels)
    assert {one.health for one in left.values() if one.order < back.order} == {"suspect"}
    assert "pinned" in there["epoch=0-step=160.ckpt"].labels


def test_what_is_saved_on_going_back_is_tried_again_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, failures = LocalTier.write, iter(range(1))

    def full(self: LocalTier, name: str, *args: Any) -> Any:
        if "150-v1" in name and next(failures, None) is not None:
            raise OSError(28, "No space left on device")
        return whole(self, name, *args)

    monkeypatch.setattr(LocalTier, "write", full)
    with pytest.warns(UserWarning, match="No space left"):
        left = one_that_went_back(tmp_path)
    assert next(failures, None) is None
    assert any(LAST_GOOD in one.labels and one.step == 150 for one in left.values())


def test_run_goes_back_to_what_only_the_cold_tier_has(tmp_path: Path) -> None:
    class Loses(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            callback = trainer.checkpoint_callback
            if trainer.global_step == 158 and isinstance(callback, ResilientCheckpoint):
                sent, until = tmp_path / "cold" / "epoch=0-step=150.ckpt" / "manifest.json", time.monotonic() + 60
                while not sent.exists():
                    assert time.monotonic() < until
                    time.sleep(0.01)
                assert callback._fit is not None
                known = callback._fit.destination.standings.committed
                for name, one in list(known.items()):
                    if one.step <= 150:
                        shutil.rmtree(tmp_path / "run" / name)
                        del known[name]

    model = Poisoned(155, heals=True)
    callback = ResilientCheckpoint(
        tmp_path / "run", schedule=EverySteps(10), rollback=Rollback(patience=20), remote=f"file://{tmp_path}/cold"
    )
    make_trainer(tmp_path, callback, settle(), Loses(), max_epochs=1).fit(model, numbered(1200))
    back = next(place for place in range(1, len(model.steps)) if model.steps[place] < model.steps[place - 1])
    assert model.steps[back] == 150


def test_run_that_trains_something_else_by_now_stops_clearly(tmp_path: Path) -> None:
    class Grows(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 152 and len(trainer.optimizers) == 1:
                trainer.strategy.optimizers = [
                    *trainer.optimizers, torch.optim.SGD(trainer.lightning_module.parameters(), lr=0.0)
                ]  # fmt: skip

    callback = ResilientCheckpoint(tmp_path / "run", schedule=EverySteps(10), rollback=Rollback(patience=20))
    with pytest.raises(Diverged, match=r"epoch=0-step=150.ckpt, does not fit what is trained now"):
        make_trainer(tmp_path, callback, settle(), Grows(), max_epochs=1).fit(Poisoned(155), numbered(1200))


def test_batches_still_to_be_left_out_in_the_next_epoch_are_left_out_after_a_restart_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_resilience.losses.SECONDS", float("inf"))  # when it goes back hangs on no clock

    class Stops(L.Callback):
        def on_train_epoch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.current_epoch == 1:
                raise RuntimeError("stop")

    def fit(root: Path, model: Poisoned, *callbacks: L.Callback) -> None:
        callback = ResilientCheckpoint(
            root / "run", schedule=EverySteps(10), rollback=Rollback(patience=20, skip_batches=40)
        )
        trainer = make_trainer(root, callback, settle(), *callbacks, max_epochs=2)
        trainer.fit(model, numbered(800), ckpt_path="last")

    whole, first, second = (Poisoned(160, heals=True) for _ in range(3))
    fit(tmp_path / "whole", whole)
    with pytest.raises(RuntimeError, match="stop"):
        fit(tmp_path / "cut", first, Stops())
    second.at = second.until
    fit(tmp_path / "cut", second)
    began = len(whole.batches) - len(second.batches)
    assert second.batches == whole.batches[began:]
    assert second.batches[-1] == 199
    assert len(set(range(200)) - set(second.batches)) > 10


def went_back(model: Poisoned) -> list[tuple[int, int]]:
    """From which step to which."""
    pairs = zip(model.steps, model.steps[1:], strict=False)
    return [(before, after) for before, after in pairs if after < before]


@pytest.mark.parametrize("window", [4, 16])
def test_spike_begins_where_it_begins_also_with_accumulated_gradients(tmp_path: Path, window: int) -> None:
    model = Poisoned(15 * window, heals=True)
    callback = ResilientCheckpoint(tmp_path / "run", schedule=EverySteps(5), rollback=Rollback(patience=20))
    trainer = make_trainer(tmp_path, callback, settle(), max_epochs=1, accumulate_grad_batches=window)
    trainer.fit(model, numbered(4 * window * 22))
    assert [to for _, to in went_back(model)] == [10]


@pytest.mark.parametrize("scale", [1e3, float("nan")])
def test_checkpoint_of_the_very_step_that_a_spike_begins_with_is_the_last_resort(tmp_path: Path, scale: float) -> None:
    model = Poisoned(160, heals=True, scale=scale)
    train(tmp_path, model, 200, keep=Keep(last=1), rollback=Rollback(patience=20))
    assert [to for _, to in went_back(model)] == [160]


def test_run_goes_back_to_nothing_of_another_run_or_of_a_course_it_has_left(tmp_path: Path) -> None:
    keep = Keep(last=-1)
    train(tmp_path, Poisoned(10**6), 100, keep=keep)
    fresh = Poisoned(60, heals=True)
    callback = ResilientCheckpoint(
        tmp_path / "run", schedule=EverySteps(1000), keep=keep, rollback=Rollback(patience=9)
    )
    with pytest.raises(Diverged, match="no checkpoint from before"):
        make_trainer(tmp_path, callback, settle(), max_epochs=1).fit(fresh, numbered(400))

    again = Poisoned(75, heals=True)
    callback = ResilientCheckpoint(
        tmp_path / "run", schedule=EverySteps(1000), keep=keep, rollback=Rollback(patience=9)
    )
    trainer = make_trainer(tmp_path, callback, settle(), max_epochs=1)
    trainer.fit(again, numbered(400), ckpt_path=str(tmp_path / "run" / "epoch=0-step=50.ckpt"))
    assert [to for _, to in went_back(again)] == [50]
    assert {one.health for one in committed(tmp_path / "run")} == {"healthy"}  # what was left before is not judged


def test_run_goes_back_to_what_it_was_resumed_from_in_another_folder(tmp_path: Path) -> None:
    first = ResilientCheckpoint(tmp_path / "run", schedule=EverySteps(100))
    make_trainer(tmp_path, first, settle(), max_epochs=1, max_steps=100).fit(Poisoned(10**6), numbered(800))
    again = Poisoned(125, heals=True)
    other = ResilientCheckpoint(tmp_path / "other", schedule=EverySteps(1000), rollback=Rollback(patience=10))
    make_trainer(tmp_path, other, settle(), max_epochs=1).fit(
        again, numbered(800), ckpt_path=str(tmp_path / "run" / "epoch=0-step=100.ckpt")
    )
    assert [to for _, to in went_back(again)] == [100]
    back = next(one for one in committed(tmp_path / "other") if LAST_GOOD in one.labels)
    assert back.sequence > max(one.sequence for one in committed(tmp_path / "run"))


class ByHand(Poisoned):
    """Steps an optimizer that Lightning does not count."""

    def __init__(self, *args: Any, says: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False
        self.says = says
        self.before: list[torch.Tensor] = []

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> Any:
        self.before.append(torch.cat([parameter.detach().flatten() for parameter in self.parameters()]))
        number = int(batch[2][0]) // 4
        loss = torch.nn.functional.mse_loss(self.net(batch[0]), batch[1]) * (1e3 if 105 <= number < 131 else 1.0)
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss if self.says else None


def test_run_whose_steps_are_not_counted_goes_back_by_batches(tmp_path: Path) -> None:
    model = ByHand(0)
    train(tmp_path, model, 160, rollback=Rollback(patience=20), keep=Keep(last=-1))
    assert any(torch.equal(model.before[100], later) for later in model.before[105:])
    good = [one for one in committed(tmp_path / "run") if LAST_GOOD in one.labels]
    assert [one.reason.split(";")[0] for one in good] == ["rolled back to epoch=0-step=0-v9.ckpt"]
    assert [one.step for one in committed(tmp_path / "run")][:3] == [10, 20, 30]


def test_rollback_that_sees_no_loss_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="rollback= has nothing to go by: no loss was seen in the last 100 batches"):
        train(tmp_path, ByHand(0, says=False), 120, rollback=Rollback(patience=20))


def test_save_of_another_callback_that_ends_as_the_run_goes_back_is_suspect_and_its_link_moves(tmp_path: Path) -> None:
    first = ResilientCheckpoint(tmp_path / "a", schedule=EverySteps(10), rollback=Rollback(patience=20))
    second = ResilientCheckpoint(tmp_path / "b", schedule=EverySteps(3), keep=Keep(last=-1), save_last=True)
    seen: dict[str, Any] = {}

    class Looks(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
            if went_back(model) and not seen:
                seen["health"] = {one.step: one.health for one in committed(tmp_path / "b") if one.step <= 180}
                seen["link"] = os.readlink(tmp_path / "b" / "last.ckpt")

    model = Poisoned(155, heals=True)
    make_trainer(tmp_path, first, second, settle(), Looks(), max_epochs=1).fit(model, numbered(800))
    (came, to), *_ = went_back(model)
    assert {step for step, health in seen["health"].items() if health == "suspect"} >= set(range(to + 3, came - 2, 3))
    assert seen["health"].get(to, "healthy") == "healthy"
    assert int(seen["link"].split("step=")[1].split(".")[0].split("-")[0]) <= to + 3


def test_epoch_means_are_of_what_the_run_went_on_with(tmp_path: Path) -> None:
    class Logs(Poisoned):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss, on_step=False, on_epoch=True)
            kept[self.global_step] = float(loss.detach())
            return loss

    kept: dict[int, float] = {}
    ends: list[float] = []

    class Reads(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, *args: Any) -> None:
            ends.append(float(trainer.callback_metrics["mean"]))

    model = Logs(155, heals=True, scale=float("nan"))
    callback = ResilientCheckpoint(tmp_path / "run", schedule=EverySteps(10), rollback=Rollback(patience=20))
    trainer = make_trainer(tmp_path, callback, settle(), Reads(), max_epochs=1)
    trainer.fit(model, numbered(800))
    lasted = [loss for step, loss in kept.items() if step < trainer.global_step]  # what was done again counts once
    assert ends == [pytest.approx(sum(lasted) / len(lasted), rel=1e-4)]


def test_what_is_saved_on_going_back_has_the_metrics_of_what_it_is(tmp_path: Path) -> None:
    class Logs(Poisoned):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("negative", -loss)
            return loss

    train(tmp_path, Logs(155, heals=True), 190, monitor="negative", rollback=Rollback(patience=20), keep=Keep(last=-1))
    found = committed(tmp_path / "run")
    back = next(one for one in found if LAST_GOOD in one.labels)
    good = next(one for one in found if one.step == back.step and one is not back)
    assert back.metrics == good.metrics
    assert back.metrics


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
def test_data_that_ends_before_its_length_says_is_left_out_to_its_end(tmp_path: Path) -> None:
    class Overstated(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(numbered(800).dataset)

        def __len__(self) -> int:
            return 4000

    model = Poisoned(100, until=150, heals=True)
    callback = ResilientCheckpoint(
        tmp_path / "run", schedule=EverySteps(10), rollback=Rollback(patience=20, skip_batches=500)
    )
    trainer = make_trainer(tmp_path, callback, settle(), max_epochs=1)
    trainer.fit(model, torch.utils.data.DataLoader(Overstated(), batch_size=4))
    assert any(LAST_GOOD in one.labels for one in committed(tmp_path / "run"))


def test_batches_are_left_out_in_whole_windows_up_to_the_end_of_an_epoch(tmp_path: Path) -> None:
    class Windows(Poisoned):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            sizes.append(len(self.batches) - sum(sizes))

    sizes: list[int] = []
    callback = ResilientCheckpoint(
        tmp_path / "run", schedule=EverySteps(2), rollback=Rollback(patience=8, skip_batches=24)
    )
    trainer = make_trainer(tmp_path, callback, settle(), max_epochs=3, accumulate_grad_batches=4)
    trainer.fit(Windows(30, heals=True), numbered(240))
    assert set(sizes) == {4}


def test_list_and_rule_keep_what_is_from_before_a_spike_also_once_the_run_is_over(tmp_path: Path) -> None:
    train(tmp_path, Poisoned(155), 200, keep=Keep(last=-1))
    tier = LocalTier(tmp_path / "run")
    pruned = housekeeping.prune(tier, store.list_checkpoints(tier).committed, Keep(last=1), None, dry_run=True)
    stays = {judgement.name: judgement.reasons for judgement in pruned.judgements if judgement.keep}
    assert stays.pop("epoch=0-step=150.ckpt") == ("from before the loss left its course",)
    assert len(stays) == 1


def test_time_goes_on_when_the_run_goes_back(tmp_path: Path) -> None:
    timer = Timer(duration={"hours": 1})
    callback = ResilientCheckpoint(tmp_path / "run", schedule=EverySteps(10), rollback=Rollback(patience=20))
    trainer = make_trainer(tmp_path, callback, settle(), timer, max_epochs=1)
    began = time.monotonic()
    trainer.fit(Poisoned(155, heals=True), numbered(1200))
    assert timer.time_elapsed() <= time.monotonic() - began


def test_loss_that_is_not_finite_makes_a_checkpoint_suspect_though_the_weights_are_sound(tmp_path: Path) -> None:
    class Skips(TinyModel):
        """As a model does that leaves such batches out."""

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch[:2], batch_idx)
            return {"loss": loss, "seen": torch.tensor(float("inf"))} if self.global_step == 19 else {
                "loss": loss, "seen": loss.detach()
            }  # fmt: skip

    train(tmp_path, Skips(), 40, loss_key="seen", keep=Keep(last=-1))
    health = {
        manifest.step: (manifest.health, manifest.extra.get("suspicion")) for manifest in committed(tmp_path / "run")
    }
    assert health[20] == ("suspect", "the loss is inf")
    assert {health[step][0] for step in (10, 30, 40)} == {"healthy"}


def test_run_goes_back_and_leaves_out_what_made_it_diverge(tmp_path: Path) -> None:
    model = Poisoned(155, 400)  # all the rest of the batches that come before the run goes back
    model.until = 185
    trainer = train(tmp_path, model, rollback=Rollback(patience=20, skip_batches=7), keep=Keep(last=-1))
    back = next(place for place in range(1, len(model.steps)) if model.steps[place] < model.steps[place - 1])
    assert model.steps[back] == 150  # the newest from before step 155
    assert model.batches[back] == model.batches[back - 1] + 1 + 7
    assert model.batches[back - 1] >= 155 + 20 - 1
    assert model.batches == [*range(model.batches[back - 1] + 1), *range(model.batches[back], 300)]
    assert trainer.global_step == 150 + 300 - model.batches[back]
    newest = max(committed(tmp_path / "run"), key=lambda one: one.sequence)
    assert newest.step == trainer.global_step
    again = [one for one in committed(tmp_path / "run") if one.step == 150]
    assert sorted(one.reason for one in again) == ["every 10 steps", "rolled back to epoch=0-step=150.ckpt"]


def test_weights_moments_and_rate_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    seen: dict[int, dict[str, torch.Tensor]] = {}

    class Scheduled(Poisoned):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.003)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5), "interval": "step"}]

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            state = {name: value.clone() for name, value in self.state_dict().items()}
            optimizer = self.optimizers().optimizer  # type: ignore[union-attr]
            for number, entry in optimizer.state_dict()["state"].items():
                state |= {f"{number}.{key}": value.clone() for key, value in entry.items()}
            state["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])
            key = self.global_step if self.global_step not in seen else -self.global_step
            seen[key] = state

    train(tmp_path, Scheduled(155, 185), rollback=Rollback(patience=20))
    assert seen[-150].keys() == seen[150].keys()
    for name, value in seen[150].items():
        assert torch.equal(seen[-150][name], value), name


def test_moments_go_before_there_is_memory_for_those_of_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device may have no room for both."""
    model, had = Poisoned(155, 185), list[int]()
    original = CheckpointReader.tree

    def tree(reader: CheckpointReader, part: str, *args: Any) -> Any:
        if part == "optimizer_0":
            had.append(len(model.trainer.optimizers[0].state))
        return original(reader, part, *args)

    monkeypatch.setattr(CheckpointReader, "tree", tree)
    train(tmp_path, model, rollback=Rollback(patience=20))
    assert had == [0]
    assert model.trainer.optimizers[0].state


def test_run_that_goes_on_diverging_stops_clearly_after_so_many_times_also_across_restarts(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"since step 15\d, and the run was taken back 2 times"):
        train(tmp_path, Poisoned(155), 600, rollback=Rollback(patience=10, most=2))
    newest = max(committed(tmp_path / "run"), key=lambda one: one.sequence)
    assert newest.reason != "end of training"
    with pytest.raises(Diverged, match="taken back 2 times"):
        train(tmp_path, Poisoned(155), 600, rollback=Rollback(patience=10, most=2))


def test_run_without_a_good_checkpoint_stops_clearly(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="no checkpoint from before"):
        train(tmp_path, Poisoned(3, scale=float("nan")), rollback=Rollback(patience=5))


def test_run_goes_on_exactly_after_it_went_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_resilience.losses.SECONDS", float("inf"))  # when it goes back hangs on no clock
    whole = Poisoned(155, 185)
    train(tmp_path / "whole", whole, rollback=Rollback(patience=20, skip_batches=5))
    first, second = Poisoned(155, 185), Poisoned(155, 185)

    class Stops(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if int(batch[2][0]) // 4 == 232:
                raise RuntimeError("stop")

    callback = ResilientCheckpoint(
        tmp_path / "cut" / "run", schedule=EverySteps(10), rollback=Rollback(patience=20, skip_batches=5)
    )
    with pytest.raises(RuntimeError, match="stop"):
        make_trainer(tmp_path, callback, settle(), Stops(), max_epochs=1).fit(first, numbered(1200))
    train(tmp_path / "cut", second, rollback=Rollback(patience=20, skip_batches=5))
    began = whole.batches.index(second.batches[0])
    assert second.batches == whole.batches[began:]
    assert second.history == whole.history[began:]


def on_ranks(root: Path, name: str) -> tuple[list[int], list[int]]:
    ranks = int(os.environ["WORLD_SIZE"])
    model = PoisonedAfter(200, heals=True)
    train(
        root,
        model,
        700,
        rollback=Rollback(patience=10, skip_batches=3),
        grace_seconds=1.0,  # the ranks ask each other more often then
        strategy=strategy(name, ranks),
        devices=ranks,
        keep=Keep(last=-1),
    )
    return model.steps, [int(step) for step in model.batches]


@pytest.mark.ranks
@pytest.mark.parametrize("name", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("ddp", "fsdp")), "fsdp2"])
def test_ranks_go_back_together(tmp_path: Path, name: str) -> None:
    (steps, _), (others, _) = run_forks(on_ranks, tmp_path, name, world_size=2)
    assert steps == others
    back = next(place for place in range(1, len(steps)) if steps[place] < steps[place - 1])
    assert steps[back] % 10 == 0
    assert 0 < steps[back] <= 200
    assert steps[back - 1] >= 210


def test_loggers_hear_of_each_commit(tmp_path: Path) -> None:
    logger = Remembers()
    train(tmp_path, TinyBatches(), 30, logger=logger, log_every_n_steps=1)
    assert [metrics["resilience/health"] for _, metrics in logger.heard] == [1.0] * 3
    for step, metrics in logger.heard:
        assert step is not None
        assert metrics["resilience/bytes"] > 1000
        assert metrics["resilience/stall_seconds"] > 0
        assert metrics["resilience/stage_seconds"] > 0
        assert 0 < metrics["resilience/goodput"] <= 1
        assert metrics["resilience/at_risk_steps"] >= 10
    quiet = Remembers()
    train(tmp_path / "quiet", TinyBatches(), 30, logger=quiet, log_metrics=False, log_every_n_steps=1)
    assert quiet.heard == []


class TinyBatches(TinyModel):
    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[:2], batch_idx)


@pytest.mark.parametrize(
    ("kwargs", "named"),
    [
        ({"rollback": True}, "rollback=True"),
        ({"log_metrics": "no"}, "log_metrics=.no."),
        ({"rollback": Rollback(), "save_weights_only": True}, "save_weights_only=True"),
        ({"rollback": Rollback(), "filename": "best", "enable_version_counter": False}, "enable_version_counter=False"),
    ],
)
def test_arguments_that_cannot_be_meant_are_refused(kwargs: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ResilientCheckpoint(**kwargs)
