"""An interrupted epoch goes on over other ranks, or with other batches: each of its samples once, in the same order."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from forks import run_forks
from lightning_resilience.order import Dealt, Share, batches, deal, draw, kind_of, of_all_ranks, order_of
from support import checkpoint_every, make_trainer, settle, strategy
from test_exact import Augmented, OwnOrder, Recording, Remembering, Stop, Stream, run


@pytest.mark.parametrize("number", range(50))
def test_every_sample_is_dealt_once_whatever_becomes_of_ranks_and_batches(number: int) -> None:
    chance = random.Random(number)
    length, left, used = chance.randint(1, 60), None, []
    everything = torch.randperm(length)
    left = everything
    for _ in range(4):
        share = {"ranks": chance.randint(1, 5), "batch_size": chance.randint(1, 7), "drop_last": False}
        if not len(left):
            break
        parts = [Dealt(deal(left, rank, share, drop_uneven=False), share, 0) for rank in range(share["ranks"])]
        assert len({len(part) for part in parts}) == 1
        steps = chance.randint(0, len(parts[0]))
        batches = [list(part)[:steps] for part in parts]
        consumed = min(steps * share["ranks"] * share["batch_size"], len(left))
        seen = {sample for rank in batches for batch in rank for sample in batch}
        assert seen == {*left[:consumed].tolist()}
        used += left[:consumed].tolist()
        left = left[consumed:]
    assert used + left.tolist() == everything.tolist()


def test_samples_that_do_not_come_out_even_are_given_out_twice_or_dropped() -> None:
    share = {"ranks": 4, "batch_size": 2, "drop_last": False}
    left = torch.tensor([10, 11, 12, 13, 14])
    assert [deal(left, rank, share, drop_uneven=False).tolist() for rank in range(4)] == [
        [10, 14],
        [11, 10],
        [12, 11],
        [13, 12],
    ]
    assert [deal(left, rank, share, drop_uneven=True).tolist() for rank in range(4)] == [[10], [11], [12], [13]]
    assert [deal(left[:1], rank, share, drop_uneven=False).tolist() for rank in range(4)] == [[10]] * 4


@pytest.mark.parametrize(
    ("samples", "share", "count"),
    [
        (0, {"ranks": 1, "batch_size": 3, "drop_last": False}, 0),
        (6, {"ranks": 1, "batch_size": 3, "drop_last": False}, 2),
        (7, {"ranks": 4, "batch_size": 3, "drop_last": False}, 3),
        (7, {"ranks": 4, "batch_size": 3, "drop_last": True}, 2),
        (2, {"ranks": 1, "batch_size": 3, "drop_last": True}, 0),
    ],
)
def test_batches_of_one_rank_and_samples_of_all(samples: int, share: Share, count: int) -> None:
    assert batches(torch.arange(samples), share) == count
    assert of_all_ranks(share) == share["ranks"] * 3


DATA = TensorDataset(torch.arange(30))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_order_of_a_distributed_sampler_is_drawn_again_without_it(ranks: int, shuffle: bool) -> None:
    samplers = [DistributedSampler(DATA, ranks, rank, shuffle=shuffle, seed=5) for rank in range(ranks)]
    for sampler in samplers:
        sampler.set_epoch(7)
    order = order_of(DataLoader(DATA, batch_size=2, sampler=samplers[0]), ranks)
    assert order is not None
    drawn = draw(order, DataLoader(DATA))
    assert drawn is not None
    assert [drawn[rank::ranks].tolist() for rank in range(ranks)] == [list(sampler) for sampler in samplers]


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(DATA, shuffle=True),
        lambda: DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True, num_samples=17)),
        lambda: DataLoader(DATA, sampler=OwnOrder()),
        lambda: DataLoader(DATA),
    ],
)
def test_order_of_one_process_is_drawn_again_with_its_generators(make: Callable[[], DataLoader[Any]]) -> None:
    first = make()
    torch.manual_seed(3)
    random.seed(3)
    order = order_of(first, 1)
    expected = list(first.sampler)
    torch.manual_seed(3)
    random.seed(3)
    assert order is not None
    drawn = draw(order, make())
    assert drawn is not None
    assert drawn.tolist() == expected


@pytest.mark.parametrize(
    ("loader", "ranks"),
    [
        (DataLoader(Stream()), 1),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), 1),
        (DataLoader(DATA, shuffle=True), 2),
        ([1, 2], 1),
    ],
)
def test_order_that_nobody_can_tell_is_not_told(loader: Any, ranks: int) -> None:
    assert order_of(loader, ranks) is None


@pytest.mark.parametrize(
    ("other", "same"),
    [
        (lambda: DataLoader(DATA, shuffle=True, batch_size=7), True),
        (lambda: DataLoader(DATA), False),
        (lambda: DataLoader(DATA, sampler=OwnOrder()), False),
        (lambda: DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=17)), False),
        (lambda: DataLoader(DATA, sampler=DistributedSampler(DATA, 1, 0)), False),
    ],
)
def test_orders_are_of_one_kind_where_their_sampler_is(other: Callable[[], DataLoader[Any]], same: bool) -> None:
    first, second = order_of(DataLoader(DATA, shuffle=True), 1), order_of(other(), 1)
    assert first is not None
    assert second is not None
    assert (kind_of(first) == kind_of(second)) == same


def test_another_sampler_does_not_pass_for_the_one_that_was() -> None:
    order = order_of(DataLoader(DATA, sampler=OwnOrder()), 1)
    assert order is not None
    assert draw(order, DataLoader(DATA, shuffle=True)) is None


# -- whole runs -------------------------------------------------------------------------------------------------------

WHOLE = 24


def life(folder: Path, name: str, ranks: int, batch: int, stop: int | None, kind: str) -> tuple[list[Any], list[str]]:
    """One life on this rank: ``(epoch, sample ids)`` of each step, and what was warned of."""
    import warnings

    def make() -> Any:
        data = Augmented(WHOLE)
        if kind == "shuffled":
            return DataLoader(data, batch_size=batch, shuffle=True)
        if kind == "2 workers":
            return DataLoader(data, batch_size=batch, shuffle=True, num_workers=2)
        return DataLoader(data, batch_size=batch)

    settings: dict[str, Any] = {"max_epochs": 2, "strategy": strategy(name, ranks), "devices": ranks}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = run(folder, make, [stop], **settings)
    return [(step[0], step[2]) for step in model.seen], [str(one.message) for one in caught]


@pytest.mark.ranks
@pytest.mark.parametrize(
    "kind", ["shuffled", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("2 workers", "in order"))]
)
@pytest.mark.parametrize(
    "lives",
    [
        [("ddp", 2, 2, 3), ("single", 1, 2, 6), ("ddp", 3, 2, None)],
        [("single", 1, 4, 2), ("ddp", 2, 2, 4), ("ddp", 2, 2, None)],
        [("fsdp2", 2, 4, 1), ("single", 1, 8, None)],
        [("single", 1, 4, 1), ("single", 1, 2, 3), ("single", 1, 2, None)],
    ],
    ids=lambda lives: "-".join(f"{ranks}x{batch}" for _, ranks, batch, _ in lives),
)
def test_epoch_goes_on_over_other_ranks_and_batches(
    tmp_path: Path, lives: list[tuple[str, int, int, int | None]], kind: str
) -> None:
    used: dict[int, list[int]] = {}
    for name, ranks, batch, stop in lives:
        results = run_forks(life, tmp_path, name, ranks, batch, stop, kind, world_size=ranks)
        for steps in zip(*(result[0] for result in results), strict=True):
            epoch = steps[0][0]
            used.setdefault(epoch, []).extend(sample for step in steps for sample in step[1])
    assert sorted(used[0]) == list(range(WHOLE))
    assert sorted(used[1]) == list(range(WHOLE))
    if kind == "in order" and lives[0][0] == "single":
        assert [set(used[0][:8])] == [set(range(8))]
    warned = [text for _, texts in results[:1] for text in texts]
    changed = lives[-1][1:3] != lives[-2][1:3]
    assert any("each of the others once" in text for text in warned) == changed


def stateful(folder: Path, ranks: int, stop: int | None) -> tuple[list[Any], list[str]]:
    """One life with a loader that has a state of its own."""
    import warnings

    settings: dict[str, Any] = {"strategy": strategy("ddp" if ranks > 1 else "single", ranks), "devices": ranks}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = run(folder, lambda: Remembering(Augmented(), batch_size=4), [stop], max_epochs=1, **settings)
    return [step[1:3] for step in model.seen], [str(one.message) for one in caught]


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [(2, 1), (1, 2)])
def test_loader_with_a_state_of_its_own_begins_the_epoch_anew_on_other_ranks(
    tmp_path: Path, ranks: tuple[int, int]
) -> None:
    run_forks(stateful, tmp_path, ranks[0], 2, world_size=ranks[0])
    results = run_forks(stateful, tmp_path, ranks[1], None, world_size=ranks[1])
    for seen, _ in results:
        assert seen[0] == (0, [0, 1, 2, 3])
        assert len(seen) == {1: 6, 2: 3}[ranks[1]]
    assert sum("begins anew, at its first batch, for Remembering" in text for text in results[0][1]) == 1


class Averaging(Recording):
    """Logs what depends on the samples alone, so that its value for an epoch is known."""

    def __init__(self, stop: int | None) -> None:
        super().__init__(stop)
        self.mean = MeanMetric()
        self.total = SumMetric()
        self.ends: list[dict[str, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["id"].float()
        self.log("id", ids.mean(), on_step=False, on_epoch=True, sync_dist=True, batch_size=len(ids))
        self.log("most", ids.max(), on_step=False, on_epoch=True, sync_dist=True, reduce_fx="max", batch_size=1)
        if batch_idx == 0:
            self.log("once", torch.tensor(5.0), on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        self.mean(ids)
        self.total(ids)
        self.log_dict({"mean": self.mean, "total": self.total}, on_step=False, on_epoch=True, batch_size=len(ids))
        return super().training_step(batch, batch_idx)

    def on_fit_end(self) -> None:
        self.ends.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})


def averages(folder: Path, ranks: int, stop: int | None) -> list[dict[str, float]]:
    """One life on this rank: what it had logged at the end."""
    model = Averaging(stop)
    settings: dict[str, Any] = {"strategy": strategy("ddp" if ranks > 1 else "single", ranks), "devices": ranks}
    trainer = make_trainer(folder, checkpoint_every(folder / "run", 1), settle(), **settings)
    with suppress(Stop):
        trainer.fit(model, DataLoader(Augmented(WHOLE), batch_size=2), ckpt_path="last")
    return model.ends


@pytest.mark.ranks
@pytest.mark.parametrize("lives", [[(2, 3), (1, None)], [(1, 4), (2, None)], [(3, 2), (2, None)]])
def test_epoch_has_logged_all_its_samples_over_other_ranks(tmp_path: Path, lives: list[tuple[int, int | None]]) -> None:
    for ranks, stop in lives:
        results = run_forks(averages, tmp_path, ranks, stop, world_size=ranks)
    mean = sum(range(WHOLE)) / WHOLE
    for ends in results:
        assert ends == [{"id": mean, "most": WHOLE - 1, "once": 5.0, "mean": mean, "total": sum(range(WHOLE))}]
