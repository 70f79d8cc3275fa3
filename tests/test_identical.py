"""With DDP each rank writes a part of what all hold alike, and of nothing else: what ranks change each for itself is in
a checkpoint as rank 0 has it."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from forks import run_forks
from lightning_resilience import Keep
from lightning_resilience.flat import FlatState
from lightning_resilience.reader import CheckpointReader
from lightning_resilience.strategies import PlainFamily
from support import FEATURES, TinyModel, checkpoint_every, committed, data, make_trainer, settle, strategy

LARGE = (2000, 16)


def frozen() -> nn.Parameter:
    return nn.Parameter(torch.zeros(LARGE), requires_grad=False)


class Own(TinyModel):
    """Has parameters that DDP does not keep equal beside those that it does."""

    def __init__(self) -> None:
        super().__init__(width=1000)
        self.base = frozen()
        """As LoRA's: nobody changes it."""
        self.codes = frozen()
        """As a codebook: each rank changes it from its own data."""
        self.late = frozen()
        """Changed by rank 1 alone, from step 5 on."""
        self.thawed = frozen()
        """Trained from step 5 on, which DDP knows nothing of."""
        self.local = nn.Linear(FEATURES, 2000)
        """DDP is told to ignore it."""
        self._ddp_params_and_buffers_to_ignore = ["local.weight", "local.bias"]
        self.at: dict[int, Any] = {}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.codes.add_(batch[0].sum())
        if self.global_step == 5:
            self.thawed.requires_grad_(True)
            if self.global_rank == 1:
                self.late.add_(1)
        return (
            super().training_step(batch, batch_idx)
            + self.local(batch[0] * (1 + self.global_rank)).mean()
            + (batch[0].sum() * self.thawed.sum())
        )

    def on_train_batch_end(self, *_: Any) -> None:
        [optimizer] = self.trainer.optimizers
        state = {name: value.clone() for name, value in self.state_dict().items()}
        moments = {name: optimizer.state.get(value, {}).get("exp_avg") for name, value in self.named_parameters()}
        self.at[self.global_step] = state, {n: m.clone() for n, m in moments.items() if m is not None}

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def train(folder: Path) -> Any:
    torch.manual_seed(0)
    model = Own()
    saver = checkpoint_every(folder / "run", 2, keep=Keep(last=-1), on_save_error="raise")
    make_trainer(folder, settle(), saver, max_steps=8, strategy=strategy("ddp"), devices=2).fit(model, data(64))
    return model.at


def test_what_ranks_change_each_for_itself_is_saved_as_rank_0_has_it(tmp_path: Path) -> None:
    first, second = run_forks(train, tmp_path, world_size=2)
    for step in (2, 4, 6, 8):
        path = tmp_path / "run" / f"epoch=0-step={step}.ckpt"
        reader = CheckpointReader(lambda file, path=path: path / file, plain=True)  # type: ignore[misc]
        state, moments = first[step]
        saved = reader.read_full("model")
        assert saved.keys() == state.keys()
        assert all(torch.equal(saved[name], value) for name, value in state.items())
        of_optimizer = reader.read_full("optimizer_0")["state"]
        assert of_optimizer.keys() == moments.keys()
        assert all(torch.equal(of_optimizer[name]["exp_avg"], value) for name, value in moments.items())

        spread = {
            key.removeprefix("model.").removeprefix("optimizer_0.state.")
            for key, files in files_of(reader).items()
            if "__1_0.distcp" in files
        }
        equal = {name for name, value in state.items() if torch.equal(value, second[step][0][name])}
        assert "codes" not in equal
        assert "local.weight" not in equal
        if step == 8:
            assert {"late", "thawed"} & equal == set()
        assert spread & state.keys() <= equal
        assert {"base", "net.3.weight"} & spread
        assert any(key.startswith("net.") and key.endswith("exp_avg") for key in spread)


def files_of(reader: CheckpointReader) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for index, info in reader.metadata.storage_data.items():
        found.setdefault(index.fqn, set()).add(info.relative_path)
    return found


def test_nothing_is_taken_for_equal_between_two_averages_of_the_model() -> None:
    strategy = DDPStrategy()
    strategy._lightning_module = TinyModel()
    strategy.model = strategy._lightning_module
    family = PlainFamily(strategy)
    family.begin()
    flat = FlatState.of({"model": family.model_state()})
    assert len(family.identical(flat)) == len(list(strategy._lightning_module.parameters()))
    strategy._model_averager = object()  # type: ignore[assignment]
    assert not family.identical(flat)


def test_frozen_parameter_is_equal_as_long_as_it_is_left_alone() -> None:
    strategy = DDPStrategy()
    strategy._lightning_module = module = L.LightningModule()
    module.one = nn.Linear(2, 2).requires_grad_(False)
    module.other = nn.Linear(2, 2).requires_grad_(False)
    module.trained = nn.Linear(2, 2)
    with torch.inference_mode():
        module.uncounted = nn.Parameter(torch.ones(2), requires_grad=False)
    strategy.model = nn.Module()
    strategy.model.parameters_to_ignore = {"trained.bias"}
    family = PlainFamily(strategy)
    family.begin()

    def identical() -> set[str]:
        return set(family.identical(FlatState.of({"model": family.model_state()})))

    left_alone = {f"model.{name}" for name in ("one.weight", "one.bias", "other.weight", "other.bias")}
    assert identical() == left_alone | {"model.trained.weight"}
    with torch.no_grad():
        module.one.weight.add_(1)
        module.trained.weight.add_(1)
    assert identical() == left_alone - {"model.one.weight"} | {"model.trained.weight"}
    flat = FlatState.of({"model": family.model_state()})
    answer = family.identical(flat)
    with torch.no_grad():
        module.one.weight.add_(1)
        module.trained.weight.add_(1)
    family.model_state()
    assert family.identical(flat) is answer
    module.trained.requires_grad_(False)
    assert identical() == left_alone - {"model.one.weight"}


class SparseForAWhile(TinyModel):
    def on_train_batch_end(self, *_: Any) -> None:
        if self.global_step == 3:
            self.register_buffer("sparse", torch.eye(3).to_sparse())
        elif self.global_step == 5:
            del self.sparse


def train_with_a_sparse_buffer(folder: Path) -> int:
    saver = checkpoint_every(folder / "run", 2, keep=Keep(last=-1))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*(broadcast_buffers|sparse is a torch.sparse_coo tensor, which cannot)")
        # DDP cannot broadcast it.
        ddp = DDPStrategy(process_group_backend="gloo", broadcast_buffers=False)
        trainer = make_trainer(folder, settle(), saver, max_steps=6, strategy=ddp, devices=2)
        trainer.fit(SparseForAWhile(), data(64))
    return trainer.global_step


def test_buffer_that_cannot_be_saved_in_mid_run_stops_no_rank(tmp_path: Path) -> None:
    assert run_forks(train_with_a_sparse_buffer, tmp_path, world_size=2) == [6, 6]
    assert [manifest.step for manifest in committed(tmp_path / "run")] == [2, 6]
