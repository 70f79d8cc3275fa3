"""An interrupted and resumed run is the same run: same samples, same losses, same weights, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, WeightedRandomSampler

from support import FEATURES, TinyModel, checkpoint_every, make_trainer, settle

SAMPLES, BATCH = 22, 4


class Augmented(Dataset[dict[str, Tensor]]):
    """Samples with random noise from all three generators; counts what is loaded in this process."""

    loaded = 0

    def __init__(self, samples: int = SAMPLES) -> None:
        self.features = torch.randn(samples, FEATURES, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        Augmented.loaded += 1
        noise = torch.randn(FEATURES) * 0.1 + random.random() * 0.1 + np.random.rand() * 0.1
        return {"x": self.features[index] + noise.float(), "id": torch.tensor(index)}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same samples as a stream of unknown or known length."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data = Augmented()
        return (data[index] for index in range(len(data)))


class Recording(TinyModel):
    """Records the sample ids and the loss of every step."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.stop_after = stop_after
        self.seen: list[tuple[int, int, list[int], float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = list(batch.values()) if isinstance(batch, dict) and "x" not in batch else [batch]
        parts = [part for part in parts if part is not None]
        x = torch.cat([part["x"] for part in parts])
        loss = nn.functional.mse_loss(self.net(x), x.sum(1, keepdim=True))
        ids = torch.cat([part["id"] for part in parts]).tolist()
        self.seen.append((self.trainer.current_epoch, batch_idx, ids, loss.item()))
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.stop_after is not None and self.trainer.fit_loop.epoch_loop.total_batch_idx >= self.stop_after:
            raise Stop


class Stop(Exception):
    """The interruption."""


class OwnOrder(Sampler[int]):
    """A custom sampler that draws its order from Python's generator, and minds the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(order)
        random.shuffle(order)
        return iter(order)


def loader(**kwargs: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), batch_size=BATCH, **kwargs)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: loader(),
    "shuffled": lambda: loader(shuffle=True),
    "drop last": lambda: loader(shuffle=True, drop_last=True),
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(5)),
    "own sampler": lambda: loader(sampler=OwnOrder()),
    "weighted": lambda: loader(sampler=WeightedRandomSampler(torch.arange(1, SAMPLES + 1).double(), SAMPLES)),
    "1 worker": lambda: loader(shuffle=True, num_workers=1),
    "2 workers": lambda: loader(shuffle=True, num_workers=2),
    "2 workers that persist": lambda: loader(shuffle=True, num_workers=2, persistent_workers=True),
    "own sampler, 2 workers": lambda: loader(sampler=OwnOrder(), num_workers=2),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "cycled": lambda: CombinedLoader(
        {"a": loader(shuffle=True), "b": DataLoader(Augmented(10), batch_size=BATCH, shuffle=True)}, "max_size_cycle"
    ),
    "longest": lambda: CombinedLoader(
        {"a": loader(shuffle=True), "b": DataLoader(Augmented(10), batch_size=BATCH, shuffle=True)}, "max_size"
    ),
    "shortest": lambda: CombinedLoader(
        {"a": loader(shuffle=True), "b": DataLoader(Augmented(10), batch_size=BATCH, shuffle=True)}, "min_size"
    ),
}


def run(folder: Path, make: Callable[[], Any], stops: list[int | None], **kwargs: Any) -> Recording:
    """Train through the interruptions; the model of the last life with what all lives have seen."""
    seen: list[Any] = []
    for life, stop in enumerate(stops):
        torch.manual_seed(life * 1000)
        random.seed(life * 1000)
        np.random.seed(life * 1000)
        model = Recording(stop)
        if life == 0:
            torch.manual_seed(7)
            random.seed(7)
            np.random.seed(7)
        trainer = make_trainer(folder, checkpoint_every(folder / "run", 1), settle(), **({"max_epochs": 3} | kwargs))
        with suppress(Stop):
            trainer.fit(model, make(), ckpt_path="last")
        seen += model.seen
    model.seen = seen
    return model


def assert_same(model: Recording, reference: Recording) -> None:
    assert [step[:3] for step in model.seen] == [step[:3] for step in reference.seen]
    assert [step[3] for step in model.seen] == [step[3] for step in reference.seen]
    for (name, value), other in zip(model.state_dict().items(), reference.state_dict().values(), strict=True):
        assert torch.equal(value, other), name


@pytest.mark.parametrize("name", LOADERS)
def test_samples_losses_and_weights_go_on_bit_for_bit(tmp_path: Path, name: str) -> None:
    reference = run(tmp_path / "whole", LOADERS[name], [None])
    batches = len(reference.seen) // 3
    assert batches >= 3
    for stops in ([1], [batches - 1], [batches], [batches + 2], [2, batches + 1, 2 * batches + 1]):
        where = tmp_path / "-".join(map(str, stops))
        assert_same(run(where, LOADERS[name], [*stops, None]), reference)
