"""What training scripts have beside a model and a loader, and what a run that is interrupted makes of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, GradientAccumulationScheduler, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader
from torchmetrics import MaxMetric, RunningMean, SumMetric

from lightning_resilience import logged
from support import TinyModel, checkpoint_every, data, make_trainer, settle
from test_exact import Stop


class StopAt(L.Callback):
    """Interrupts before a batch, counted from the start of the run."""

    def __init__(self, batch: int | None) -> None:
        self.batch = batch

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.batch is not None and trainer.fit_loop.epoch_loop.total_batch_idx >= self.batch:
            raise Stop


class KeepsItsBest(TinyModel):
    """The best validation of the run, and the number of all, in metrics that no epoch resets."""

    def __init__(self) -> None:
        super().__init__()
        self.best = MaxMetric()
        self.validations = SumMetric()
        self.seen: list[tuple[int, float, float]] = []

    def on_validation_epoch_end(self) -> None:
        if self.trainer.sanity_checking:
            self.best(1000.0)
            self.validations(1000.0)
            return
        self.best(-float(self.global_step))
        self.validations(1.0)
        self.seen.append((self.global_step, float(self.best.compute()), float(self.validations.compute())))


def test_a_sanity_check_at_the_start_of_an_epoch_leaves_metrics_as_they_were_saved(tmp_path: Path) -> None:
    def fit(stop: int | None, root: Path) -> KeepsItsBest:
        model = KeepsItsBest()
        trainer = make_trainer(
            root, StopAt(stop), checkpoint_every(root / "run", 8), settle(), max_epochs=3, num_sanity_val_steps=2
        )
        with suppress(Stop):
            trainer.fit(model, data(), data(8), ckpt_path="last")
        return model

    whole = fit(None, tmp_path / "whole").seen
    fit(9, tmp_path / "parts")
    assert fit(None, tmp_path / "parts").seen == whole[1:]


class KeepsAWindow(TinyModel):
    """A metric over the last batches, and one that is part of the model's state."""

    def __init__(self) -> None:
        super().__init__()
        self.recent = RunningMean(window=3)
        self.kept = SumMetric()
        self.kept.persistent(True)
        self.kept.load_state_dict({"sum_value": torch.tensor(7.0)})

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.recent.update(loss)
        return loss

    def on_train_end(self) -> None:
        assert self.recent.compute().isfinite()
        logged.forget(self.trainer)


def test_what_is_forgotten_of_metrics_is_all_that_the_models_state_has_not(tmp_path: Path) -> None:
    model = KeepsAWindow()
    make_trainer(tmp_path).fit(model, data())
    with pytest.warns(UserWarning, match="before the ``update``"):
        assert model.recent.compute().isnan()
    assert model.kept.sum_value == 7


class Loads(TinyModel):
    """Logs over the epoch; its loader and its learning rate are for a Tuner to change."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 4
        self.mean = 0.0

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, on_step=False)
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(data().dataset, self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return data(8)

    def on_train_end(self) -> None:
        self.mean = self.trainer.callback_metrics.get("loss", torch.zeros(())).item()


def rate_finder() -> L.Callback:
    return LearningRateFinder(num_training_steps=3, early_stop_threshold=None)


def size_finder() -> L.Callback:
    return BatchSizeFinder(max_trials=1, steps_per_trial=2, init_val=4)


@pytest.mark.parametrize("finder", [rate_finder, size_finder])
def test_what_a_callback_tries_before_training_is_no_part_of_the_run(tmp_path: Path, finder: Any) -> None:
    def fit(stop: int | None, root: Path) -> Loads:
        L.seed_everything(3)
        model = Loads()
        trainer = make_trainer(root, finder(), StopAt(stop), checkpoint_every(root / "run", 2), settle(), max_epochs=2)
        with suppress(Stop):
            trainer.fit(model, ckpt_path="last")
        return model

    whole = fit(None, tmp_path / "whole")
    steps = 2 * len(whole.train_dataloader())
    tried = len(whole.history) - steps
    assert tried > 0
    assert [step for step, _ in whole.history[tried:]] == list(range(steps))
    for stop in (3, steps - 1):
        fit(stop, tmp_path / "parts")
    end = fit(None, tmp_path / "parts")
    assert end.history[-2:] == whole.history[-2:]
    assert end.history[-3][0] < steps - 3  # what the callback tried; before it came the resume at step 14
    assert end.mean == whole.mean


class TriesAgain(LearningRateFinder):
    """Looks for a rate at the start of some epochs, as Lightning's own example does."""

    def on_fit_start(self, *_: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch in (0, 2):
            self.lr_find(trainer, pl_module)


def test_what_a_callback_tries_as_an_epoch_begins_is_not_saved_and_costs_no_epoch(tmp_path: Path) -> None:
    def fit(stop: int | None, root: Path) -> list[tuple[int, float]]:
        L.seed_everything(3)
        model = Loads()
        finder = TriesAgain(num_training_steps=5, early_stop_threshold=None, update_attr=False)
        trainer = make_trainer(root, finder, StopAt(stop), checkpoint_every(root / "run", 1), settle(), max_epochs=3)
        with suppress(Stop):
            trainer.fit(model, ckpt_path="last")
        return model.history

    whole = fit(None, tmp_path / "whole")
    steps = 3 * len(Loads().train_dataloader())
    assert [step for step, _ in whole] == [*range(5), *range(steps)]
    first = fit(2, tmp_path / "parts")
    assert first + fit(None, tmp_path / "parts") == whole


def test_what_a_tuner_has_logged_is_no_part_of_the_epoch_that_goes_on(tmp_path: Path) -> None:
    def fit(stop: int | None, root: Path) -> Loads:
        L.seed_everything(3)
        model = Loads()
        trainer = make_trainer(root, StopAt(stop), checkpoint_every(root / "run", 2), settle())
        Tuner(trainer).lr_find(model, num_training=2, early_stop_threshold=None, update_attr=False)
        L.seed_everything(3)
        with suppress(Stop):
            trainer.fit(model, ckpt_path="last")
        return model

    whole = fit(None, tmp_path / "whole")
    fit(5, tmp_path / "parts")
    assert fit(None, tmp_path / "parts").mean == whole.mean


class Unfreezes(L.Callback):
    """Trains the first layer from the second epoch on, as most scripts do, and forgets that it has."""

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)


class Remembers(Unfreezes):
    """The same, and does not forget."""

    done = False

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self.done = self.done or trainer.current_epoch == 1

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.done = state_dict["done"]

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.net[0].requires_grad_(self.done)


@pytest.mark.parametrize(("callback", "stop", "warns"), [(Unfreezes, 11, 1), (Unfreezes, 8, 0), (Remembers, 11, 0)])
def test_what_was_trained_and_is_frozen_after_a_resume_is_told_of(
    tmp_path: Path, callback: type[L.Callback], stop: int, warns: int
) -> None:
    def fit(stop: int | None) -> None:
        trainer = make_trainer(
            tmp_path, callback(), StopAt(stop), checkpoint_every(tmp_path / "run", 1), settle(), max_epochs=2
        )
        with suppress(Stop):
            trainer.fit(TinyModel(), data(), ckpt_path="last")

    fit(stop)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(None)
    told = [str(one.message) for one in caught if "are frozen now" in str(one.message)]
    assert len(told) == warns
    assert all("net.0.weight and 1 more of the model's 6 parameters" in one for one in told)


class AccumulatesLater(L.Callback):
    """Changes it once, as the second epoch begins."""

    def on_train_epoch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.current_epoch == 1:
            trainer.accumulate_grad_batches = 2


@pytest.mark.parametrize("stop", [6, 10], ids=["inside the epoch that changes it", "in the one after"])
@pytest.mark.parametrize(
    "make", [AccumulatesLater, lambda: GradientAccumulationScheduler({0: 1, 1: 2})], ids=["own", "Lightning's"]
)
def test_accumulation_that_a_callback_changed_goes_on(
    tmp_path: Path, make: Callable[[], L.Callback], stop: int
) -> None:
    def fit(stop: int | None, root: Path, **changed: Any) -> tuple[list[Any], int]:
        model = TinyModel()
        trainer = make_trainer(
            root, make(), StopAt(stop), checkpoint_every(root / "run", 1), settle(), **{"max_epochs": 4, **changed}
        )
        with suppress(Stop):
            trainer.fit(model, data(16), ckpt_path="last")
        return model.history, trainer.global_step

    losses, steps = fit(None, tmp_path / "whole")
    first, _ = fit(stop, tmp_path / "parts")
    again, last = fit(None, tmp_path / "parts")
    assert last == steps
    assert again == losses[-len(again) :]
    assert len(again) < len(losses)
    assert first == losses[: len(first)]


def test_accumulation_that_the_trainer_has_now_is_what_counts(tmp_path: Path) -> None:
    def fit(stop: int | None, accumulate: int) -> int:
        trainer = make_trainer(
            tmp_path,
            AccumulatesLater(),
            StopAt(stop),
            checkpoint_every(tmp_path / "run", 1),
            settle(),
            max_epochs=2,
            accumulate_grad_batches=accumulate,
        )
        with suppress(Stop):
            trainer.fit(TinyModel(), data(16), ckpt_path="last")
        return trainer.accumulate_grad_batches

    fit(6, 1)
    assert fit(None, 4) == 4
