"""Shared by the tests: one tiny model, its data, and a Trainer that is quiet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_resilience import EverySteps, ResilientCheckpoint
from lightning_resilience.manifest import Manifest
from lightning_resilience.session import Session
from lightning_resilience.store import list_checkpoints, verify
from lightning_resilience.tiers import LocalTier

FEATURES = 8


class TinyModel(L.LightningModule):
    """Two linear layers around a batch norm, with AdamW.  ``history`` has the loss of each step of this process."""

    def __init__(self, width: int = 16, lr: float = 0.01) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.net = nn.Sequential(
            nn.Linear(FEATURES, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Linear(width, 1)
        )
        self.history: list[tuple[int, float]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.history.append((self.global_step, loss.item()))
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])

    def configure_model(self) -> None:
        """Shard with FSDP2 where the strategy has a mesh for it."""
        mesh = getattr(self, "_device_mesh", None)
        if mesh is None or hasattr(self.net, "set_requires_gradient_sync"):
            return
        from torch.distributed.fsdp import fully_shard

        for layer in self.net:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh["data_parallel"])
        for child in filter(lambda child: any(True for _ in child.parameters()), self.children()):
            fully_shard(child, mesh=mesh["data_parallel"])


class CPUFSDPStrategy(FSDPStrategy):
    """FSDP1 on CPUs over gloo, which the stock strategy refuses."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def strategy(name: str, world_size: int = 2) -> Any:
    """``single``, ``ddp``, ``fsdp`` (FSDP1) or ``fsdp2`` (ModelParallel), on CPUs."""
    if name == "single":
        return "auto"
    if name == "ddp":
        return DDPStrategy(process_group_backend="gloo", find_unused_parameters=True)
    if name == "fsdp":
        return CPUFSDPStrategy(process_group_backend="gloo", use_orig_params=True)
    return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, process_group_backend="gloo")


def data(samples: int = 32, batch_size: int = 4) -> DataLoader[Any]:
    """The same samples every time, in order."""
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(samples, FEATURES, generator=generator)
    return DataLoader(TensorDataset(features, features.sum(1, keepdim=True)), batch_size=batch_size)


def make_trainer(folder: Path, *callbacks: L.Callback, **kwargs: Any) -> L.Trainer:
    """A CPU Trainer without bars, summaries and loggers."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
    }
    return L.Trainer(callbacks=list(callbacks), **(defaults | kwargs))


def checkpoint_every(folder: Path, steps: int = 2, **kwargs: Any) -> ResilientCheckpoint:
    """Our callback, saving every few steps."""
    return ResilientCheckpoint(dirpath=folder, schedule=EverySteps(steps), **kwargs)


class Settle(L.Callback):
    """Waits after every batch for the save that it started, so that the next one is not skipped."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._wait(trainer)

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        self._wait(trainer)

    def on_train_epoch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self._wait(trainer)

    @staticmethod
    def _wait(trainer: L.Trainer) -> None:
        if (session := Session.of(trainer)) is not None:
            session.engine.drain(60)


def settle() -> Settle:
    """See ``Settle``."""
    return Settle()


def committed(folder: Path) -> list[Manifest]:
    """The manifests in a folder, from old to new, each checked byte by byte."""
    tier = LocalTier(folder)
    manifests = list_checkpoints(tier).committed
    for name, manifest in manifests.items():
        assert not verify(tier, name, manifest)
    return sorted(manifests.values(), key=lambda manifest: manifest.order)
