"""Any run, interrupted anywhere, any number of times, is the run that was not interrupted: everything is compared.

A *history* is what a run does, event by event, each with the number of batches trained on when it happened: samples,
losses, learning rates, validations, what reaches loggers and callbacks.  A life that resumes after batch n has the
events up to n from the lives before it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging
from lightning.pytorch.loggers.logger import Logger
from torch import Tensor, nn
from torch.utils.data import IterableDataset
from torchmetrics import MeanMetric
from torchmetrics.regression import R2Score

from forks import run_forks
from support import TinyModel, checkpoint_every, committed, make_trainer, settle, strategy
from test_exact import LOADERS, Augmented, Stop, loader

Event = tuple[int, str, Any]


class History(Logger):
    """Writes down what happens; also the Trainer's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.trainer: L.Trainer | None = None

    def note(self, what: str, value: Any) -> None:
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.ready if self.trainer is not None else 0
        self.events.append((batches, what, value))

    @property
    def name(self) -> str:
        return "history"

    @property
    def version(self) -> str:
        return "0"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if not any(name.startswith("resilience/") for name in metrics):  # seconds, which differ
            self.note("logged", (step, sorted(metrics.items())))


class Observer(L.Callback):
    """Tells the history of epochs and validations, and interrupts."""

    def __init__(self, history: History, stop: int | None) -> None:
        self.history = history
        self.stop = stop

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.history.trainer = trainer
        done = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        self.history.events = [event for event in self.history.events if event[0] <= done]

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # The next batch's: a save between epochs comes before it.
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready + 1
        self.history.events.append((batches, "epoch starts", trainer.current_epoch))

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.stop is not None and trainer.fit_loop.epoch_loop.total_batch_idx >= self.stop:
            raise Stop

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            self.history.note("validated", sorted((k, v.item()) for k, v in trainer.callback_metrics.items()))

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.history.note("epoch ends", sorted((k, v.item()) for k, v in trainer.callback_metrics.items()))


class Model(TinyModel):
    """Logs in every way that Lightning has."""

    setup_: Setup
    events: History

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 1)
        self.mean = MeanMetric()
        self.score = R2Score()
        self.val_mean = MeanMetric()

    @classmethod
    def of(cls, setup: Setup, history: History) -> Model:
        model = cls()
        model.setup_ = setup
        model.events = history
        model.automatic_optimization = not setup.manual
        return model

    def loss_of(self, batch: Any, net: nn.Module) -> tuple[Tensor, list[int], Tensor, Tensor]:
        parts = [batch] if "x" in batch else [part for part in batch.values() if part is not None]
        x = torch.cat([part["x"] for part in parts])
        out, want = net(x), x.sum(1, keepdim=True)
        return nn.functional.mse_loss(out, want), torch.cat([part["id"] for part in parts]).tolist(), out, want

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss, ids, out, want = self.loss_of(batch, self.net)
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(ids))
        self.log("most", loss, on_epoch=True, on_step=False, reduce_fx="max", batch_size=len(ids))
        self.log("sum", loss, on_epoch=True, on_step=False, reduce_fx="sum", batch_size=len(ids))
        self.mean(loss.detach())
        self.log("mean", self.mean, on_epoch=True, on_step=False, batch_size=len(ids))
        self.score.update(out.detach(), want)
        self.log("score", self.score, on_epoch=True, on_step=False, batch_size=len(ids))
        if batch_idx == 0:
            self.log("first", loss, on_step=False, on_epoch=True, batch_size=len(ids))
        if self.setup_.manual:
            self.by_hand(loss, batch, batch_idx)
        rates = [group["lr"] for one in self.trainer.optimizers for group in one.param_groups]
        self.events.note("trained", (self.current_epoch, batch_idx, self.global_step, ids, loss.item(), rates))
        return None if self.setup_.manual else loss

    def by_hand(self, loss: Tensor, batch: Any, batch_idx: int) -> None:
        """Two optimizers, the first accumulating over several batches."""
        first, second = self.optimizers()
        self.manual_backward(loss)
        if (batch_idx + 1) % self.setup_.accumulate == 0:
            first.step()
            first.zero_grad()
            self.lr_schedulers()[0].step()
        other = self.loss_of(batch, self.second)[0]
        second.zero_grad()
        self.manual_backward(other)
        if not (batch_idx + 1) % self.setup_.accumulate:
            second.step()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.loss_of(batch, self.net)[0]
        self.val_mean(loss)
        self.log("val_mean", self.val_mean, batch_size=4)
        self.log("val_loss", loss, batch_size=4, sync_dist=True)

    def configure_optimizers(self) -> Any:
        if self.setup_.manual:
            first = torch.optim.Adam(self.net.parameters(), lr=0.01)
            second = torch.optim.SGD(self.second.parameters(), lr=0.1, momentum=0.9)
            schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (first, second)]
            return [first, second], schedulers
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return SCHEDULERS[self.setup_.scheduler](optimizer, self)


def plateau(optimizer: torch.optim.Optimizer, monitor: str, interval: str) -> dict[str, Any]:
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.2)
    config = {"scheduler": scheduler, "monitor": monitor, "interval": interval, "strict": interval == "epoch"}
    return {"optimizer": optimizer, "lr_scheduler": config}


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer, Model], Any]] = {
    "none": lambda optimizer, model: optimizer,
    "epochs": lambda optimizer, model: ([optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]),
    "steps": lambda optimizer, model: {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=int(model.trainer.estimated_stepping_batches) + 1
            ),
            "interval": "step",
        },
    },
    "every second step": lambda optimizer, model: {
        "optimizer": optimizer,
        "lr_scheduler": {
            "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8),
            "interval": "step",
            "frequency": 2,
        },
    },
    "plateau of the epoch": lambda optimizer, model: plateau(optimizer, "loss_epoch", "epoch"),
    "plateau of the validation": lambda optimizer, model: plateau(optimizer, "val_loss", "epoch"),
    "plateau of steps": lambda optimizer, model: plateau(optimizer, "val_loss", "step"),
}


@dataclass
class Setup:
    """One way to train, drawn by chance."""

    loader: str = "shuffled"
    manual: bool = False
    accumulate: int = 1
    scheduler: str = "none"
    trainer: dict[str, Any] = field(default_factory=dict)
    callbacks: tuple[str, ...] = ()
    every: int = 1
    stops: tuple[int, ...] = ()
    ranks: dict[str, Any] = field(default_factory=dict)
    finished: bool = False

    @classmethod
    def draw(cls, chance: random.Random, loaders: list[str]) -> Setup:
        pick = chance.choice
        manual = chance.random() < 0.2
        name = pick(loaders)
        sized = not isinstance(getattr(LOADERS[name](), "dataset", None), IterableDataset)
        validation: dict[str, Any] = pick(
            [
                {"limit_val_batches": 0},
                {"limit_val_batches": 2},
                {"limit_val_batches": 2, "check_val_every_n_epoch": 2},
                {"limit_val_batches": 1, "val_check_interval": 2},
                {"limit_val_batches": 1, "val_check_interval": 3, "check_val_every_n_epoch": None},
                {"limit_val_batches": 1, "val_check_interval": 0.5 if sized else 1.0},
            ]
        )
        validates = validation["limit_val_batches"] > 0
        each_epoch = validates and "val_check_interval" not in validation and len(validation) == 1
        schedulers = ["none", "epochs", "every second step", "plateau of the epoch"]
        schedulers += ["steps"] if sized else []
        schedulers += ["plateau of the validation"] if each_epoch else []
        schedulers += ["plateau of steps"] if validates else []
        trainer = {
            **validation,
            **pick([{}, {}, {"limit_train_batches": 3}, {"limit_train_batches": 0.7}, {"overfit_batches": 2}]),
            **pick([{}, {}, {"reload_dataloaders_every_n_epochs": 1}, {"reload_dataloaders_every_n_epochs": 2}]),
            **pick([{"max_epochs": 4}, {"max_epochs": 4, "max_steps": chance.randint(5, 15)}]),
        }
        if not sized:
            trainer = {k: v for k, v in trainer.items() if not isinstance(v, float) and k != "overfit_batches"}
        if trainer.get("overfit_batches"):
            trainer.pop("val_check_interval", None)
            trainer.pop("limit_val_batches", None)
            trainer.pop("check_val_every_n_epoch", None)
            schedulers, each_epoch = ["none", "epochs"], False
        if not manual:
            trainer |= pick([{}, {"gradient_clip_val": 0.5}])
        callbacks = [
            *(["early stopping"] if each_epoch and chance.random() < 0.4 else []),
            *(["average"] if not manual and chance.random() < 0.25 else []),
        ]
        return cls(
            loader=name,
            manual=manual,
            accumulate=pick([1, 1, 2, 3]),
            scheduler="none" if manual else pick(schedulers),
            trainer=trainer,
            callbacks=tuple(callbacks),
            every=pick([1, 1, 1, 2, 3]),
            stops=tuple(sorted(chance.sample(range(1, 16), chance.randint(1, 3)))),
        )

    def live(self, folder: Path, history: History, stop: int | None, life: int, **kwargs: Any) -> Model:
        """One life of the run."""
        seed(1000 * life)
        model = Model.of(self, history)
        seed(77 * life if (folder / "run").exists() and committed(folder / "run") else 7)
        callbacks: dict[str, Callable[[], L.Callback]] = {
            "early stopping": lambda: EarlyStopping("val_loss", patience=2, min_delta=0.3),
            "average": lambda: EMAWeightAveraging(decay=0.9),
        }
        settings = {**self.trainer, **kwargs, "logger": history, "log_every_n_steps": 2}
        if not self.manual:
            settings["accumulate_grad_batches"] = self.accumulate
        trainer = make_trainer(
            folder,
            Observer(history, stop),
            settle(),
            *(callbacks[name]() for name in self.callbacks),
            checkpoint_every(folder / "run", self.every),
            **settings,
        )
        with suppress(Stop):
            trainer.fit(model, LOADERS[self.loader](), loader(), ckpt_path="last")
            self.finished = True
        return model

    def run(self, folder: Path, stops: tuple[int, ...], strategies: Callable[[], Any] = lambda: "auto") -> Any:
        """All lives; what is to be the same."""
        history = History()
        self.finished = False
        for life, stop in enumerate((*stops, None)):
            if not self.finished:
                model = self.live(folder, history, stop, life, strategy=strategies(), **self.ranks)
        optimizers = [optimizer.state_dict() for optimizer in model.trainer.optimizers]
        return history.events, dict(model.state_dict()), optimizers


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def difference(one: Any, other: Any, where: str = "") -> str | None:
    """The first place where two results differ, bit for bit."""
    if isinstance(one, Tensor):
        one, other = (value.to_local() if hasattr(value, "to_local") else value for value in (one, other))
        return None if torch.equal(one, other) else f"{where}: tensors differ"
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next((d for k in one if (d := difference(one[k], other[k], f"{where}.{k}"))), None)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        for index, (a, b) in enumerate(zip(one, other, strict=False)):
            if d := difference(a, b, f"{where}[{index}]"):
                return d
        return (
            None if len(one) == len(other) else f"{where}: {len(one)} and {len(other)} entries: {one[-1:]} {other[-1:]}"
        )
    return None if repr(one) == repr(other) else f"{where}: {one} and {other}"


def check(setup: Setup, folder: Path, **kwargs: Any) -> None:
    """Compare an interrupted run with one that was not."""
    Augmented.loaded = 0
    whole = setup.run(folder / "whole", (), **kwargs)
    broken = setup.run(folder / "broken", setup.stops, **kwargs)
    assert len(whole[0]) > 5
    found = difference(broken, whole)
    assert found is None, f"{found}\nof {setup}"


MANY = [pytest.param(number, marks=pytest.mark.slow) for number in range(15, 225)]


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging")
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.filterwarnings("ignore:ReduceLROnPlateau conditioned")
@pytest.mark.parametrize("number", [*range(15), *MANY])
def test_an_interrupted_run_is_the_same_run(tmp_path: Path, number: int) -> None:
    check(Setup.draw(random.Random(number), list(LOADERS)), tmp_path)


def on_ranks(folder: Path, name: str, numbers: list[int]) -> list[str | None]:
    """What differs on this rank, for several ways to train."""
    found = []
    for number in numbers:
        setup = Setup.draw(random.Random(number), [name for name in LOADERS if name not in ("stream", "weighted")])
        if name != "ddp":
            setup.callbacks = tuple(one for one in setup.callbacks if one != "average")
        if name == "fsdp":
            setup.trainer.pop("gradient_clip_val", None)
            setup.manual = False  # FSDP1 knows the state of one optimizer for all parameters only
        setup.ranks = {"devices": 2}
        try:
            check(setup, folder / str(number), strategies=partial(strategy, name, 2))
            found.append(None)
        except AssertionError as error:
            found.append(str(error))
    return found


@pytest.mark.ranks
@pytest.mark.parametrize(
    "numbers", [[101], pytest.param(list(range(200, 220)), marks=pytest.mark.slow)], ids=["few", "many"]
)
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp"])
def test_an_interrupted_run_is_the_same_run_on_two_ranks(tmp_path: Path, name: str, numbers: list[int]) -> None:
    assert run_forks(on_ranks, tmp_path, name, numbers, timeout=600) == [[None] * len(numbers)] * 2
