"""When a loss is off its course, whatever its scale, and when it is back."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import pytest

from lightning_resilience import SetupError
from lightning_resilience.divergence import SETTLES, Course, Rollback

WINDOW = 50
NAN, INF = float("nan"), float("inf")


def falling(count: int, seed: int = 0, noise: float = 0.05, level: float = 3.0) -> list[float]:
    """A loss as training has it: falling ever more slowly, with noise."""
    rng = random.Random(seed)
    return [level + 4 / (1 + step / 100) + rng.gauss(0, noise) for step in range(count)]


def follow(losses: Iterable[float], course: Course | None = None, first: int = 0) -> tuple[Course, list[int | None]]:
    course = course or Course(WINDOW)
    since = []
    for step, loss in enumerate(losses, first):
        course.see(loss, step)
        since.append(course.off_since)
    return course, since


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.001, 0.05, 0.5])
def test_ordinary_training_is_on_course(seed: int, noise: float) -> None:
    _, since = follow(falling(3000, seed, noise))
    assert set(since) == {None}


def test_single_outliers_are_passed_over() -> None:
    losses = falling(2000)
    for step in range(200, 2000, 97):
        losses[step] += 50
    assert set(follow(losses)[1]) == {None}


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e-6, 0.0), (1e6, -1e9), (0.01, 100.0)])
def test_a_spike_is_seen_from_its_beginning_to_a_window_after_its_end_on_any_scale(scale: float, shift: float) -> None:
    losses = falling(1000)
    losses[600:640] = [loss + 2 for loss in losses[600:640]]
    course, since = follow(scale * loss + shift for loss in losses)
    assert since[602] is None
    assert set(since[603:639]) == {600}
    assert since[640 + WINDOW - 2] == 600
    assert set(since[640 + WINDOW :]) == {None}
    assert course.off_for == 0


def test_a_spike_early_in_training_is_seen_from_its_beginning() -> None:
    losses = [2.0 + 0.01 * (step % 3) for step in range(30)]
    _, since = follow([*losses, *(20 * loss for loss in losses[:5]), NAN])
    assert since[-1] == 30
    assert since[29] is None


def test_how_long_it_lasts_is_counted_while_it_is_not_back() -> None:
    losses = falling(600)
    course, _ = follow(losses + [loss + 5 for loss in losses[-20:]])
    assert course.off_for == 20
    follow(losses[-3:], course, 620)
    assert course.off_for == 23
    course.see(losses[-1], 623)
    assert course.off_for == 0
    assert course.off_since == 600


@pytest.mark.parametrize("bad", [float("nan"), 100.0])
def test_losses_that_are_off_now_and_then_are_a_break_in_how_long_it_lasts(bad: float) -> None:
    noise = random.Random(0)
    course = Course()
    for step in range(2000):
        course.see(bad if step > 200 and step % 10 < 1 + 4 * (step < 220) else 1.0 + noise.gauss(0, 0.05), step)
        assert course.off_for < 15


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("before", [0, 3, 500])
def test_a_loss_that_is_not_finite_is_off_course_at_once(bad: float, before: int) -> None:
    losses = falling(before + WINDOW + 5)
    course, since = follow([*losses[:before], bad, bad])
    assert since[before:] == [before, before]
    assert course.off_for == 2
    _, since = follow(losses[before:], course, before + 2)
    assert since[-1] is None


def test_a_new_level_is_the_course_in_the_end() -> None:
    course, _ = follow(falling(600))
    _, since = follow(falling(SETTLES * WINDOW + 3 * WINDOW, level=9), course, 600)
    assert since[10] is not None
    assert since[-1] is None
    follow([50.0] * 10, course)
    assert course.off_since is not None  # which is known again


def test_a_loss_that_was_flat_for_long_may_move_a_little() -> None:
    assert set(follow([0.5] * 500 + [0.5000001] * 100)[1]) == {None}
    assert set(follow([*falling(200), *[0.0] * 3000, *[0.001] * 100])[1]) == {None}


def test_a_flat_loss_has_no_deviation_and_is_on_course() -> None:
    assert set(follow([2.0] * 500)[1]) == {None}


def test_it_goes_on_from_its_state() -> None:
    losses = falling(700)
    losses[400:] = [loss + 3 for loss in losses[400:]]
    _, whole = follow(losses)
    for cut in (10, 401, 402, 450):
        first, _ = follow(losses[:cut])
        second = Course(WINDOW)
        second.restore(json.loads(json.dumps(first.state())))
        assert follow(losses[cut:], second, cut)[1] == whole[cut:]
    other = Course(WINDOW + 1)
    other.restore(first.state())
    assert other.state() == Course(WINDOW + 1).state()


@pytest.mark.parametrize(
    "arguments", [{"patience": 0}, {"patience": 1000}, {"skip_batches": -1}, {"most": 1.5}, {"most": True}]
)
def test_arguments_that_cannot_be_meant_are_refused(arguments: dict[str, object]) -> None:
    (name,) = arguments
    with pytest.raises(SetupError, match=f"Rollback\\({name}="):
        Rollback(**arguments)  # type: ignore[arg-type]
