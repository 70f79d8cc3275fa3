"""What a save says of a loader's place: its keys are part of the on-disk format."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_resilience.order import Order, Share
from lightning_resilience.position import DataState, Moment, Position, Start
from lightning_resilience.track import track, track_of
from test_exact import Augmented, Remembering, Stream


class Alone:
    """A guide of one rank that begins at the beginning."""

    rank = 0
    ranks = 1
    shared_seed = None
    reading = True
    reads_ahead = False
    undecided = False

    def position_of(self, loader: object) -> Position | None:
        return None


def distributed() -> Any:
    data = Augmented(8)
    return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 1, 0))


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Augmented(8), batch_size=2),
        lambda: DataLoader(Augmented(8), batch_size=2, shuffle=True, generator=torch.Generator()),
        lambda: DataLoader(Augmented(8), batch_size=2, shuffle=True, num_workers=1),
        lambda: DataLoader(Stream(), batch_size=2),
        lambda: Remembering(Augmented(8), batch_size=2),
        distributed,
    ],
    ids=["in order", "shuffled", "with a worker", "iterable", "own state", "distributed"],
)
@pytest.mark.parametrize("read", [0, 2])
def test_a_saved_position_has_the_keys_of_format_1(make: Any, read: int) -> None:
    loader = track(make(), Alone())
    batches = iter(loader)
    for _ in range(read):
        next(batches)
    found = track_of(loader)
    assert found is not None
    saved = found.position(0)
    assert list(saved) == [
        *("passes", "count", "start", "workers", "own", "parts", "read_with"),
        *("order", "share", "offset", "workers_at_start", "generators", "samplers"),
    ]
    assert saved.keys() == Position.__required_keys__
    assert saved["count"] == read
    assert Share.__required_keys__ <= saved["share"].keys() <= Share.__required_keys__ | Share.__optional_keys__
    if saved["order"] is not None:
        assert saved["order"].keys() == Order.__required_keys__
    if read:
        assert saved["start"] is not None
        assert Start.__required_keys__ <= saved["start"].keys() <= Start.__required_keys__ | Start.__optional_keys__


@pytest.mark.parametrize(
    ("of", "required", "optional"),
    [
        (DataState, {"loaders", "cycled", "reloaded_in", "shared_seed"}, set()),
        (Moment, {"passes", "count", "start", "workers", "own", "parts", "read_with"}, set()),
        (Start, {"process", "own", "samplers", "seeded", "made_with"}, {"again"}),
        (Share, {"ranks", "batch_size", "drop_last"}, {"workers"}),
        (Order, {"distributed", "base", "length", "samples"}, set()),
    ],
)
def test_keys_on_disk_stay_what_they_are(of: Any, required: set[str], optional: set[str]) -> None:
    assert of.__required_keys__ == required
    assert of.__optional_keys__ == optional
