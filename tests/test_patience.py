"""Trying again: how often, with which pauses, and what is not tried again."""

from __future__ import annotations

import random
import threading
import time

import pytest

from lightning_resilience.errors import CheckpointCorrupt, TierDenied, TierUnavailable
from lightning_resilience.patience import Patience


class Failing:
    """A call that fails so often, then returns how often it was called."""

    def __init__(self, times: int, error: type[Exception] = TierUnavailable) -> None:
        self.left = times
        self.calls = 0
        self.error = error

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.left:
            raise self.error("not now")
        return self.calls


@pytest.fixture
def pauses(monkeypatch) -> list[float]:
    """The pauses that were made, each as long as chance allows."""
    made: list[float] = []
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    monkeypatch.setattr(time, "sleep", made.append)
    return made


@pytest.mark.parametrize(
    ("failures", "patience", "expected"),
    [
        (0, Patience(), []),
        (1, Patience(), [0.5]),
        (5, Patience(), [0.5, 1, 2, 4, 8]),
        (4, Patience(attempts=5, first=3, longest=10), [3, 6, 10, 10]),
    ],
)
def test_pauses_double_up_to_the_longest(
    pauses: list[float], failures: int, patience: Patience, expected: list
) -> None:
    assert patience(Failing(failures)) == failures + 1
    assert pauses == expected


def test_patience_ends_with_the_last_attempt_and_no_pause_after_it(pauses: list[float]) -> None:
    failing = Failing(99)
    with pytest.raises(TierUnavailable, match="not now"):
        Patience(attempts=3, first=1)(failing)
    assert (failing.calls, pauses) == (3, [1, 2])


def test_pauses_vary_between_nothing_and_the_longest(monkeypatch) -> None:
    asked: list[tuple[float, float]] = []
    monkeypatch.setattr(random, "uniform", lambda low, high: asked.append((low, high)) or 0.0)
    Patience(attempts=4, first=1)(Failing(3))
    assert asked == [(0, 1), (0, 2), (0, 4)]


@pytest.mark.parametrize("error", [FileNotFoundError, TierDenied, CheckpointCorrupt, ValueError])
def test_there_is_no_patience_with_what_does_not_go_away(pauses: list[float], error: type[Exception]) -> None:
    failing = Failing(1, error)
    with pytest.raises(error):
        Patience()(failing)
    assert (failing.calls, pauses) == (1, [])


def test_stop_ends_a_pause_at_once(monkeypatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    stop = threading.Event()
    failing = Failing(99)
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    with pytest.raises(TierUnavailable):
        Patience(first=60, longest=60, stop=stop)(failing)
    assert time.monotonic() - began < 30
    assert failing.calls == 1
