"""``ResilientCheckpoint`` in a Trainer, in one process: when it saves, what it resumes, and what it refuses."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from lightning_resilience import (
    CheckpointIncompatible,
    CheckpointNotFound,
    EverySeconds,
    EverySteps,
    FirstOf,
    Keep,
    ResilientCheckpoint,
    ResilientCheckpointIO,
    SaveFailed,
    SetupError,
    TierDenied,
    TierUnavailable,
)
from lightning_resilience.arguments import DEFAULT_SCHEDULE
from lightning_resilience.manifest import WEIGHTS_ONLY
from lightning_resilience.session import _sessions
from lightning_resilience.tiers import LocalTier
from support import TinyModel, checkpoint_every, committed, data, make_trainer, settle


def fit(folder: Path, *callbacks: L.Callback, model: L.LightningModule | None = None, **kwargs: Any) -> L.Trainer:
    """Train in ``folder``; every batch waits for the save it started, so that none is skipped."""
    ckpt_path = kwargs.pop("ckpt_path", None)
    loaders = {"train_dataloaders": kwargs.pop("train", data()), "val_dataloaders": kwargs.pop("val", None)}
    trainer = make_trainer(folder, *callbacks, settle(), **kwargs)
    trainer.fit(TinyModel() if model is None else model, ckpt_path=ckpt_path, **loaders)
    return trainer


# -- when it saves ----------------------------------------------------------------------------------------------------


def test_saves_at_every_nth_step_and_keeps_the_newest_three(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 2))
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [4, 6, 8]


def test_default_saves_only_at_the_end_of_a_short_run(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(tmp_path / "run")
    assert callback.schedule == DEFAULT_SCHEDULE
    fit(tmp_path, callback, max_epochs=3)
    assert [(m.step, m.reason) for m in committed(tmp_path / "run")] == [(24, "end of training")]


@pytest.mark.parametrize(
    ("arguments", "steps"),
    [
        ({"every_n_train_steps": 3}, [3, 6, 9, 12, 15, 16]),
        ({"every_n_epochs": 1}, [8, 16]),
        ({"every_n_epochs": 2}, [16]),
        ({"train_time_interval": timedelta(0)}, list(range(1, 17))),
        ({"every_n_train_steps": 5, "every_n_epochs": 1}, [5, 8, 10, 15, 16]),
        ({"schedule": FirstOf(EverySteps(6), EverySeconds(1000))}, [6, 12, 16]),
        ({"every_n_train_steps": 8, "every_n_epochs": 1}, [8, 16]),
    ],
)
def test_triggers_alone_and_together_save_each_step_once(
    tmp_path: Path, arguments: dict[str, Any], steps: list[int]
) -> None:
    fit(tmp_path, ResilientCheckpoint(tmp_path / "run", keep=Keep(last=-1), **arguments), max_epochs=2)
    assert [manifest.step for manifest in committed(tmp_path / "run")] == steps


def test_save_inside_an_accumulation_window_waits_for_its_end(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(tmp_path / "run", schedule=EverySeconds(0), keep=Keep(last=-1))
    fit(tmp_path, callback, accumulate_grad_batches=4)
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [1, 2]


class ManualModel(TinyModel):
    """Steps the raw optimizer itself, so that the Trainer's global step stays 0."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        optimizer.zero_grad()
        self.manual_backward(nn.functional.mse_loss(self.net(batch[0]), batch[1]))
        optimizer.step()


def test_manual_optimization_that_never_moves_the_global_step_is_saved_and_resumed(tmp_path: Path) -> None:
    model = ManualModel()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 3), model=model)
    assert len(committed(tmp_path / "run")) >= 2
    again = ManualModel()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 3), model=again, ckpt_path="last")
    assert equal(model, again)


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == other_name and torch.equal(a, b) for (name, a), (other_name, b) in pairs)


def test_fast_dev_run_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 1), fast_dev_run=True)
    assert not (tmp_path / "run").exists()


# -- metrics ----------------------------------------------------------------------------------------------------------


class Scored(TinyModel):
    """Logs the next of the given scores at each validation; None logs nothing."""

    def __init__(self, scores: list[float | None]) -> None:
        super().__init__()
        self.scores = deque(scores)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        if batch_idx == 0 and (score := self.scores.popleft()) is not None:
            self.log("val_loss", score)


NAN, INF = float("nan"), float("inf")


def test_last_is_the_newest_whatever_the_metric_says(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(tmp_path / "run", monitor="val_loss", save_top_k=1, save_last=True)
    fit(tmp_path, callback, model=Scored([1.0, 2.0, 3.0]), val=data(8), max_epochs=3)
    assert committed(tmp_path / "run")[-1].step == 24
    assert (tmp_path / "run" / "last.ckpt").resolve() == Path(callback.last_model_path)
    assert Path(callback.best_model_path).name == "epoch=0-step=8.ckpt"
    trainer = fit(tmp_path, ResilientCheckpoint(tmp_path / "run"), model=TinyModel(), max_epochs=3, ckpt_path="last")
    assert trainer.global_step == 24


@pytest.mark.parametrize(("mode", "best"), [("min", [0.4, 0.5]), ("max", [0.5, 0.4])])
def test_scores_that_are_not_finite_or_missing_are_never_best(tmp_path: Path, mode: str, best: list[float]) -> None:
    callback = ResilientCheckpoint(tmp_path / "run", monitor="val_loss", mode=mode, save_top_k=2, keep=Keep(last=1))
    logged: list[float | None] = [NAN, 0.5, NAN, None, 0.4, INF if mode == "min" else -INF]
    fit(tmp_path, callback, model=Scored(logged), val=data(8), max_epochs=6)
    kept = committed(tmp_path / "run")
    scores = [round(m.metrics.get("val_loss", NAN), 4) for m in kept]
    assert [score for score in scores if score in best] == [0.5, 0.4]
    assert kept[-1].step == 48
    assert float(callback.best_model_score) == pytest.approx(best[0])
    assert sorted(map(float, callback.best_k_models.values())) == pytest.approx(sorted(best))


def test_step_trigger_between_validations_saves_without_an_old_score(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(
        tmp_path / "run", monitor="val_loss", every_n_train_steps=3, keep=Keep(last=-1), save_top_k=3
    )
    model = Scored([0.5, 0.3, 0.4])
    fit(tmp_path, callback, model=model, train=data(60), val=data(8), val_check_interval=5)
    found = {m.step: m.metrics.get("val_loss") for m in committed(tmp_path / "run")}
    assert found == {3: None, 5: 0.5, 6: None, 9: None, 10: pytest.approx(0.3), 12: None, 15: pytest.approx(0.4)}


def test_best_is_found_in_a_new_process(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(tmp_path / "run", monitor="val_loss")
    fit(tmp_path, callback, model=Scored([1.0, 0.5, 2.0]), val=data(8), max_epochs=3)
    fresh = ResilientCheckpoint(tmp_path / "run", monitor="val_loss")
    assert fresh.best_model_path == callback.best_model_path != ""
    results = make_trainer(tmp_path, fresh).test(Testable(), data(8), ckpt_path="best")
    assert results


class Testable(TinyModel):
    __test__ = False

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))


def test_accuracy_with_mode_min_gets_a_hint() -> None:
    with pytest.warns(UserWarning, match="more is better"):
        ResilientCheckpoint(monitor="val_acc")


# -- one Trainer, several stages --------------------------------------------------------------------------------------


def test_fit_validate_fit_test_with_one_trainer(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(tmp_path / "run", monitor="val_loss", every_n_train_steps=4)
    model = Testable()
    trainer = make_trainer(tmp_path, callback, settle(), max_epochs=1)
    trainer.fit(model, data(), data(8))
    assert trainer.validate(model, data(8), ckpt_path="best", verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, data(), data(8), ckpt_path="last")
    assert trainer.global_step == 16
    assert trainer.test(model, data(8), ckpt_path=callback.last_model_path, verbose=False)
    assert "save_checkpoint" not in vars(trainer.strategy)  # nothing of ours stays on the strategy


def test_stock_model_checkpoint_beside_ours_keeps_its_own(tmp_path: Path) -> None:
    stock = ModelCheckpoint(tmp_path / "stock", every_n_train_steps=3, save_top_k=1, save_last=True)
    fit(tmp_path, checkpoint_every(tmp_path / "ours", 4), stock)
    assert [m.step for m in committed(tmp_path / "ours")] == [4, 8]
    assert [m.step for m in committed(tmp_path / "stock")] == [6, 6]
    assert Path(stock.best_model_path).is_dir()


def test_two_of_ours_get_on_in_different_folders(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "a", 2, keep=Keep(last=1)), checkpoint_every(tmp_path / "b", 4))
    assert [m.step for m in committed(tmp_path / "a")] == [8]
    assert [m.step for m in committed(tmp_path / "b")] == [4, 8]
    trainer = fit(tmp_path, checkpoint_every(tmp_path / "a", 2), checkpoint_every(tmp_path / "b", 4), ckpt_path="last")
    assert trainer.global_step == 8


def test_two_of_ours_in_one_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="Two checkpoint callbacks save to"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 2), checkpoint_every(tmp_path / "run", 4))


def test_trainer_save_checkpoint_is_there_on_return_and_found_by_last(tmp_path: Path) -> None:
    class Saver(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "run" / "mine.ckpt")
                assert (tmp_path / "run" / "mine.ckpt" / "manifest.json").is_file()
                raise RuntimeError("stop here")

    with pytest.raises(RuntimeError, match="stop here"):
        fit(tmp_path, Saver(), checkpoint_every(tmp_path / "run", 4))
    model = TinyModel()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=model, ckpt_path="last")
    assert model.history[0][0] == 5


def test_checkpoint_given_by_path_resumes(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 3))
    model = TinyModel()
    fit(
        tmp_path,
        checkpoint_every(tmp_path / "other", 3),
        model=model,
        ckpt_path=str(tmp_path / "run" / "epoch=0-step=6.ckpt"),
    )
    assert model.history[0][0] == 6
    assert (tmp_path / "run" / "epoch=0-step=6.ckpt").is_dir()


def test_last_is_found_where_the_logger_numbers_its_runs(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    for expected_first in (0, 8):
        model = TinyModel()
        trainer = make_trainer(
            tmp_path,
            ResilientCheckpoint(schedule=EverySteps(4)),
            logger=CSVLogger(tmp_path, name="logs"),
            log_every_n_steps=1,
            max_steps=expected_first + 8,
            max_epochs=-1,
        )
        trainer.fit(model, data(), ckpt_path="last")
        assert model.history[0][0] == expected_first
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["version_0", "version_1"]


# -- resuming ---------------------------------------------------------------------------------------------------------


def test_finished_run_trains_nothing_and_writes_nothing(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4))
    before = {m.sequence for m in committed(tmp_path / "run")}
    model = TinyModel()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=model, ckpt_path="last")
    assert model.history == []
    assert {m.sequence for m in committed(tmp_path / "run")} == before


def test_run_that_early_stopping_ended_stays_ended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(**kwargs: Any) -> TinyModel:
        model = TinyModel(lr=0.0)
        stopping = EarlyStopping("val_loss", patience=1, min_delta=100)
        trainer = make_trainer(tmp_path, stopping, checkpoint_every(tmp_path / "run", 4), max_epochs=9)
        trainer.fit(model, data(), data(8), **kwargs)
        return model

    assert len(train().history) == 16
    with caplog.at_level("INFO"):
        assert train(ckpt_path="last").history == []
    assert "stopped by EarlyStopping, and stays so: Monitored metric val_loss did not improve" in caplog.text


def test_resume_never_removes_its_source_before_a_newer_one_is_there(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8, keep=Keep(last=1)))
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8, keep=Keep(last=1)), max_epochs=2, ckpt_path="last")
    steps = [m.step for m in committed(tmp_path / "run")]
    assert steps[-1] == 16
    assert 8 in steps


def test_names_that_are_taken_get_a_version(tmp_path: Path) -> None:
    fit(tmp_path, ResilientCheckpoint(tmp_path / "run", filename="{epoch}", schedule=EverySteps(3)))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".ledger.jsonl",
        "epoch=0-v1.ckpt",
        "epoch=0-v2.ckpt",
        "epoch=0.ckpt",
    ]


class TwoOptimizers(TinyModel):
    """GAN-style: two optimizers stepped by hand; one branch is never used, some parameters are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(8, 1)
        self.unused = nn.Linear(8, 1)
        self.frozen = nn.Linear(8, 1).requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer, net in zip(self.optimizers(), (self.net, self.other), strict=True):
            optimizer.zero_grad()
            self.manual_backward(nn.functional.mse_loss(net(batch[0]), batch[1]))
            optimizer.step()

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.AdamW([*self.net.parameters(), *self.unused.parameters()], lr=0.01),
            torch.optim.SGD([*self.other.parameters(), *self.frozen.parameters()], lr=0.02, momentum=0.9),
        ]


def test_several_optimizers_with_unused_and_frozen_parameters_come_back_bit_for_bit(tmp_path: Path) -> None:
    model = TwoOptimizers()
    first = fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=model)
    moments = [copy.deepcopy(optimizer.state_dict()) for optimizer in first.optimizers]

    class Check(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            for saved, optimizer in zip(moments, trainer.optimizers, strict=True):
                live = optimizer.state_dict()
                assert live["param_groups"] == saved["param_groups"]
                assert live["state"].keys() == saved["state"].keys()
                for number, state in saved["state"].items():
                    assert all(
                        torch.equal(live["state"][number][key], value)
                        for key, value in state.items()
                        if value is not None
                    )

    again = TwoOptimizers()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), Check(), model=again, ckpt_path="last", max_epochs=2)


class Tied(TinyModel):
    """Input and output share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.embed.weight

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens = (batch[0][:, :4].abs() * 10).long() % 50
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), tokens.flatten())


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model = Tied()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model)
    shard = next((tmp_path / "run").glob("*.ckpt")) / "__0_0.distcp"
    content = shard.read_bytes()
    assert content.count(model.embed.weight.detach().numpy().tobytes()) == 1
    again = Tied()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=again, ckpt_path="last")
    assert equal(model, again)
    assert again.head.weight is again.embed.weight


class Color(Enum):
    RED = 1


class Odd:
    """A class of the user's own, in hparams."""

    def __init__(self) -> None:
        self.value = 3


class OddHparams(TinyModel):
    def __init__(self, **odd: Any) -> None:
        super().__init__()
        self.save_hyperparameters(odd)


def test_objects_in_hparams_survive_a_resume(tmp_path: Path) -> None:
    odd = {"path": Path("x"), "color": Color.RED, "scalar": np.float32(0.5), "own": Odd(), "lr": 0.01, "width": 16}
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=OddHparams(**odd))
    trainer = fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=OddHparams(**odd), ckpt_path="last")
    assert trainer.global_step == 8
    with pytest.raises(CheckpointIncompatible, match="weights_only=False"):
        make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 4)).fit(
            OddHparams(**odd), data(), ckpt_path="last", weights_only=True
        )


def test_state_that_cannot_be_pickled_is_reported_at_the_first_save(tmp_path: Path) -> None:
    class Unpicklable(L.Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"f": lambda: None}

    model = TinyModel()
    with pytest.raises(SaveFailed, match="'callbacks'"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 1), Unpicklable(), model=model)
    assert len(model.history) == 1
    assert committed(tmp_path / "run") == []


def test_state_that_cannot_be_pickled_any_more_costs_a_save_and_not_the_run(tmp_path: Path) -> None:
    class Sometimes(L.Callback):
        step = 0

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            self.step = trainer.global_step + 1

        def state_dict(self) -> dict[str, Any]:
            return {"f": (lambda: None) if self.step == 4 else None}

    with pytest.warns(UserWarning, match="step 4 was dropped.*cannot be serialised"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 2), Sometimes())
    assert [m.step for m in committed(tmp_path / "run")] == [2, 6, 8]


class Lora(TinyModel):
    """Drops frozen weights from its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.strict_loading = False
        self.net[0].requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("net.0")}


def test_user_hook_that_drops_frozen_weights_reaches_the_files(tmp_path: Path) -> None:
    model = Lora()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model)
    content = (next((tmp_path / "run").glob("*.ckpt")) / "__0_0.distcp").read_bytes()
    assert model.net[0].weight.detach().numpy().tobytes() not in content
    assert model.net[3].weight.detach().numpy().tobytes() in content
    again = Lora()
    before = again.net[0].weight.detach().clone()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=again, ckpt_path="last")
    assert torch.equal(again.net[0].weight, before)
    assert torch.equal(again.net[3].weight, model.net[3].weight)


class Renamed(TinyModel):
    """Its checkpoints have other names, which its hook translates back."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {f"old.{k}": v for k, v in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k.removeprefix("old."): v for k, v in checkpoint["state_dict"].items()}


def test_user_hook_that_edits_the_loaded_state_dict_is_obeyed(tmp_path: Path) -> None:
    model, again = Renamed(), Renamed()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=again, ckpt_path="last")
    assert equal(model, again)


def test_weights_only_checkpoint_tests_but_does_not_resume(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8, save_weights_only=True))
    (manifest,) = committed(tmp_path / "run")
    assert WEIGHTS_ONLY in manifest.labels
    path = tmp_path / "run" / "epoch=0-step=8.ckpt"
    assert make_trainer(tmp_path, checkpoint_every(tmp_path / "b", 8)).validate(TinyModel(), data(8), ckpt_path=path)
    with pytest.raises(CheckpointIncompatible, match="weights only"):
        fit(tmp_path, checkpoint_every(tmp_path / "b", 8), ckpt_path=path)


def test_random_generators_continue_where_they_were(tmp_path: Path) -> None:
    class Draws(L.Callback):
        def __init__(self) -> None:
            self.drawn: dict[int, tuple[Any, ...]] = {}

        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            import random

            self.drawn[trainer.global_step] = (random.random(), np.random.rand(), torch.rand(()).item())

    whole, first, second = Draws(), Draws(), Draws()
    torch.manual_seed(3)
    fit(tmp_path, whole, max_steps=8)
    torch.manual_seed(3)
    fit(tmp_path, first, checkpoint_every(tmp_path / "run", 4), max_steps=4)
    torch.manual_seed(99)
    fit(tmp_path, second, checkpoint_every(tmp_path / "run", 4), max_steps=8, ckpt_path="last")
    torch_only = {step: draws[2] for step, draws in (first.drawn | second.drawn).items()}
    assert torch_only == {step: draws[2] for step, draws in whole.drawn.items()}
    assert min(second.drawn) == 4


# -- the plugin -------------------------------------------------------------------------------------------------------


def test_plugin_alone_gives_a_stock_callback_committed_folders(tmp_path: Path) -> None:
    stock = ModelCheckpoint(tmp_path / "run", every_n_train_steps=4, save_top_k=1, save_last=True)
    model = TinyModel()
    trainer = make_trainer(tmp_path, stock, plugins=[ResilientCheckpointIO()], max_epochs=1)
    trainer.fit(model, data())
    assert [m.step for m in committed(tmp_path / "run")] == [8, 8]
    again = TinyModel()
    trainer = make_trainer(tmp_path, ModelCheckpoint(tmp_path / "run"), plugins=[ResilientCheckpointIO()], max_epochs=2)
    trainer.fit(again, data(), ckpt_path=stock.best_model_path)
    assert again.history[0][0] == 8
    third = TinyModel()
    fit(tmp_path, checkpoint_every(tmp_path / "own", 4), model=third, ckpt_path=stock.best_model_path)
    assert equal(model, third)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"schedule": 5}, "5"),
        ({"schedule": EverySteps}, "EverySteps"),
        ({"schedule": EverySteps(5), "every_n_train_steps": 3}, "EverySteps\\(n=5\\)"),
        ({"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ({"every_n_epochs": 1.5}, "every_n_epochs=1.5"),
        ({"keep": 3}, "keep=3"),
        ({"memory": "/nowhere/at/all"}, "/nowhere/at/all"),
        ({"memory": True}, "memory=True"),
        ({"overlap_staging": "yes"}, "overlap_staging='yes'"),
        ({"on_save_error": "ignore"}, "on_save_error='ignore'"),
        ({"on_unrestorable": "fersh"}, "on_unrestorable='fersh'"),
        ({"max_failures": 0}, "max_failures=0"),
        ({"save_timeout": 0}, "save_timeout=0"),
        ({"save_top_k": -2}, "save_top_k=-2"),
        ({"save_top_k": 3}, "save_top_k=3"),
        ({"mode": "up"}, "mode='up'"),
        ({"dirpath": "nosuchfs://x"}, "nosuchfs"),
        ({"dirpath": __file__}, "is a file"),
    ],
)
def test_bad_argument_is_refused_at_construction_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        ResilientCheckpoint(**arguments)


def test_unknown_argument_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="evry_n_steps"):
        ResilientCheckpoint(evry_n_steps=5)  # type: ignore[call-arg]


def test_folder_below_a_file_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = TinyModel()
    with pytest.raises(TierUnavailable, match="file"):
        fit(tmp_path, checkpoint_every(tmp_path / "file" / "run", 2), model=model)
    assert model.history == []


def test_folder_that_may_not_be_written_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(self: Path, *args: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_bytes", denied)  # root may write everywhere, so it cannot be shown by a mode
    with pytest.raises(TierDenied, match="Permission denied"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 2))


def test_trainer_of_the_other_package_is_refused(tmp_path: Path) -> None:
    pytorch_lightning = pytest.importorskip("pytorch_lightning")
    callback = checkpoint_every(tmp_path / "run", 2)
    trainer = pytorch_lightning.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[callback], default_root_dir=tmp_path
    )
    with pytest.raises(SetupError, match=r"lightning\.pytorch\.Trainer"):
        callback.setup(trainer, TinyModel(), "fit")


def test_callback_with_checkpointing_switched_off_is_refused_by_lightning(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="enable_checkpointing=False"):
        make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 2), enable_checkpointing=False)


def test_callback_pickles_and_copies_before_and_after_a_fit(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(
        tmp_path / "run", schedule=FirstOf(EverySteps(4), EverySeconds(9)), monitor="val_loss"
    )
    assert pickle.loads(pickle.dumps(callback)).schedule == callback.schedule
    fit(tmp_path, callback, val=data(8))
    assert copy.deepcopy(callback).best_model_path == callback.best_model_path
    assert pickle.loads(pickle.dumps(callback)).last_model_path == callback.last_model_path


def test_nothing_warns_in_an_ordinary_run(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", module="lightning|torch", message=".*")
        fit(tmp_path, checkpoint_every(tmp_path / "run", 2))
        fit(tmp_path, checkpoint_every(tmp_path / "run", 2), ckpt_path="last", max_epochs=2)


# -- what models bring along ------------------------------------------------------------------------------------------


class Extra(nn.Module):
    """A module with a state that is no parameter."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value
        self.restored: Any = None

    def get_extra_state(self) -> Any:
        return self.value

    def set_extra_state(self, state: Any) -> None:
        self.restored = state


class WithExtra(TinyModel):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.extra = Extra(value)


class WithExtraAndHook(WithExtra):
    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert checkpoint["state_dict"]


@pytest.mark.parametrize("kind", [WithExtra, WithExtraAndHook])
@pytest.mark.parametrize(
    "value",
    [
        torch.ones(3),
        b"bytes",
        {"n": 3, "deep": {"t": torch.ones(2)}},
        [1, torch.ones(1)],
        7,
        {},
        {7: torch.ones(2), (1, 2): {}},
        {"t": torch.ones(1), "deep": {"empty": {}, "more": {True: 4, 1.5: torch.ones(1)}}, "list": [[], {}, [{}]]},
    ],
    ids=["tensor", "bytes", "dict", "list", "int", "empty", "other keys", "other keys below"],
)
def test_extra_state_of_any_kind_is_set_at_a_resume(tmp_path: Path, kind: type[WithExtra], value: Any) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=kind(value))
    model = kind(torch.zeros(5) if isinstance(value, Tensor) else value)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model, ckpt_path="last")
    assert str(model.extra.restored) == str(value)


class KeepsByNumber(torch.optim.SGD):
    """Has keys in its state that are not texts, also beside its own."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for place, parameter in enumerate(group["params"]):
                kept = self.state[parameter]
                if place % 2:
                    kept[0] = kept.get(0, torch.zeros(3)) + 1
                kept["sums"] = {1: kept.get("sums", {1: 0})[1] + 1}
                kept["none"] = {}
        return loss


def test_optimizer_state_with_other_keys_than_texts_comes_back_as_it_was(tmp_path: Path) -> None:
    class Model(TinyModel):
        def configure_optimizers(self) -> Any:
            return KeepsByNumber(self.parameters(), lr=0.01, momentum=0.9)

        def on_train_start(self) -> None:
            self.began = copy.deepcopy([*self.trainer.optimizers[0].state.values()])

        def on_train_end(self) -> None:
            self.ended = copy.deepcopy([*self.trainer.optimizers[0].state.values()])

    first, second = Model(), Model()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=first)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=second, ckpt_path="last", max_epochs=2)
    assert first.ended[1][0].tolist() == [8.0] * 3
    assert str(second.began) == str(first.ended)


class Doubled(nn.Linear):
    """Stores twice its weight, by hooks."""

    def __init__(self) -> None:
        super().__init__(8, 1)
        self._register_state_dict_hook(self._double)
        self.register_load_state_dict_pre_hook(self._halve)

    @staticmethod
    def _double(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    @staticmethod
    def _halve(module: nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] / 2


def test_hooks_that_transform_the_state_dict_run_both_ways(tmp_path: Path) -> None:
    class Hooked(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.doubled = Doubled()

    model, again = Hooked(), Hooked()
    nn.init.constant_(model.doubled.weight, 3.0)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=again, ckpt_path="last")
    assert torch.equal(again.doubled.weight, model.doubled.weight)


def test_lazy_parameters_get_their_shape_from_the_checkpoint(tmp_path: Path) -> None:
    class Lazy(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.lazy = nn.LazyLinear(1)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch, batch_idx) + self.lazy(batch[0]).mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    model, again = Lazy(), Lazy()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Lazy modules")
        fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model)
        fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=again, ckpt_path="last")
    assert torch.equal(again.lazy.weight, model.lazy.weight)


@pytest.mark.parametrize(("edit", "lr"), [("reset", 0.01), ("lower", 0.001)])
def test_hook_that_edits_optimizer_states_is_obeyed(tmp_path: Path, edit: str, lr: float) -> None:
    class Editing(TinyModel):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            if edit == "reset":
                checkpoint["optimizer_states"] = []
            else:
                checkpoint["optimizer_states"][0]["param_groups"][0]["lr"] = 0.001

        def on_train_start(self) -> None:
            self.found = (self.trainer.optimizers[0].param_groups[0]["lr"], len(self.trainer.optimizers[0].state))

    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=TinyModel())
    model = Editing()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model, ckpt_path="last", max_epochs=2)
    assert model.found == (lr, 0 if edit == "reset" else 6)


class NumberedNames(L.LightningModule):
    """Its parameters are called 1, 0 and 2, which are not their places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shapes = {"1": (8, 8), "0": (8, 8), "2": (8, 1)}
        for name, shape in self.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.began: dict[str, Any] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(batch[0] @ getattr(self, "0") @ getattr(self, "1") @ getattr(self, "2"), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def moments(self) -> dict[str, Tensor]:
        state = self.trainer.optimizers[0].state
        return {name: state[getattr(self, name)]["exp_avg"].clone() for name in self.shapes}

    def on_train_start(self) -> None:
        self.began = self.moments() if self.global_step else {}

    def on_train_end(self) -> None:
        self.ended = self.moments()


@pytest.mark.parametrize("saved", ["by name", "by number"])
def test_parameters_that_are_called_like_numbers_get_their_own_moments(tmp_path: Path, saved: str) -> None:
    first, second = NumberedNames(), NumberedNames()
    if saved == "by name":
        fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=first)
        path = "last"
    else:
        stock = ModelCheckpoint(tmp_path / "run", every_n_train_steps=8)
        fit(tmp_path, stock, model=first, plugins=[ResilientCheckpointIO()])
        path = stock.best_model_path
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=second, ckpt_path=path, max_epochs=2)
    assert second.began.keys() == first.ended.keys()
    assert all(torch.equal(value, first.ended[name]) for name, value in second.began.items())


class Halves(TinyModel):
    """Optimizes its first layer with one, and its last with the other; the layer between with which it is told to."""

    def __init__(self, names: tuple[str, ...] = ("01", "3"), frozen: str = "") -> None:
        super().__init__()
        self.automatic_optimization = False
        self.names = names
        self.states: list[int] = []
        for layer in frozen:
            self.net[int(layer)].requires_grad_(False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        self.zero_grad()
        self.manual_backward(loss)
        for optimizer in optimizers:
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam([p for layer in name for p in self.net[int(layer)].parameters()], lr=0.01)
            for name in self.names
        ]

    def on_train_start(self) -> None:
        self.states = [len(optimizer.state) for optimizer in self.trainer.optimizers]


def test_optimizers_in_another_order_are_refused(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=Halves())
    swapped = Halves(("3", "01"))
    with pytest.raises(CheckpointIncompatible, match=r"optimizer 0 has the state of net\.0\.bias.*optimizer 1 has now"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=swapped, ckpt_path="last", max_epochs=2)


def test_parameter_that_went_to_another_optimizer_is_warned_of(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=Halves())
    moved = Halves(("0", "31"))
    with pytest.warns(UserWarning, match=r"state of net\.1\.bias, net\.1\.weight, which optimizer 1 has now: they "):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=moved, ckpt_path="last", max_epochs=2)
    assert moved.states == [2, 2]


@pytest.mark.filterwarnings("ignore:.* are frozen now")
@pytest.mark.parametrize(("names", "frozen"), [(("0", "3"), ""), (("0", "31"), "1"), (("01", "3"), "01")])
def test_state_of_a_parameter_that_is_not_trained_any_more_is_not_spoken_of(
    tmp_path: Path, names: tuple[str, ...], frozen: str
) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=Halves())
    model = Halves(names, frozen)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model, ckpt_path="last", max_epochs=2)
    assert model.states == [4 if names[0] == "01" else 2, 2]


def test_model_without_an_optimizer_is_saved_and_resumed(tmp_path: Path) -> None:
    class Untrained(TinyModel):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> None:
            return None

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*configure_optimizers.*")
        fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=Untrained())
        assert committed(tmp_path / "run")
        fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=Untrained(), ckpt_path="last", max_epochs=2)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.ones(3), torch.ones(5)], layout=torch.jagged)


UNSAVEABLE: dict[str, Callable[[], Tensor]] = {
    "torch.sparse_coo": lambda: torch.eye(3).to_sparse(),
    "torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3), torch.ones(5)]),
    "jagged nested": jagged,
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    "meta": lambda: torch.empty(3, device="meta"),
    "TwoTensor without memory of its own": lambda: TwoTensor(torch.ones(3), torch.zeros(3)),
}


class Holds(TinyModel):
    """Has a tensor in a place of its state; from a step on, or all the time, up to one where it goes again."""

    def __init__(self, what: str, place: str, steps: tuple[int, int] = (0, 100)) -> None:
        super().__init__()
        self.what, self.place, self.steps = what, place, steps
        self.extra = Extra({})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == self.steps[0]:
            if self.place == "buffer":
                self.register_buffer("odd", UNSAVEABLE[self.what]())
            elif self.place == "extra state":
                self.extra.value = {"more": [UNSAVEABLE[self.what]()]}
        if self.global_step == self.steps[1]:
            del self.odd

    def on_train_batch_end(self, *_: Any) -> None:
        if self.place == "optimizer":
            self.trainer.optimizers[0].state[self.net[0].weight]["odd"] = UNSAVEABLE[self.what]()


@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state|deprecated):")
@pytest.mark.parametrize(
    ("what", "place"),
    # Lightning's own teardown cannot do with one on the meta device.
    [(what, "buffer") for what in UNSAVEABLE if what != "meta"]
    + [(what, place) for what in ("torch.sparse_coo", "jagged nested") for place in ("extra state", "optimizer")],
)
def test_tensor_that_cannot_be_saved_stops_at_the_first_save_and_is_named(
    tmp_path: Path, what: str, place: str
) -> None:
    model = Holds(what, place)
    with pytest.raises(SaveFailed, match=rf"(odd|more\.0) is a .*{what.split()[-1]}.*which cannot be saved"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 2), model=model)
    assert len(model.history) == 2


@pytest.mark.parametrize("precision", ["64-true", "bf16-true"])
def test_what_is_resumed_is_what_was_saved_whatever_the_precision(tmp_path: Path, precision: Any) -> None:
    """Lightning converts the module after it has loaded a checkpoint."""
    first, second, seen = TinyModel(), TinyModel(), {}
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=first, max_steps=4, precision=precision)

    def look() -> None:
        seen.update({name: value.clone() for name, value in second.state_dict().items()})

    second.on_train_start = look  # type: ignore[method-assign]
    fit(
        tmp_path,
        checkpoint_every(tmp_path / "run", 4),
        model=second,
        max_steps=6,
        precision=precision,
        ckpt_path="last",
    )
    assert all(torch.equal(value, seen[name]) for name, value in first.state_dict().items())
    assert {value.dtype for value in seen.values()} >= {torch.float64 if precision == "64-true" else torch.bfloat16}


class Forgetful(torch.utils.data.Dataset[Any]):
    """Its state cannot be told at some steps."""

    def __init__(self, fails: set[int]) -> None:
        self.inner = data().dataset
        self.fails = fails
        self.asked = 0

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]

    def state_dict(self) -> dict[str, Any]:
        self.asked += 1
        if self.asked in self.fails:
            raise OSError("the disk of the data is away")
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


def test_what_a_rank_cannot_tell_of_itself_costs_the_save_and_at_the_first_one_the_run(tmp_path: Path) -> None:
    loader = torch.utils.data.DataLoader(Forgetful({2}), batch_size=4)
    with pytest.warns(UserWarning, match="What rank 0 has for itself cannot be saved: OSError"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 2), train=loader)
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [2, 6, 8]
    loader = torch.utils.data.DataLoader(Forgetful({1}), batch_size=4)
    with pytest.raises(SaveFailed, match=r"the disk of the data is away.*Look at state_dict"):
        fit(tmp_path, checkpoint_every(tmp_path / "other", 2), train=loader)


@pytest.mark.filterwarnings("ignore:.*(prototype stage|beta state|deprecated):")
@pytest.mark.parametrize("what", ["torch.sparse_coo", "nested", "quantized", "meta"])
def test_tensor_that_cannot_be_saved_in_mid_run_costs_saves_and_not_the_run(tmp_path: Path, what: str) -> None:
    model = Holds(what, "buffer", (3, 6))
    with pytest.warns(UserWarning, match="step [456] was dropped.*odd is a .*which cannot be saved"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 1, keep=Keep(last=-1), max_failures=4), model=model)
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [1, 2, 3, 7, 8]


class Own(Tensor):
    """A kind of tensor that has memory of its own."""


def test_subclass_with_memory_of_its_own_is_saved_and_resumed(tmp_path: Path) -> None:
    class Model(TinyModel):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.register_buffer("one", torch.full((3,), value).as_subclass(Own))
            self.register_buffer("other", torch.full((3,), -value).as_subclass(Own))

    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=Model(2.0))
    again = Model(0.0)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=again, ckpt_path="last", max_epochs=2)
    assert [again.one.tolist(), again.other.tolist()] == [[2.0] * 3, [-2.0] * 3]


class Expanded(TinyModel):
    """Has buffers that are expanded views, of a value."""

    def __init__(self, value: float, expand: bool = True) -> None:
        super().__init__()
        self.register_buffer("rows", torch.full((1, 5), value).expand(4, 5))
        self.register_buffer("number", torch.tensor(value).expand(3) if expand else torch.arange(3.0))


class ExpandedWithExtra(Expanded):
    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.extra = Extra({"n": 1})


@pytest.mark.parametrize("kind", [Expanded, ExpandedWithExtra])
@pytest.mark.parametrize("value", [2.0, float("nan")])
def test_expanded_views_are_loaded(tmp_path: Path, kind: Any, value: float) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=kind(value))
    model = kind(0.0)
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=model, ckpt_path="last", max_epochs=2)
    assert torch.equal(model.rows, torch.full((4, 5), value)) or (value != value and model.rows.isnan().all())
    assert str(model.number.tolist()) == str([value] * 3)
    assert [model.rows.stride(), model.number.stride()] == [(0, 1), (0,)]


def test_expanded_view_of_several_values_is_refused(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=Expanded(1.0, expand=False))
    with pytest.raises(CheckpointIncompatible, match=r"number is an expanded view.*\.clone\(\)"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 8), model=Expanded(1.0), ckpt_path="last", max_epochs=2)


# -- beside what is there ---------------------------------------------------------------------------------------------


def test_file_of_a_stock_callback_in_the_same_folder_is_loaded_by_its_path(tmp_path: Path) -> None:
    stock = ModelCheckpoint(tmp_path / "run", every_n_train_steps=4)
    make_trainer(tmp_path, stock, max_steps=4, max_epochs=-1).fit(TinyModel(), data())
    model = TinyModel()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=model, ckpt_path=stock.best_model_path)
    assert model.history[0][0] == 4


@pytest.mark.parametrize("save_last", [True, False])
def test_run_of_a_stock_callback_in_the_same_folder_goes_on(tmp_path: Path, save_last: bool) -> None:
    stock = ModelCheckpoint(tmp_path / "run", every_n_train_steps=4, save_last=save_last)
    make_trainer(tmp_path, stock, max_steps=4, max_epochs=-1).fit(TinyModel(), data())
    model = TinyModel()
    with pytest.warns(UserWarning, match="of stock Lightning"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=model, ckpt_path="last")
    assert model.history[0][0] == 4


def test_checkpoint_saved_by_hand_in_the_folder_stays(tmp_path: Path) -> None:
    class Saver(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 1:
                trainer.save_checkpoint(tmp_path / "run" / "mine.ckpt")

    fit(tmp_path, Saver(), checkpoint_every(tmp_path / "run", 1, keep=Keep(last=1)))
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".ledger.jsonl",
        "epoch=0-step=8.ckpt",
        "mine.ckpt",
    ]


def test_save_that_another_process_is_at_is_not_swept(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path / "run")
    tier.begin("epoch=0-step=3.ckpt.partial-abc-1")
    with tier.hold("epoch=0-step=3.ckpt.partial-abc-1"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 4))
        assert tier.path("epoch=0-step=3.ckpt.partial-abc-1").is_dir()
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), ckpt_path="last")
    assert not tier.path("epoch=0-step=3.ckpt.partial-abc-1").exists()


def test_evaluation_changes_nothing_in_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4))
    LocalTier(tmp_path / "run").begin("epoch=9-step=9.ckpt.partial-abc-1")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(LocalTier, "check_writable", lambda self: pytest.fail("wrote to the folder"))
    trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 4))
    assert trainer.validate(TinyModel(), data(8), ckpt_path="last", verbose=False)
    assert sorted(tmp_path.rglob("*")) == before


def test_evaluation_of_last_without_a_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint"):
        make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 4)).validate(TinyModel(), data(8), ckpt_path="last")


def test_fast_dev_run_with_last_runs(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*there is no last checkpoint available")
        fit(tmp_path, checkpoint_every(tmp_path / "run", 1), fast_dev_run=True, ckpt_path="last")


def test_exception_of_the_user_is_seen_also_when_its_save_fails(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise ZeroDivisionError("the user's")

        def state_dict(self) -> dict[str, Any]:
            return {"f": lambda: None}

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, Fails(), ResilientCheckpoint(tmp_path / "run", save_on_exception=True))
    assert not _sessions


def test_other_optimizers_can_go_on_from_the_same_step(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4), max_steps=4)

    class Other(TinyModel):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 100)]

    model = Other()
    callback = checkpoint_every(tmp_path / "run", 4, restore_optimizers=False)
    trainer = fit(tmp_path, callback, model=model, max_steps=8, max_epochs=2, ckpt_path="last")
    assert [step for step, _ in model.history] == [4, 5, 6, 7]
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.5
    with pytest.raises(CheckpointIncompatible, match="parameter groups"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=Recurring(), max_epochs=3, ckpt_path="last")


class Recurring(TinyModel):
    """Configures two parameter groups, where there was one."""

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return torch.optim.SGD([{"params": [first]}, {"params": others}], lr=0.5)


def test_two_callbacks_both_save_where_optimization_is_manual(tmp_path: Path) -> None:
    class ByHand(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    both = [checkpoint_every(tmp_path / name, 2, keep=Keep(last=-1)) for name in ("a", "b")]
    fit(tmp_path, settle(), *both, model=ByHand(), max_steps=8)
    assert [[m.step for m in committed(tmp_path / name)] for name in ("a", "b")] == [[2, 4, 6, 8]] * 2
