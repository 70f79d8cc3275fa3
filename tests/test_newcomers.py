"""What people do in their first days: used folders, finished runs, typos, and what they are told."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_resilience import (
    AdaptiveSchedule,
    CheckpointIncompatible,
    Keep,
    ResilientCheckpoint,
    SetupError,
    run_state,
    slots,
)
from lightning_resilience.named_optimizers import _check_options
from lightning_resilience.schedule import Progress
from lightning_resilience.slots import is_in_memory
from lightning_resilience.trusted import load_trusted
from support import TinyModel, checkpoint_every, committed, data, make_trainer, settle


def fit(
    root: Path, *callbacks: L.Callback, model: Any = None, resume: Any = None, val: bool = False, **kwargs: Any
) -> L.Trainer:
    trainer = make_trainer(root, *callbacks, settle(), **kwargs)
    trainer.fit(model or TinyModel(), data(), data() if val else None, ckpt_path=resume)
    return trainer


def steps(folder: Path) -> list[int]:
    return [manifest.step for manifest in committed(folder)]


def test_a_run_that_starts_where_another_has_been_removes_nothing_of_it_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "run"
    fit(tmp_path, checkpoint_every(run, 2, keep=Keep(last=2)))
    before = set(run.glob("*.ckpt"))
    with caplog.at_level(logging.WARNING):
        second = checkpoint_every(run, 2, keep=Keep(last=1), filename="again-{step}")
        fit(tmp_path, second, max_steps=6)
    assert before <= set(run.glob("*.ckpt"))
    assert sorted(path.name for path in set(run.glob("*.ckpt")) - before) == ["again-step=6.ckpt"]
    assert Path(second.best_model_path).name == "again-step=6.ckpt"
    assert "checkpoints=2 newest_step=8" in caplog.text
    assert "ckpt_path='last'" in caplog.text


def test_scores_of_another_run_are_nothing_to_this_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(tmp_path, ResilientCheckpoint(run, monitor="val_loss", every_n_epochs=1), val=True, max_epochs=2)
    worse = TinyModel(lr=0.0)
    second = ResilientCheckpoint(run, monitor="val_loss", every_n_epochs=1, filename="again-{epoch}")
    fit(tmp_path, second, model=worse, val=True, max_epochs=1)
    assert Path(second.best_model_path).name == "again-epoch=0.ckpt"


@pytest.mark.parametrize("monitor", [None, "val_loss"])
def test_a_finished_run_that_is_started_again_knows_its_best(tmp_path: Path, monitor: str | None) -> None:
    for _ in range(2):
        callback = ResilientCheckpoint(tmp_path / "run", monitor=monitor, every_n_epochs=1)
        model = TinyModel()
        trainer = fit(tmp_path, callback, model=model, val=True, resume="last")
    assert model.history == []
    assert callback.best_model_path
    assert callback.last_model_path
    assert (callback.best_model_score is None) == (monitor is None)
    model.test_step = lambda *_: None  # type: ignore[method-assign]
    trainer.test(model, data(), ckpt_path="best", verbose=False)


def test_a_metric_that_nobody_logs_ends_the_run_at_its_first_validation(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(tmp_path / "run", monitor="val_los")
    with pytest.raises(SetupError, match=r"monitor='val_los'.*there are \['val_loss'\].*self\.log"):
        fit(tmp_path, callback, val=True)
    with pytest.warns(UserWarning, match="monitor='val_loss': no such metric is logged"):
        fit(tmp_path, ResilientCheckpoint(tmp_path / "run", monitor="val_loss"))
    fit(tmp_path, ResilientCheckpoint(tmp_path / "run", monitor="val_los", save_top_k=0), val=True)


def test_a_variable_that_is_not_set_is_no_name_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOBODY_SET_THIS", raising=False)
    for path in ("$NOBODY_SET_THIS/ckpt", "${NOBODY_SET_THIS}/ckpt"):
        with pytest.raises(SetupError, match="NOBODY_SET_THIS is not set"):
            fit(tmp_path, ResilientCheckpoint(path))
    assert not list(tmp_path.glob("*NOBODY*"))


def test_what_a_stock_callback_saves_beside_ours_takes_no_place_of_ours(tmp_path: Path, caplog: Any) -> None:
    run = tmp_path / "run"
    stock = ModelCheckpoint(run, every_n_train_steps=4, save_top_k=-1, filename="stock-{step}")
    with caplog.at_level(logging.INFO, "lightning_resilience"):
        fit(tmp_path, stock, checkpoint_every(run, 3, keep=Keep(last=2)))
    assert steps(run) == [4, 6, 8, 8]
    told = [line for line in caplog.messages if line.startswith("event=save ")]
    assert len([line for line in told if "name=stock-step=4.ckpt" in line]) == 1


def test_a_file_in_the_place_of_the_link_is_told_of_once_with_what_to_do(tmp_path: Path, caplog: Any) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "last.ckpt").write_bytes(b"of another tool")
    with caplog.at_level(logging.WARNING, "lightning_resilience"):
        fit(tmp_path, checkpoint_every(run, 2, save_last=True))
    assert [line for line in caplog.messages if "event=link" in line and "move it away" in line] == [
        line for line in caplog.messages if "event=link" in line
    ]
    assert sum("event=link" in line for line in caplog.messages) == 1
    assert (run / "last.ckpt").read_bytes() == b"of another tool"


def test_weights_alone_are_not_called_damaged(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4, save_weights_only=True))
    with pytest.raises(CheckpointIncompatible, match=r"it holds weights only.*give its path.*start over"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 4, save_weights_only=True), resume="last", max_epochs=2)
    trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 4))
    with pytest.raises(CheckpointIncompatible, match=r"give its path\.$"):
        trainer.validate(TinyModel(), data(), ckpt_path="last", verbose=False)


class WithSGD(TinyModel):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_an_optimizer_of_another_kind_is_told_of_with_the_way_on(tmp_path: Path) -> None:
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4))
    with pytest.raises(CheckpointIncompatible, match=r"SGD.*momentum.*restore_optimizers=False"):
        fit(tmp_path, checkpoint_every(tmp_path / "run", 4), model=WithSGD(), resume="last", max_epochs=2)
    saver = checkpoint_every(tmp_path / "run", 4, restore_optimizers=False)
    assert fit(tmp_path, saver, model=WithSGD(), resume="last", max_epochs=2).global_step == 16


def test_options_that_an_optimizer_did_not_have_yet_get_their_defaults() -> None:
    model = TinyModel()
    optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        del group["foreach"], group["maximize"]
        group["initial_lr"] = 0.2
    _check_options(optimizer, 0)
    assert optimizer.param_groups[0]["maximize"] is False
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    del optimizer.param_groups[0]["maximize"]
    with pytest.raises(CheckpointIncompatible, match="maximize"):
        _check_options(optimizer, 0)


def test_each_start_says_what_it_goes_by_and_what_it_has_loaded(tmp_path: Path, caplog: Any) -> None:
    run = tmp_path / "run"
    stock = ModelCheckpoint(tmp_path / "stock", every_n_train_steps=4)
    fit(tmp_path, stock, max_steps=4, max_epochs=-1)
    caplog.set_level(logging.INFO, "lightning_resilience")
    fit(tmp_path, checkpoint_every(run, 2), resume=stock.best_model_path)
    assert f"event=resume from={stock.best_model_path} note='a checkpoint of stock Lightning'" in caplog.messages
    caplog.clear()
    fit(tmp_path, checkpoint_every(run, 2), resume=str(run / "epoch=0-step=8.ckpt"), max_epochs=2)
    assert any(line.startswith("event=resume step=8 from=") for line in caplog.messages)
    began = next(line for line in caplog.messages if line.startswith("event=fit step=8"))
    assert f"dirpath={run} schedule=EverySteps(" in began
    assert "keep=Keep(last=3" in began


def test_a_wrong_name_of_the_loss_is_told_of(tmp_path: Path) -> None:
    saver = ResilientCheckpoint(tmp_path / "run", loss_key="los")
    with pytest.warns(UserWarning, match="loss_key='los': training_step has returned nothing of that name"):
        fit(tmp_path, saver, max_epochs=14)


def test_arguments_of_a_wrong_kind_are_refused_or_warned_of(
    tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SetupError, match="train_time_interval=5"):
        ResilientCheckpoint(tmp_path, train_time_interval=5)  # type: ignore[arg-type]
    monkeypatch.setattr(slots, "is_in_memory", lambda folder: folder == Path("/dev/shm"))
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4))
    assert "not on tmpfs" not in caplog.text
    fit(tmp_path, checkpoint_every(tmp_path / "run", 4, memory=str(tmp_path)))
    assert caplog.text.count("not on tmpfs") == 1


def test_the_first_save_of_a_run_that_never_saved_comes_soon() -> None:
    decider = AdaptiveSchedule().decider()
    assert decider.decide(Progress(5, 29.0), Progress(0, 0.0)) is None
    assert decider.decide(Progress(6, 30.1), Progress(0, 0.0)) is not None
    decider.see_start()
    assert decider.decide(Progress(8, 62.0), Progress(6, 30.1)) is None  # it may fail: no more than the interval
    decider.see_save(0.5, 2.0)
    assert decider.decide(Progress(9, 65.0), Progress(6, 30.1)) is None  # what it costs is known now


def test_tmpfs_is_told_from_a_disk() -> None:
    assert is_in_memory(Path("/dev/shm"))
    assert not is_in_memory(Path("/proc"))


@pytest.mark.parametrize("kind", ["MT19937", "PCG64", "Philox", "SFC64"])
def test_the_generator_of_numpy_goes_on_whichever_it_is(kind: str) -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, kind)(5))
        np.random.standard_normal(3)
        saved = run_state.to_bytes(run_state.capture())
        wanted = np.random.random(4)
        run_state.restore(load_trusted(saved, weights_only=True))
        assert (np.random.random(4) == wanted).all()
    finally:
        np.random.set_bit_generator(before)
