"""What of a loader's data has a state, and how it is given back."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_resilience.worker_state import Stamp, first_part, has_state, parts, restore_states, states_of


class Counter:
    """Something with a state of its own."""

    def __init__(self, count: int = 0, **others: Any) -> None:
        self.count = count
        vars(self).update(others)

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]

    def __call__(self, samples: Any) -> Any:
        return samples


def itself() -> Counter:
    """A dataset that is its own part, as no loop may follow without end."""
    data = Counter()
    vars(data)["dataset"] = data
    return data


def holder(rng: random.Random) -> SimpleNamespace:
    return SimpleNamespace(rng=rng)


class Scrambled(random.Random):
    """Its state is what only it can make something of."""

    def getstate(self) -> Any:
        return "scrambled"


@pytest.mark.parametrize(
    ("dataset", "collate", "names"),
    [
        (None, None, []),
        (range(3), len, []),
        (Counter(), None, ["dataset"]),
        (SimpleNamespace(transform=Counter()), None, ["dataset.transform"]),
        (
            SimpleNamespace(dataset=Counter(transforms=Counter())),
            None,
            ["dataset.dataset", "dataset.dataset.transforms"],
        ),
        (SimpleNamespace(datasets=[Counter(), range(3), Counter()]), None, ["dataset.0", "dataset.2"]),
        (range(3), Counter(), ["collate_fn"]),
        (range(3), Stamp(Counter()), ["collate_fn"]),
        (itself(), None, ["dataset"]),
        (holder(random.Random(0)), None, ["dataset.rng"]),
        (holder(random.SystemRandom()), None, []),
        (holder(Scrambled(0)), None, []),
        (
            SimpleNamespace(datasets=[holder(random.Random(i)) for i in range(64)]),
            None,
            [f"dataset.{i}.rng" for i in range(64)],
        ),
        (SimpleNamespace(datasets=[*(holder(random.Random(i)) for i in range(64)), Counter()]), None, ["dataset.64"]),
    ],
)
def test_parts_of_the_data_that_have_a_state(dataset: Any, collate: Any, names: list[str]) -> None:
    assert list(parts(dataset, collate)) == names


def test_a_class_that_can_only_save_has_no_state() -> None:
    assert has_state(Counter())
    assert not has_state(SimpleNamespace(state_dict=dict))


def test_states_are_given_back_and_a_part_without_one_keeps_what_it_has() -> None:
    before = {"dataset": Counter(3), "dataset.transform": Counter(4)}
    after = {"dataset": Counter(), "collate_fn": Counter(7)}
    restore_states(after, states_of(before))
    assert {name: part.count for name, part in after.items()} == {"dataset": 3, "collate_fn": 7}


@pytest.mark.parametrize(
    ("states", "expected"), [([], False), ([{}], False), ([{"dataset": {}}], True), ([{}, {"dataset": {}}], False)]
)
def test_the_first_worker_tells_whether_copies_have_a_state(states: list[dict[str, Any]], expected: bool) -> None:
    workers = {number: pickle.dumps({"process": {}, "parts": one}) for number, one in enumerate(states)}
    assert first_part(workers, "dataset") == expected
