"""An interrupted and resumed run is the same run: same samples, same losses, same weights, bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    WeightedRandomSampler,
    default_collate,
)

from forks import run_forks
from lightning_resilience.held_generators import HeldGenerator, held_by
from support import FEATURES, TinyModel, checkpoint_every, make_trainer, settle, strategy

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


class DrawnStream(Stream):
    """Draws its order when an iterator is made, not when the first sample is wanted."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data, order = Augmented(), list(range(SAMPLES))
        random.shuffle(order)
        return map(data.__getitem__, order)


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
    "stream that draws as it begins": lambda: DataLoader(DrawnStream(), batch_size=BATCH),
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
    for stops in ([1], [batches], [2, batches + 1, 2 * batches + 1]):
        where = tmp_path / "-".join(map(str, stops))
        assert_same(run(where, LOADERS[name], [*stops, None]), reference)


def test_what_was_trained_on_is_not_loaded_again(tmp_path: Path) -> None:
    Augmented.loaded = 0
    run(tmp_path, LOADERS["shuffled"], [3], max_epochs=1)
    before = Augmented.loaded
    run(tmp_path, LOADERS["shuffled"], [None], max_epochs=1)
    assert Augmented.loaded - before == SAMPLES - 3 * BATCH


class OwnLoader(DataLoader[Any]):
    """A user's subclass."""


def test_loader_stays_what_the_user_made_it(tmp_path: Path) -> None:
    own = OwnLoader(Augmented(), batch_size=BATCH)
    trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 2))
    trainer.fit(Recording(), own)
    assert trainer.train_dataloader is own
    assert isinstance(own, OwnLoader)
    assert type(own).__name__ == "OwnLoader"
    assert len(own) == 6
    assert len(list(own)) == 6  # it can be read outside of the Trainer, again and again
    assert len(list(own)) == 6


class Remembering(DataLoader[Any]):
    """A loader with a state of its own, as torchdata's StatefulDataLoader has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at = 0

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        for index in range(self.at, len(self)):
            self.at = index + 1
            yield self.collate_fn([self.dataset[i] for i in range(index * BATCH, min((index + 1) * BATCH, SAMPLES))])
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class TouchesTheLength(Recording):
    """Asks for the number of steps while optimizers are configured, which makes the loaders early."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


@pytest.mark.parametrize("model", [Recording, TouchesTheLength])
@pytest.mark.parametrize("make", [lambda: Remembering(Augmented(), batch_size=BATCH), LOADERS["shuffled"]])
def test_place_is_kept_also_when_loaders_are_made_early(
    tmp_path: Path, model: type[Recording], make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Recording", model)
    reference = run(tmp_path / "whole", make, [None])
    assert_same(run(tmp_path / "broken", make, [2, 8, None]), reference)


class Masking:
    """A collate function with a state: how often it was called decides what it masks."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        self.calls += 1
        batch = torch.utils.data.default_collate(samples)
        batch["x"][:, self.calls % FEATURES] = 0
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


@pytest.mark.parametrize("workers", [0, 2])
def test_preprocessing_with_a_state_goes_on(tmp_path: Path, workers: int) -> None:
    def make() -> Any:
        return loader(shuffle=True, collate_fn=Masking(), num_workers=workers)

    reference = run(tmp_path / "whole", make, [None])
    assert_same(run(tmp_path / "broken", make, [3, 9, None]), reference)


class Counting(Augmented):
    """Data with a length and a state: how many samples it gave."""

    def __init__(self) -> None:
        super().__init__()
        self.given = 0

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.given += 1
        sample = super().__getitem__(index)
        return {**sample, "x": sample["x"] + self.given}

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.mark.parametrize("workers", [0, 2])
def test_data_with_a_length_go_on_at_the_next_batch_also_with_a_state(tmp_path: Path, workers: int) -> None:
    def make() -> Any:
        return DataLoader(Counting(), batch_size=BATCH, shuffle=True, num_workers=workers)

    reference = run(tmp_path / "whole", make, [None])
    assert_same(run(tmp_path / "broken", make, [3, 9, None]), reference)


def on_ranks(folder: Path, name: str, workers: int, draws: bool = False) -> tuple[bool, int]:
    """Whether an interrupted run on these ranks is the same as one that was not, also where a sampler ``draws`` from a
    generator of its own."""

    def make() -> Any:
        order: dict[str, Any] = {"sampler": drawing()} if draws else {"shuffle": True}
        return loader(**order, num_workers=workers)

    settings: dict[str, Any] = {"strategy": strategy(name, 2), "devices": 2}
    reference = run(folder / "whole", make, [None], **settings)
    settings["strategy"] = strategy(name, 2)
    stop = 4 if draws else 2  # its first epoch's order would be right by chance, which is drawn from the seed
    first = run(folder / "broken", make, [stop], **settings)
    settings["strategy"] = strategy(name, 2)
    second = run(folder / "broken", make, [None], **settings)
    return first.seen + second.seen == reference.seen, len(reference.seen)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "workers", "draws"),
    [("ddp", 0, False), ("ddp", 2, False), ("fsdp2", 0, False), ("fsdp", 0, False), ("ddp", 0, True), ("ddp", 1, True)],
)
def test_every_rank_goes_on_at_its_own_samples(tmp_path: Path, name: str, workers: int, draws: bool) -> None:
    assert run_forks(on_ranks, tmp_path, name, workers, draws) == [(True, 9)] * 2


def test_loader_that_serves_a_second_fit_continues_there_too(tmp_path: Path) -> None:
    shared = loader()
    reference = run(tmp_path / "whole", lambda: shared, [None])
    assert_same(run(tmp_path / "broken", lambda: shared, [3, 8, None]), reference)
    assert type(shared) is DataLoader


def test_loader_that_serves_validation_too_keeps_its_place_in_training(tmp_path: Path) -> None:
    def train(folder: Path, stops: list[int | None]) -> list[Any]:
        seen = []
        for stop in stops:
            shared = loader()
            model = Recording(stop)
            model.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
            trainer = make_trainer(
                folder, checkpoint_every(folder, 1), settle(), val_check_interval=2, limit_val_batches=2, max_epochs=2
            )
            with suppress(Stop):
                trainer.fit(model, shared, shared, ckpt_path="last")
            seen += [step[:3] for step in model.seen]
        return seen

    assert train(tmp_path / "broken", [3, 9, None]) == train(tmp_path / "whole", [None])


class Slotted:
    """An iterable that cannot be tracked, of unknown length."""

    __slots__ = ("data",)

    def __init__(self) -> None:
        self.data = Augmented()

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(self.data, batch_size=BATCH))


def test_iterable_that_cannot_be_tracked_loses_nothing_and_its_user_is_told(tmp_path: Path) -> None:
    whole = run(tmp_path, Slotted, [None], max_epochs=1)
    assert [step[2] for step in whole.seen] == [
        list(range(i, min(i + BATCH, SAMPLES))) for i in range(0, SAMPLES, BATCH)
    ]
    with pytest.warns(UserWarning, match="begins anew, at its first batch, for Slotted"):
        broken = run(tmp_path / "broken", Slotted, [2, None], max_epochs=1)
    assert [step[2] for step in broken.seen[2:]] == [step[2] for step in whole.seen]


class Queue(IterableDataset[dict[str, Tensor]]):
    """Samples that are gone once read."""

    def __init__(self) -> None:
        self.left = list(range(40))

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.left:
            yield {"x": torch.ones(FEATURES), "id": torch.tensor(self.left.pop(0))}


def test_data_that_is_gone_once_read_is_not_dropped(tmp_path: Path) -> None:
    queue = Queue()
    seen = []
    for stop in (2, 5, None):
        model = Recording(stop)
        trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 1, exact_data=False), settle())
        with suppress(Stop):
            trainer.fit(model, DataLoader(queue, batch_size=2), ckpt_path="last")
        seen += [sample for step in model.seen for sample in step[2]]
    lost = sorted({*range(40)} - {*seen})
    assert len(seen) == len({*seen})
    assert lost == [4, 5, 6, 7, 14, 15, 16, 17]  # at each interruption: the batch it fell into and the one read ahead


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2), (1, 2)])
@pytest.mark.parametrize("sampler", ["shuffled", "own sampler"])
def test_samples_go_on_in_their_order_with_another_number_of_workers(
    tmp_path: Path, before: int, after: int, sampler: str
) -> None:
    def make(workers: int) -> Any:
        return loader(num_workers=workers, **({"shuffle": True} if sampler == "shuffled" else {"sampler": OwnOrder()}))

    whole = run(tmp_path / "whole", lambda: make(before), [None], max_epochs=2)
    first = run(tmp_path / "broken", lambda: make(before), [2], max_epochs=2)
    second = run(tmp_path / "broken", lambda: make(after), [None], max_epochs=2)
    epoch = [step[2] for step in (first.seen + second.seen) if step[0] == 0]
    assert epoch == [step[2] for step in whole.seen if step[0] == 0]


def test_stream_that_workers_share_out_otherwise_begins_anew(tmp_path: Path) -> None:
    run(tmp_path, lambda: DataLoader(Stream(), batch_size=BATCH), [2], max_epochs=1)
    with pytest.warns(UserWarning, match="begins anew, at its first batch, for DataLoader"):
        model = run(tmp_path, lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=1), [None], max_epochs=1)
    assert model.seen[0][1:3] == (0, [0, 1, 2, 3])


class Sources(L.LightningDataModule):
    """Makes the loaders, and has a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def train_dataloader(self) -> Any:
        self.asked += 1
        return loader(shuffle=True)

    def state_dict(self) -> dict[str, int]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.asked = state["asked"]


def test_data_module_goes_on_with_its_state_and_its_loader_at_its_place(tmp_path: Path) -> None:
    def train(folder: Path, stops: list[int | None]) -> tuple[list[Any], int]:
        seen = []
        for life, stop in enumerate(stops):
            model, source = Recording(stop), Sources()
            for seed in (torch.manual_seed, random.seed, np.random.seed):
                seed(life)
            trainer = make_trainer(folder, checkpoint_every(folder / "run", 1), settle(), max_epochs=2)
            with suppress(Stop):
                trainer.fit(model, datamodule=source, ckpt_path="last")
            seen += model.seen
        return seen, source.asked

    whole, broken = train(tmp_path / "whole", [None]), train(tmp_path / "broken", [2, 8, None])
    assert broken[0] == whole[0]
    assert broken[1] == 3  # each process asks once more


class Counted(DataLoader[Any]):
    """Counts its iterators."""

    made = 0

    def __iter__(self) -> Any:
        Counted.made += 1
        return super().__iter__()


@pytest.mark.parametrize("exact", [True, False])
def test_loader_is_iterated_once_an_epoch(tmp_path: Path, exact: bool) -> None:
    Counted.made = 0
    trainer = make_trainer(tmp_path, checkpoint_every(tmp_path / "run", 2, exact_data=exact), max_epochs=3)
    trainer.fit(Recording(), Counted(Augmented(), batch_size=BATCH))
    assert Counted.made == 3


class Noisy(Augmented):
    """Augments with a generator of its own."""

    def __init__(self, rng: Any) -> None:
        super().__init__()
        self.rng = rng

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        sample = super().__getitem__(index)
        noise = torch.rand(1, generator=self.rng).item() if isinstance(self.rng, torch.Generator) else self.rng.random()
        return {**sample, "x": sample["x"] + noise}


class Crop:
    """A step of an augmentation, one object further in."""

    def __init__(self) -> None:
        self.rng = random.Random(5)

    def __call__(self, sample: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**sample, "x": sample["x"] * self.rng.random()}


class Chained:
    """Augmentation in steps."""

    def __init__(self) -> None:
        self.steps = [Crop(), Crop()]

    def __call__(self, samples: list[dict[str, Tensor]]) -> Any:
        for step in self.steps:
            samples = [step(sample) for sample in samples]
        return default_collate(samples)


class ShuffledStream(Stream):
    """Draws an order from a generator that it keeps."""

    def __init__(self) -> None:
        self.rng = np.random.RandomState(3)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        data = Augmented()
        return (data[index] for index in self.rng.permutation(SAMPLES))


class Drawing(Sampler[int]):
    """Draws an order from a generator that it is given."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from self.rng.permutation(SAMPLES).tolist()


def drawing() -> Drawing:
    return Drawing(np.random.default_rng(3))


def one_for_all(workers: int) -> DataLoader[Any]:
    rng = np.random.default_rng(3)
    return DataLoader(Noisy(rng), batch_size=BATCH, sampler=Drawing(rng), num_workers=workers)


def scaled(samples: list[dict[str, Tensor]], rng: random.Random) -> Any:
    batch = default_collate(samples)
    return {**batch, "x": batch["x"] * rng.random()}


HELD: dict[str, Callable[[int], Any]] = {
    "numpy's in a sampler": lambda workers: loader(sampler=drawing(), num_workers=workers),
    "numpy's in a batch sampler": lambda workers: DataLoader(
        Augmented(), batch_sampler=BatchSampler(drawing(), BATCH, False), num_workers=workers
    ),
    "torch's in a dataset": lambda workers: DataLoader(
        Noisy(torch.Generator().manual_seed(2)), batch_size=BATCH, shuffle=True, num_workers=workers
    ),
    "numpy's in a part of a dataset": lambda workers: DataLoader(
        Subset(Noisy(np.random.default_rng(2)), range(20)),
        batch_size=BATCH,
        num_workers=workers,
        persistent_workers=workers > 0,
    ),
    "Python's in a collate function": lambda workers: loader(collate_fn=Chained(), num_workers=workers),
    "Python's in a partial function": lambda workers: loader(
        collate_fn=partial(scaled, rng=random.Random(5)), num_workers=workers
    ),
    "one of a sampler and a dataset": one_for_all,
    "numpy's old one in a stream": lambda workers: DataLoader(ShuffledStream(), batch_size=BATCH, num_workers=workers),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", HELD)
def test_generators_that_the_data_hold_go_on(tmp_path: Path, name: str, workers: int) -> None:
    def make() -> Any:
        return HELD[name](workers)

    reference = run(tmp_path / "whole", make, [None])
    batches = len(reference.seen) // 3
    for stops in ([batches], [2, batches + 1, 2 * batches + 1]):
        where = tmp_path / "-".join(map(str, stops))
        assert_same(run(where, make, [*stops, None]), reference)


class Settings(dict[str, Any]):
    """As many scripts have them; what is not there is a KeyError."""

    __getattr__ = dict.__getitem__


def test_what_answers_for_others_is_passed_over() -> None:
    class Own:
        __slots__ = ()
        __getattr__ = Settings.__getattr__

    noisy = Noisy(random.Random(2))
    noisy.settings, noisy.own = Settings(size=3), Own()  # type: ignore[attr-defined]
    assert list(held_by(noisy)) == [".rng"]


def test_generator_of_another_device_begins_anew() -> None:
    """Its state is of another size: the resume would end there."""
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    with pytest.warns(UserWarning, match="was a Generator of cuda and is a Generator of cpu now"):
        HeldGenerator(generator).load_state_dict({"kind": "Generator of cuda", "state": torch.zeros(16)})
    assert torch.equal(generator.get_state(), before)


class ProcessNoise(Stream):
    """Draws from the process's generator, which it has by another name, as ``check_random_state(None)`` gives it."""

    def __init__(self) -> None:
        self.rng = np.random.get_state.__self__  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for sample in super().__iter__():
            yield {**sample, "x": sample["x"] + self.rng.random_sample()}


class DrawsToo(Recording):
    """A model that draws from the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * np.random.random()


def test_generator_of_the_process_goes_on_also_where_data_refer_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its batches are read ahead, so the data's state is an earlier one than the process's."""
    monkeypatch.setitem(globals(), "Recording", DrawsToo)

    def make() -> Any:
        return DataLoader(ProcessNoise(), batch_size=BATCH)

    reference = run(tmp_path / "whole", make, [None])
    assert_same(run(tmp_path / "broken", make, [2, 8, None]), reference)


def test_generator_of_another_kind_is_told_of(tmp_path: Path) -> None:
    def noisy(rng: Any) -> Callable[[], Any]:
        return lambda: DataLoader(Noisy(rng), batch_size=BATCH)

    run(tmp_path, noisy(np.random.default_rng(2)), [2])
    with pytest.warns(UserWarning, match="was a Generator of PCG64 and is a Random now"):
        run(tmp_path, noisy(random.Random(2)), [4])


@pytest.mark.parametrize(("workers", "persist"), [(0, False), (1, False), (1, True)])
def test_loader_that_had_just_begun_anew_beside_a_longer_stream_goes_on(
    tmp_path: Path, workers: int, persist: bool
) -> None:
    def make() -> Any:
        short = DataLoader(
            Augmented(10),
            batch_size=BATCH,
            shuffle=True,
            num_workers=workers,
            persistent_workers=persist,
        )
        return CombinedLoader({"a": DataLoader(Stream(), batch_size=BATCH), "b": short}, "max_size_cycle")

    reference = run(tmp_path / "whole", make, [None], max_epochs=2)
    assert_same(run(tmp_path / "parts", make, [3, 9, None], max_epochs=2), reference)
