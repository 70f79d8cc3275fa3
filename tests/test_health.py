"""What is not sound is kept for people to look at, and never resumed from, never the best, never "last"."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from forks import run_forks
from lightning_resilience import EverySteps, Keep, ResilientCheckpoint
from lightning_resilience.health import PIECE, PIECES, first_not_finite
from support import TinyModel, checkpoint_every, committed, data, make_trainer, settle, strategy

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64]
)
def test_a_nan_anywhere_is_found_by_name(dtype: torch.dtype) -> None:
    def tensors() -> dict[str, torch.Tensor]:
        return {"a": torch.ones(3).to(dtype), "b": torch.ones(4, 5).to(dtype), "empty": torch.ones(0).to(dtype)}

    assert first_not_finite(tensors().items()) is None
    for place in range(20):
        broken = tensors()
        broken["b"].view(-1)[place] = NAN
        assert first_not_finite(broken.items()) == "b"


def test_infinities_count_and_large_numbers_do_not() -> None:
    large = {"fp16": torch.full((5000,), 60000.0, dtype=torch.float16), "fp32": torch.full((5000,), 3e38)}
    assert first_not_finite(large.items()) is None
    assert first_not_finite([("w", torch.tensor([1.0, -INF]))]) == "w"
    assert first_not_finite([("n", torch.tensor([1, 2]))]) is None


def test_every_piece_of_many_is_looked_at() -> None:
    large = torch.zeros(PIECE * 3 + 5)
    many = [(f"w{number}", torch.zeros(2)) for number in range(PIECES + 3)]
    assert first_not_finite([("large", large), *many]) is None
    large[-1] = NAN
    assert first_not_finite([*many, ("large", large)]) == "large"
    many[-1][1][1] = INF
    assert first_not_finite(many) == many[-1][0]


class Spoils(L.Callback):
    """Makes parameters not finite at a step, as a gradient that is not finite does, on one rank."""

    def __init__(self, step: int, name: str = "net.0.weight", value: float = NAN) -> None:
        self.step, self.name, self.value = step, name, value

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step == self.step and trainer.global_rank == trainer.world_size - 1:
            value = pl_module.state_dict()[self.name]
            local = value.to_local() if hasattr(value, "to_local") else value
            local.view(-1)[-1:].fill_(self.value)


def test_run_goes_on_from_the_newest_that_is_sound(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = checkpoint_every(tmp_path / "run", 2, save_last=True)
    trainer = make_trainer(tmp_path, Spoils(5), callback, settle(), max_steps=8, max_epochs=-1)
    trainer.fit(TinyModel(), data(64))
    found = {manifest.step: manifest for manifest in committed(tmp_path / "run")}
    assert {step: manifest.health for step, manifest in found.items()} == {
        4: "healthy", 6: "suspect", 8: "suspect"
    }  # fmt: skip
    assert found[8].extra["suspicion"] == "the loss is nan; model.net.0.weight is not finite"
    assert "it is kept, and not resumed from" in caplog.text
    assert os.readlink(tmp_path / "run" / "last.ckpt").endswith("step=4.ckpt")
    assert callback.last_model_path.endswith("step=4.ckpt")
    model = TinyModel()
    again = checkpoint_every(tmp_path / "run", 2, save_last=True)
    make_trainer(tmp_path, again, settle(), max_steps=8, max_epochs=-1).fit(model, data(64), ckpt_path="last")
    assert model.history[0][0] == 4
    newest = os.readlink(tmp_path / "run" / "last.ckpt")
    found = {manifest.step: manifest for manifest in committed(tmp_path / "run")}
    assert found[8].health == "healthy"  # the suspect ones have gone: there are newer healthy ones
    assert newest.endswith("step=8.ckpt")


def test_what_may_be_infinite_is_no_cause_for_suspicion(tmp_path: Path) -> None:
    class Masked(TinyModel):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.full((4,), -INF))
            self.frozen = torch.nn.Parameter(torch.full((4,), INF), requires_grad=False)

    trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 2), settle(), max_steps=4, max_epochs=-1)
    trainer.fit(Masked(), data(64))
    assert {manifest.health for manifest in committed(tmp_path / "run")} == {"healthy"}


def on_ranks(root: Path, name: str) -> None:
    ranks = int(os.environ["WORLD_SIZE"])
    callback = ResilientCheckpoint(root / "run", schedule=EverySteps(2), keep=Keep(last=-1))
    trainer = make_trainer(
        root, Spoils(4, "net.0.bias"), callback, settle(), strategy=strategy(name, ranks), devices=ranks, max_steps=4,
        max_epochs=-1,
    )  # fmt: skip
    trainer.fit(TinyModel(), data(64))


@pytest.mark.ranks
@pytest.mark.parametrize("name", ["fsdp2"])
def test_one_rank_that_is_not_sound_is_enough(tmp_path: Path, name: str) -> None:
    run_forks(on_ranks, tmp_path, name, world_size=2)
    found = {manifest.step: manifest.health for manifest in committed(tmp_path / "run")}
    assert found == {2: "healthy", 4: "suspect"}
