"""Stock tools read our folders without this package, and ours reads what stock Lightning wrote."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from forks import run_forks as run_ranks
from support import CPUFSDPStrategy, TinyModel, checkpoint_every, data, make_trainer, strategy
from test_elastic import Recorder, whole_state


def saved_by_ours(folder: Path) -> tuple[TinyModel, Path]:
    model = TinyModel()
    make_trainer(folder, checkpoint_every(folder / "run", 100)).fit(model, data())
    return model, next((folder / "run").glob("*.ckpt"))


def test_dcp_load_reads_our_folder(tmp_path: Path) -> None:
    model, path = saved_by_ours(tmp_path)
    state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, checkpoint_id=path)
    assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())


def test_dcp_to_torch_save_reads_our_folder_whatever_its_parents_are_called(tmp_path: Path) -> None:
    model, path = saved_by_ours(tmp_path / "optimizer_x" / "step=3")
    dcp_to_torch_save(path, tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert all(torch.equal(whole["model"][name], value) for name, value in model.state_dict().items())
    assert whole["optimizer_0"]["state"]["net.0.weight"]["step"] == 8
    assert whole["optimizer_0"]["param_groups"][0]["lr"] == 0.01


def test_lightning_consolidates_our_folder_into_a_file_it_can_load(tmp_path: Path) -> None:
    model, path = saved_by_ours(tmp_path)
    file = tmp_path / "whole.ckpt"
    command = [sys.executable, "-m", "lightning.pytorch.utilities.consolidate_checkpoint", str(path)]
    subprocess.run([*command, "--output_file", str(file)], check=True, capture_output=True, timeout=120)
    loaded = TinyModel.load_from_checkpoint(file)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in model.state_dict().items())


def sharded(name: str, world: int) -> Any:
    """``strategy``, with what stock FSDP needs to save on a CPU: its full state dict crashes there."""
    if name == "fsdp":
        return CPUFSDPStrategy(process_group_backend="gloo", state_dict_type="sharded", use_orig_params=True)
    return strategy(name, world)


def train_then_resume(folder: Path, name: str, ours_first: bool, single_file: bool = False) -> bool:
    """Train with one side, resume with the other; whether it begins with every parameter and moment of the first."""
    torch.manual_seed(5)
    world = 1 if name == "single" else 2
    target = folder / f"{name}-{ours_first}-{single_file}"
    path = target / "mine.ckpt"

    def trainer(ours: bool, steps: int) -> L.Trainer:
        callbacks = [checkpoint_every(target / "run", 100)] if ours else []
        return make_trainer(
            target,
            *callbacks,
            enable_checkpointing=ours,
            strategy=sharded(name, world),
            devices=world,
            max_steps=steps,
            max_epochs=-1,
        )

    first = Recorder()
    before = trainer(ours_first, 3)

    class Save(L.Callback):
        def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
            trainer.save_checkpoint(path)

    before.callbacks.insert(0, Save())
    before.fit(first, data(64))
    assert path.is_dir() == (ours_first or name in ("fsdp", "fsdp2"))
    second = Recorder()
    trainer(not ours_first, 5).fit(second, data(64), ckpt_path=path)
    same = {key: torch.equal(second.first[key], value) for key, value in first.final.items() if "running" not in key}
    assert second.trainer.global_step == 5
    assert all(same.values()), [key for key, equal in same.items() if not equal]
    assert any("exp_avg" in key for key in same)
    return True


def both_ways(folder: Path, names: list[str]) -> None:
    for name in names:
        for ours_first in (True, False) if name in ("fsdp", "fsdp2") else (False,):
            train_then_resume(folder, name, ours_first)


@pytest.mark.ranks
def test_lightnings_own_loading_resumes_from_our_folder_and_ours_from_its(tmp_path: Path) -> None:
    run_ranks(both_ways, tmp_path, ["fsdp", "fsdp2", "ddp"], timeout=150)


def test_single_file_of_stock_lightning_resumes(tmp_path: Path) -> None:
    assert train_then_resume(tmp_path, "single", ours_first=False)


def from_stock_file(folder: Path, names: list[str]) -> None:
    """Resume every strategy from a stock single file and from stock sharded folders of other strategies."""
    for name in names:
        model = Recorder()
        make_trainer(
            folder,
            checkpoint_every(folder / f"from-file-{name}", 100),
            strategy=strategy(name, 2),
            devices=2,
            max_steps=5,
            max_epochs=-1,
        ).fit(model, data(64), ckpt_path=folder / "stock.ckpt")
        expected = torch.load(folder / "expected.pt")
        assert all(torch.equal(model.first[key], value) for key, value in expected.items() if "running" not in key)


@pytest.mark.ranks
def test_single_file_of_stock_lightning_resumes_on_sharded_strategies(tmp_path: Path) -> None:
    model = Recorder()
    stock = make_trainer(tmp_path, max_steps=3, max_epochs=-1, enable_checkpointing=False)
    stock.fit(model, data(64))
    stock.save_checkpoint(tmp_path / "stock.ckpt")
    torch.save(whole_state(model), tmp_path / "expected.pt")
    run_ranks(from_stock_file, tmp_path, ["ddp", "fsdp2", "fsdp"], timeout=150)
