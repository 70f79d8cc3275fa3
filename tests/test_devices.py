"""Devices beside the host: what is left alone there, and what belongs on which of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from lightning_resilience import run_state
from lightning_resilience.filling import fill_and_digest
from lightning_resilience.losses import LossStream
from lightning_resilience.manifest import digest
from lightning_resilience.named_optimizers import steps_to_host
from lightning_resilience.ranks import Ranks
from lightning_resilience.shards import Skeleton
from processes import run_alone
from support import TinyModel, checkpoint_every, data, make_trainer, settle
from test_reader import span_at


def test_cuda_is_left_alone_where_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loader workers that are forked once it is in use cannot use it."""

    def begin() -> Any:
        raise AssertionError("CUDA is in use now")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", begin)
    assert run_state.capture()["cuda"] is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(AssertionError, match="in use"):
        run_state.capture()


def test_a_default_device_has_no_say_in_what_is_for_the_host(tmp_path: Path) -> None:
    file, content = tmp_path / "file", bytes(range(64))
    file.write_bytes(content)
    target = torch.zeros(16, dtype=torch.uint8)
    known, ranks = Skeleton.of(torch.float32, (3,)), Ranks(0, 1)
    with torch.device("meta"):
        assert Skeleton.of(torch.float32, (3,)) == known
        assert fill_and_digest(file, [span_at(8, target)]) == digest(content)
        assert ranks.start_max(3).result() == [3]
    ranks.close()
    assert bytes(target.tolist()) == content[8:24]


class Stop(Exception):
    pass


class RateIsATensor(TinyModel):
    """Its optimizer has its learning rate on a device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device_of_rate = device

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(0.01), foreach=False)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.01, device=self.device_of_rate)
        return optimizer

    def on_train_start(self) -> None:
        if self.device_of_rate == "meta":
            raise Stop(self.trainer.optimizers[0].param_groups[0]["lr"].device)


def test_a_learning_rate_that_is_a_tensor_stays_on_its_device(tmp_path: Path) -> None:
    make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 4), settle()).fit(RateIsATensor("cpu"), data())
    again = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 4), max_epochs=2)
    with pytest.raises(Stop, match="meta"):
        again.fit(RateIsATensor("meta"), data(), ckpt_path="last")


def test_step_counters_that_were_read_to_a_device_are_brought_to_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device, moment, on_host = torch.empty((), device="meta"), torch.ones(2), torch.tensor(7.0)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: on_host if tensor is on_device else tensor)
    state: dict[str, Any] = {"state": {0: {"step": on_device, "exp_avg": moment}, 1: {"step": 3}, "own": 5}}
    steps_to_host(state)
    assert state["state"] == {0: {"step": on_host, "exp_avg": moment}, 1: {"step": 3}, "own": 5}


def put_losses_of_a_mesh() -> tuple[list[bool], list[tuple[float, int]], set[type]]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh, stream = init_device_mesh("cpu", (1,)), LossStream()
    value = torch.tensor(2.5, requires_grad=True)
    kinds = [stream.put({"loss": DTensor.from_local(value, mesh, [place])}, 3) for place in (Replicate(), Partial())]
    types = {type(loss) for loss, _ in stream._here}
    return kinds, stream.take_all(), types


@pytest.mark.ranks
def test_a_loss_of_all_ranks_is_this_ranks_part_where_that_is_all_of_it() -> None:
    """A parallel loss is one: torch copies none into memory of the host, and ranks do not meet for it."""
    seen, losses, types = run_alone(put_losses_of_a_mesh, timeout=60)
    assert seen == [True, False]
    assert losses == [(2.5, 3)]
    assert types == {torch.Tensor}
