"""Loaders of every kind that people bring, interrupted: the samples of every epoch are those of the whole run."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from forks import run_forks
from lightning_resilience import EverySteps, ResilientCheckpoint
from support import make_trainer, settle, strategy

COUNT = 12
DEALT = pytest.mark.filterwarnings("ignore:The epoch goes on after")


class Ids(Dataset[Tensor]):
    """Each sample is its own number."""

    def __init__(self, count: int = COUNT) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


class Stop(Exception):
    """The interruption."""


class Net(L.LightningModule):
    """Writes down the samples of each epoch; interrupted before batch ``stop``."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.stop = stop
        self.seen: dict[int, list[list[int]]] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.stop is not None and self.trainer.fit_loop.epoch_loop.total_batch_idx >= self.stop:
            raise Stop

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = batch if isinstance(batch, list) else [batch]
        ids = [int(value) for part in parts if part is not None for value in part.flatten()]
        self.seen.setdefault(self.current_epoch, []).append(ids)
        return self.net(torch.cat([part for part in parts if part is not None])).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        assert isinstance(batch, Tensor)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


Seen = dict[int, list[list[int]]]


def live(
    root: Path,
    loader: Any,
    stop: int | None = None,
    *callbacks: L.Callback,
    model: Net | None = None,
    checkpoint: dict[str, Any] | None = None,
    val: Any = None,
    **kwargs: Any,
) -> Seen:
    """One life: the samples of each epoch."""
    torch.manual_seed(0)
    model = model or Net(stop)
    ours = ResilientCheckpoint(root / "run", **({"schedule": EverySteps(1)} | (checkpoint or {})))
    trainer = make_trainer(root, *callbacks, settle(), ours, **({"max_epochs": 3} | kwargs))
    with suppress(Stop):
        trainer.fit(model, loader, val, ckpt_path="last")
    return model.seen


def joined(*lives: Seen) -> Seen:
    """What several lives have seen."""
    return {
        epoch: [batch for seen in lives for batch in seen.get(epoch, [])]
        for epoch in sorted({epoch for seen in lives for epoch in seen})
    }


def flat(batches: Iterable[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def persisting(batch_size: int = 2, **kwargs: Any) -> DataLoader[Any]:
    settings = {"shuffle": True, "num_workers": 1, "persistent_workers": True, **kwargs}
    return DataLoader(settings.pop("dataset", Ids()), batch_size, **settings)


class Shuffling(IterableDataset[Tensor]):
    """A stream that shuffles where it is read."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([float(i)]) for i in torch.randperm(COUNT).tolist()])


class Remembering(IterableDataset[Tensor]):
    """A stream of unknown length with a state; with workers, each has its share."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        worker = torch.utils.data.get_worker_info()
        first, every = (worker.id, worker.num_workers) if worker else (0, 1)
        while first + self.at * every < COUNT:
            self.at += 1
            yield torch.tensor([float(first + (self.at - 1) * every)])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Generating(DataLoader[Any]):
    """A subclass that iterates with code of its own."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        yield from super().__iter__()


class Mapping(DataLoader[Any]):
    """Another, whose iterator is made at once."""

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return map(torch.Tensor.clone, super().__iter__())


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(COUNT, ()))


class Counting(Sampler[int]):
    """A sampler with a state: the order depends on how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.asked += 1
        return iter(torch.randperm(COUNT, generator=torch.Generator().manual_seed(self.asked)).tolist())

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


class Counter:
    """A collate function with a state, which adds how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[Tensor]) -> Tensor:
        self.calls += 1
        return torch.stack([*samples, torch.tensor([100.0 + self.calls])])

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Stream(IterableDataset[Tensor]):
    """A stream of unknown length without a state."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.tensor([float(i)]) for i in range(COUNT)])


CASES: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "workers that persist, epochs cut short": (persisting, {"limit_train_batches": 3}),
    "two workers that persist, epochs cut short": (lambda: persisting(num_workers=2), {"limit_train_batches": 4}),
    "stream whose workers persist": (lambda: persisting(dataset=Shuffling(), shuffle=None), {}),
    "stream with a state": (lambda: DataLoader(Remembering(), 2), {}),
    "stream with a state, 2 workers": (lambda: DataLoader(Remembering(), 2, num_workers=2), {}),
    "stream, collate function with a state": (lambda: DataLoader(Stream(), 2, collate_fn=Counter()), {}),
    "subclass that generates": (lambda: Generating(Ids(), 2, shuffle=True), {}),
    "subclass that generates, 1 worker": (lambda: Generating(Ids(), 2, shuffle=True, num_workers=1), {}),
    "subclass that maps": (lambda: Mapping(Ids(), 2, shuffle=True), {}),
    "subclass that maps, 1 worker": (lambda: Mapping(Ids(), 2, shuffle=True, num_workers=1), {}),
    "sampler without a length": (lambda: DataLoader(Ids(), 2, sampler=Endless()), {"limit_train_batches": 5}),
    "sampler with a state": (lambda: DataLoader(Ids(), 2, sampler=Counting()), {}),
    "sampler with a state, 1 worker": (lambda: DataLoader(Ids(), 2, sampler=Counting(), num_workers=1), {}),
    "sized loader beside a stream": (
        lambda: CombinedLoader([DataLoader(Ids(), 2, shuffle=True), DataLoader(Stream(), 2)], "max_size"),
        {},
    ),
    "no batches": (lambda: DataLoader(Ids(), None, shuffle=True), {}),
}


@pytest.mark.filterwarnings("ignore:Your `IterableDataset` has `__len__` defined")
@pytest.mark.parametrize("name", CASES)
def test_samples_are_those_of_the_whole_run(tmp_path: Path, name: str) -> None:
    make, settings = CASES[name]
    whole = live(tmp_path / "whole", make(), **settings)
    for stops in ((1,), (3,), (5, 8), (3, 4), (3, 5, 7)):
        lives = [live(tmp_path / str(stops), make(), stop, **settings) for stop in (*stops, None)]
        assert joined(*lives) == whole, stops


@DEALT
def test_epochs_after_one_that_was_dealt_anew_are_whole(tmp_path: Path) -> None:
    first, second = live(tmp_path, persisting(2), 2), live(tmp_path, persisting(4))
    seen = joined(first, second)
    assert [sorted(flat(seen[epoch])) for epoch in range(3)] == [[*range(COUNT)]] * 3
    assert len({tuple(flat(seen[epoch])) for epoch in range(3)}) == 3


class Sharing(Sampler[int]):
    """Draws from the generator that all ranks are taken to have alike."""

    def __len__(self) -> int:
        return 2 * COUNT

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(2 * COUNT).tolist())


def on_ranks(root: Path, ranks: int, stop: int | None) -> Seen:
    loader = DataLoader(Ids(2 * COUNT), 2, sampler=Sharing())
    return live(root, loader, stop, strategy=strategy("ddp" if ranks > 1 else "single", ranks), devices=ranks)


@pytest.mark.ranks
@pytest.mark.parametrize("lives", [[(2, 3), (1, 7), (2, None)], [(1, 3), (3, 5), (3, None)]])
def test_ranks_go_on_drawing_one_order_after_their_number_has_changed(
    tmp_path: Path, lives: list[tuple[int, int | None]]
) -> None:
    results = [run_forks(on_ranks, tmp_path, ranks, stop, world_size=ranks) for ranks, stop in lives]
    seen = joined(*(rank for life in results for rank in life))
    assert [sorted(flat(seen[epoch])) for epoch in range(3)] == [[*range(2 * COUNT)]] * 3


@DEALT
@pytest.mark.parametrize(("settings", "samples"), [({"limit_train_batches": 0.5}, 12), ({"overfit_batches": 4}, 16)])
@pytest.mark.filterwarnings("ignore:You requested to overfit")
def test_epoch_that_is_cut_short_is_as_long_with_another_batch_size(
    tmp_path: Path, settings: dict[str, Any], samples: int
) -> None:
    first = live(tmp_path, DataLoader(Ids(24), 2), 2, max_epochs=1, **settings)
    second = live(tmp_path, DataLoader(Ids(24), 4), max_epochs=1, **settings)
    assert flat(joined(first, second)[0]) == list(range(samples))


@pytest.mark.parametrize(
    ("now", "why"),
    [
        (lambda: DataLoader(Ids(16), 2, shuffle=True), "there are 16 samples, and were 12"),
        (lambda: DataLoader(Ids(8), 4, shuffle=True), "there are 8 samples, and were 12"),
        (lambda: DataLoader(Ids(), 2), "their sampler is another one"),
        (lambda: CombinedLoader([DataLoader(Ids(), 2), DataLoader(Ids(), 2)]), "there are others than there were"),
    ],
)
def test_epoch_of_other_data_begins_anew_and_says_so(tmp_path: Path, now: Callable[[], Any], why: str) -> None:
    live(tmp_path, DataLoader(Ids(), 2, shuffle=True), 2, max_epochs=1)
    with pytest.warns(UserWarning, match=f"begins anew, at its first batch.*{why}"):
        seen = live(tmp_path, now(), max_epochs=1)
    loader = now()
    ids = flat(seen[0])
    assert len(ids) == sum(len(one.dataset) for one in getattr(loader, "flattened", [loader]))


def test_same_loader_twice_begins_the_epoch_anew(tmp_path: Path) -> None:
    def make() -> Any:
        one = DataLoader(Ids(), 2)
        return CombinedLoader([one, one])

    live(tmp_path, make(), 2, max_epochs=1)
    with pytest.warns(UserWarning, match="begins anew"):
        assert len(live(tmp_path, make(), max_epochs=1)[0]) == COUNT // 2


def test_too_little_left_for_a_larger_batch_begins_the_epoch_anew(tmp_path: Path) -> None:
    live(tmp_path, DataLoader(Ids(13), 2, drop_last=True), 5, max_epochs=1)
    with pytest.warns(UserWarning, match="begins anew"):
        seen = live(tmp_path, DataLoader(Ids(13), 4, drop_last=True), max_epochs=1)
    assert flat(seen[0]) == list(range(12))


def test_batch_sampler_that_made_way_for_a_batch_size_begins_the_epoch_anew(tmp_path: Path) -> None:
    live(tmp_path, DataLoader(Ids(), batch_sampler=BatchSampler(range(COUNT), 2, False)), 2, max_epochs=1)
    with pytest.warns(UserWarning, match="begins anew"):
        assert flat(live(tmp_path, DataLoader(Ids(), 4), max_epochs=1)[0]) == list(range(COUNT))


# -- others who read, and copies --------------------------------------------------------------------------------------


class Peeking(L.Callback):
    """Reads from the training loader, as people do to log a batch."""

    def __init__(self) -> None:
        self.peeked: list[list[int]] = []

    def peek(self, trainer: L.Trainer, *_: Any) -> None:
        batch = next(iter(trainer.train_dataloader))
        self.peeked.append([int(value) for value in batch.flatten()])

    on_train_start = on_train_epoch_start = on_train_batch_end = peek  # type: ignore[assignment]


def test_whoever_else_reads_the_loader_reads_its_beginning_and_moves_nothing(tmp_path: Path) -> None:
    first, second = Peeking(), Peeking()
    seen = joined(
        live(tmp_path, DataLoader(Ids(), 2), 3, first, max_epochs=2),
        live(tmp_path, DataLoader(Ids(), 2), None, second, max_epochs=2),
    )
    assert seen == {epoch: [[i, i + 1] for i in range(0, COUNT, 2)] for epoch in (0, 1)}
    assert {tuple(peeked) for peeked in first.peeked + second.peeked} == {(0, 1)}


@pytest.mark.filterwarnings("ignore:Your `val_dataloader`'s sampler has shuffling enabled")
def test_loader_whose_workers_persist_serves_validation_too(tmp_path: Path) -> None:
    loader = persisting()
    seen = live(tmp_path, loader, val=loader, max_epochs=2)
    assert [sorted(flat(seen[epoch])) for epoch in (0, 1)] == [[*range(COUNT)]] * 2


class Copying(L.Callback):
    """Copies the training loader during the fit."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        for twin in (copy.deepcopy(trainer.train_dataloader), copy.copy(trainer.train_dataloader)):
            assert type(twin) is DataLoader
            assert len(list(twin)) == COUNT // 2
        assert len(list(pickle.loads(pickle.dumps(trainer.train_dataloader)))) == COUNT // 2


def test_copies_of_a_loader_are_the_users_own(tmp_path: Path) -> None:
    assert live(tmp_path, DataLoader(Ids(), 2), None, Copying(), max_epochs=1)[0] == [
        [i, i + 1] for i in range(0, COUNT, 2)
    ]


# -- saves that are not between two batches ---------------------------------------------------------------------------


class Failing(Net):
    """Raises once, at a place of its own."""

    where = ""

    def fail_at(self, where: str, step: int) -> None:
        if self.where == where and self.global_step == step:
            raise Stop

    def on_train_epoch_start(self) -> None:
        self.fail_at("epoch", 6)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.fail_at("batch", 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.fail_at("step", 2)
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("data", [lambda: DataLoader(Ids(), 2), lambda: DataLoader(Stream(), 2)])
@pytest.mark.parametrize("where", ["epoch", "batch", "step"])
def test_save_on_an_exception_leaves_out_no_batch(tmp_path: Path, where: str, data: Callable[[], Any]) -> None:
    model = Failing()
    model.where = where
    checkpoint = {"schedule": EverySteps(100), "save_on_exception": True}
    first = live(tmp_path, data(), model=model, checkpoint=checkpoint)
    second = live(tmp_path, data(), checkpoint=checkpoint)
    assert joined(first, second) == {epoch: [[i, i + 1] for i in range(0, COUNT, 2)] for epoch in range(3)}


@pytest.mark.parametrize("data", [lambda: DataLoader(Ids(), 2), lambda: DataLoader(Stream(), 2)])
def test_epoch_after_one_that_a_stock_callback_saved_at_its_end_is_trained(
    tmp_path: Path, data: Callable[[], Any]
) -> None:
    stock = ModelCheckpoint(tmp_path / "stock", every_n_train_steps=6, save_top_k=-1)
    live(tmp_path, data(), 8, stock)
    [path] = (tmp_path / "stock").iterdir()
    model = Net()
    trainer = make_trainer(tmp_path, settle(), ResilientCheckpoint(tmp_path / "other"), max_epochs=3)
    trainer.fit(model, data(), ckpt_path=path)
    assert {epoch: len(batches) for epoch, batches in model.seen.items()} == {1: 6, 2: 6}
