"""A run goes on under another strategy and another number of ranks, with every parameter and moment bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from forks import run_forks as run_ranks
from lightning_resilience import CheckpointIncompatible
from lightning_resilience.names import canonical
from lightning_resilience.strategies import family_of
from support import FEATURES, TinyModel, checkpoint_every, committed, data, make_trainer, strategy


class Recorder(TinyModel):
    """Remembers the state it starts training with and the state it ends with, whole, by parameter name."""

    def on_train_start(self) -> None:
        self.first = whole_state(self)

    def on_train_end(self) -> None:
        self.final = whole_state(self)


class Tied(nn.Module):
    """Input and output share a matrix; what is between them is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, FEATURES)
        self.frozen = nn.Linear(FEATURES, FEATURES).requires_grad_(False)
        self.head = nn.Linear(FEATURES, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.embed(tokens).mean(1)))


class Odd(Recorder):
    """Has what real models have: tied, frozen and never used parameters."""

    def __init__(self) -> None:
        super().__init__(width=3000)
        self.tied = Tied()
        self.unused = nn.Linear(FEATURES, 2)

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        tokens = (batch[0].abs() * 5).long() % 12
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        return loss + nn.functional.cross_entropy(self.tied(tokens), tokens[:, 0])


def whole_state(module: Any) -> dict[str, torch.Tensor]:
    """Parameters, buffers and optimizer state, gathered."""
    family = family_of(module.trainer.strategy)
    state = dict(family.model_state())
    for name, values in family.optimizer_state(module.trainer.optimizers[0])["state"].items():
        state |= {f"{name}/{key}": value for key, value in values.items()}
    return {canonical(name): whole(value).detach().clone() for name, value in state.items()}


def whole(value: Any) -> torch.Tensor:
    """A sharded tensor, put together from the ranks' parts."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    mine = [(shard.metadata.shard_offsets, shard.tensor) for shard in value.local_shards()]
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, mine)
    result = torch.empty(value.size())
    for offsets, tensor in (shard for part in parts for shard in part):
        result[tuple(slice(start, start + size) for start, size in zip(offsets, tensor.shape, strict=True))] = tensor
    return result


def train(folder: Path, name: str, world_size: int, steps: int, ckpt_path: Path | None = None) -> Odd:
    torch.manual_seed(5)
    model = Odd()
    trainer = make_trainer(
        folder,
        checkpoint_every(folder, 100),
        strategy=strategy(name, world_size),
        devices=world_size,
        max_steps=steps,
        max_epochs=-1,
    )
    trainer.fit(model, data(64), ckpt_path=ckpt_path)
    return model


def save_all(root: Path, names: list[str], world_size: int) -> None:
    for name in names:
        folder = root / f"{name}-{world_size}"
        model = train(folder, name, world_size, 3)
        if model.global_rank == 0:
            torch.save(model.final, folder / "expected.pt")


def resume_all(root: Path, sources: list[str], names: list[str], world_size: int) -> list[str]:
    """Resume each source on each strategy; what differs."""
    wrong = []
    for source in sources:
        expected = torch.load(root / source / "expected.pt")
        checkpoint = next((root / source).glob("*.ckpt"))
        for name in names:
            model = train(root / f"{source}-to-{name}-{world_size}", name, world_size, 5, checkpoint)
            assert model.trainer.global_step == 5
            assert any("exp_avg" in key for key in expected)
            assert model.tied.head.weight is model.tied.embed.weight or name == "fsdp"
            for key in expected.keys() | model.first.keys():
                if "running" in key:  # of batch-norm statistics rank 0's are the ones that count
                    continue
                if name == "fsdp" and key not in expected:  # FSDP1 has zeros where others have no state
                    assert not model.first[key].any()
                elif not same(model.first.get(key), expected.get(key)):
                    wrong.append(f"{source} to {name} on {world_size}: {key}")
    return wrong


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is not None and other is not None and one.dtype == other.dtype and torch.equal(one, other)


def shard_bytes(folder: Path) -> list[int]:
    return [path.stat().st_size for path in sorted(next(folder.glob("*.ckpt")).glob("__*_0.distcp"))]


@pytest.mark.ranks
def test_every_parameter_and_moment_is_the_same_on_any_strategy_and_number_of_ranks(tmp_path: Path) -> None:
    run_ranks(save_all, tmp_path, ["single", "fsdp2"], 1, world_size=1)
    run_ranks(save_all, tmp_path, ["ddp", "fsdp", "fsdp2"], 2, world_size=2)
    for folder in ("ddp-2", "fsdp-2", "fsdp2-2"):
        first, second = shard_bytes(tmp_path / folder)
        assert 0.6 < first / second < 1.6  # nobody writes everything
    sources = ["single-1", "fsdp2-1", "ddp-2", "fsdp-2", "fsdp2-2"]
    for world_size, names in ((1, ["single", "fsdp2"]), (2, ["ddp", "fsdp", "fsdp2"]), (3, ["ddp", "fsdp2"])):
        results = run_ranks(resume_all, tmp_path, sources, names, world_size, world_size=world_size, timeout=180)
        assert results == [[]] * world_size


def save_under_one_name(folder: Path, name: str, world_size: int, weights_only: bool) -> None:
    trainer = make_trainer(
        folder,
        checkpoint_every(folder / "run", 100),
        Forced(folder / "forced.ckpt", weights_only),
        strategy=strategy(name, world_size),
        devices=world_size,
        max_steps=2,
        max_epochs=-1,
    )
    trainer.fit(TinyModel(), data(64))


class Forced(L.Callback):
    """Saves under a given name at the end."""

    def __init__(self, path: Path, weights_only: bool) -> None:
        self.path, self.weights_only = path, weights_only

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        trainer.save_checkpoint(self.path, weights_only=self.weights_only)


@pytest.mark.ranks
def test_save_by_fewer_ranks_under_the_same_name_leaves_nothing_of_the_older_one(tmp_path: Path) -> None:
    run_ranks(save_under_one_name, tmp_path, "fsdp2", 2, False, world_size=2)
    assert {"__0_0.distcp", "__1_0.distcp"} <= {path.name for path in (tmp_path / "forced.ckpt").iterdir()}
    run_ranks(save_under_one_name, tmp_path, "single", 1, False, world_size=1)
    (manifest,) = committed(tmp_path)
    on_disk = {path.name for path in (tmp_path / "forced.ckpt").iterdir()}
    assert on_disk == {entry.path for entry in manifest} | {"manifest.json"}
    assert "__1_0.distcp" not in on_disk


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp"])
def test_weights_only_checkpoint_of_several_ranks_is_refused_by_fit_with_what_to_do(tmp_path: Path, name: str) -> None:
    run_ranks(save_under_one_name, tmp_path, name, 2, True, world_size=2)
    (manifest,) = committed(tmp_path)
    assert manifest.labels == ("weights-only", "pinned")
    model = TinyModel()
    trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "other", 100))
    with pytest.raises(CheckpointIncompatible, match="weights only"):
        trainer.fit(model, data(), ckpt_path=tmp_path / "forced.ckpt")
    assert trainer.validate(model, data(8), ckpt_path=tmp_path / "forced.ckpt", verbose=False)
