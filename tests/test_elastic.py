"""A run goes on under another strategy and another number of ranks, with every parameter and moment bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from support import TinyModel, checkpoint_every, data, make_trainer, strategy
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor

from lightning_resilience.reader import canonical
from lightning_resilience.strategies import family_of


class Recorder(TinyModel):
    """Remembers the state it starts training with and the state it ends with, whole, by parameter name."""

    def on_train_start(self) -> None:
        self.first = whole_state(self)

    def on_train_end(self) -> None:
        self.final = whole_state(self)


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


def train(folder: Path, name: str, world_size: int, steps: int, resume: bool) -> dict[str, Any]:
    torch.manual_seed(5)
    model = Recorder()
    trainer = make_trainer(
        folder,
        checkpoint_every(folder / "run", 100),
        strategy=strategy(name, world_size),
        devices=world_size,
        max_steps=steps,
        max_epochs=-1,
    )
    trainer.fit(model, data(64), ckpt_path="last" if resume else None)
    return {"first": model.first, "final": model.final, "step": trainer.global_step}


HOPS = [
    (("single", 1), ("ddp", 2)),
    (("single", 1), ("fsdp2", 2)),
    (("single", 1), ("fsdp", 2)),
    (("ddp", 2), ("single", 1)),
    (("ddp", 2), ("fsdp2", 2)),
    (("ddp", 2), ("fsdp", 2)),
    (("fsdp2", 2), ("single", 1)),
    (("fsdp2", 2), ("fsdp2", 1)),
    (("fsdp2", 1), ("fsdp2", 2)),
    (("fsdp2", 2), ("ddp", 2)),
    (("fsdp2", 2), ("fsdp", 2)),
    (("fsdp2", 2), ("fsdp2", 3)),
    (("fsdp", 2), ("single", 1)),
    (("fsdp", 2), ("ddp", 2)),
    (("fsdp", 2), ("fsdp2", 2)),
    (("fsdp", 2), ("fsdp", 2)),
    (("ddp", 2), ("ddp", 3)),
]


@pytest.mark.ranks
@pytest.mark.parametrize(("before", "after"), HOPS, ids=lambda hop: f"{hop[0]}{hop[1]}")
def test_state_is_bit_equal_after_a_change_of_strategy_and_ranks(
    tmp_path: Path, before: tuple[str, int], after: tuple[str, int]
) -> None:
    saved = run_ranks(train, tmp_path, *before, 3, False, world_size=before[1])[0]
    resumed = run_ranks(train, tmp_path, *after, 5, True, world_size=after[1])
    for result in resumed:
        assert result["step"] == 5
        assert result["first"].keys() == saved["final"].keys()
        for name, value in saved["final"].items():
            if "running" not in name:  # batch-norm statistics: rank 0's are the ones that count
                assert torch.equal(result["first"][name], value), name
    assert any("exp_avg" in name for name in saved["final"])
