"""When to save, as tables."""

from __future__ import annotations

import pickle
from datetime import timedelta

import pytest

from lightning_resilience.errors import SetupError
from lightning_resilience.schedule import EverySeconds, EverySteps, FirstOf, Progress, Schedule, check_schedule

START = Progress(0, 0.0)
STEPS, SECONDS = EverySteps(10), EverySeconds(30)


@pytest.mark.parametrize(
    ("schedule", "now", "last", "due"),
    [
        (STEPS, Progress(9, 0), START, None),
        (STEPS, Progress(10, 0), START, "every 10 steps"),
        (STEPS, Progress(10, 99), Progress(10, 0), None),  # saved at this very step, whoever asked
        (STEPS, Progress(11, 0), Progress(9, 0), None),  # multiples, not distances
        (STEPS, Progress(20, 0), Progress(19, 0), "every 10 steps"),
        (STEPS, Progress(0, 0), START, None),
        (SECONDS, Progress(5, 29.9), START, None),
        (SECONDS, Progress(5, 30.0), START, "30.0 s since the last save"),
        (SECONDS, Progress(5, 99.0), Progress(4, 60.0), "39.0 s since the last save"),
        (SECONDS, Progress(5, 99.0), Progress(5, 0.0), None),  # no step since: nothing new to save
        (EverySeconds(0), Progress(1, 0.0), START, "0.0 s since the last save"),
        (EverySeconds(timedelta(minutes=1)), Progress(1, 59.0), START, None),
        (EverySeconds(timedelta(minutes=1)), Progress(1, 61.0), START, "61.0 s since the last save"),
        (FirstOf(STEPS, SECONDS), Progress(9, 29.0), START, None),
        (FirstOf(STEPS, SECONDS), Progress(10, 29.0), START, "every 10 steps"),
        (FirstOf(STEPS, SECONDS), Progress(9, 31.0), START, "31.0 s since the last save"),
        (FirstOf(STEPS, SECONDS), Progress(10, 31.0), START, "every 10 steps; 31.0 s since the last save"),
        (FirstOf(schedules=[FirstOf(STEPS), SECONDS]), Progress(10, 0.0), START, "every 10 steps"),
    ],
)
def test_a_save_is_due_with_its_reason(schedule: Schedule, now: Progress, last: Progress, due: str | None) -> None:
    assert schedule.due(now, last) == due


@pytest.mark.parametrize(
    ("schedule", "alone", "agreed"),
    [
        (STEPS, STEPS, None),
        (SECONDS, None, SECONDS),
        (FirstOf(STEPS, SECONDS), FirstOf(STEPS), FirstOf(SECONDS)),
        (FirstOf(STEPS, EverySteps(7)), FirstOf(STEPS, EverySteps(7)), None),
        (FirstOf(SECONDS), None, FirstOf(SECONDS)),
        (
            FirstOf(STEPS, FirstOf(SECONDS, EverySteps(7))),
            FirstOf(STEPS, FirstOf(EverySteps(7))),
            FirstOf(FirstOf(SECONDS)),
        ),
    ],
)
def test_a_rule_splits_into_what_ranks_decide_alone_and_what_they_agree_on(schedule, alone, agreed) -> None:
    assert schedule.by_step_alone() == alone
    assert schedule.by_agreement() == agreed


def test_the_two_halves_of_a_rule_together_are_the_rule() -> None:
    rule = FirstOf(STEPS, FirstOf(SECONDS, EverySteps(7)), EverySeconds(55))
    alone, agreed = rule.by_step_alone(), rule.by_agreement()
    assert alone is not None
    assert agreed is not None
    fired = 0
    for step in range(1, 80):
        for seconds in range(0, 70, 5):
            now = Progress(step, float(seconds))
            whole = rule.due(now, START)
            assert bool(whole) == bool(alone.due(now, START) or agreed.due(now, START))
            fired += bool(whole)
    assert 0 < fired < 79 * 14


def test_what_ranks_decide_alone_does_not_look_at_their_clocks() -> None:
    alone = FirstOf(STEPS, SECONDS).by_step_alone()
    for step in range(1, 40):
        answers = {alone.due(Progress(step, seconds), START) for seconds in (0.0, 31.0, 1e9)}
        assert len(answers) == 1


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: EverySteps(0), r"n=0\b"),
        (lambda: EverySteps(-5), r"n=-5\b"),
        (lambda: EverySteps(2.5), r"n=2\.5"),
        (lambda: EverySteps(True), r"n=True"),
        (lambda: EverySteps("100"), r"n='100'"),
        (lambda: EverySeconds(-1), r"seconds=-1"),
        (lambda: EverySeconds(float("inf")), r"seconds=inf"),
        (lambda: EverySeconds(float("nan")), r"seconds=nan"),
        (lambda: EverySeconds("60"), r"seconds='60'"),
        (lambda: EverySeconds(True), r"seconds=True"),
        (lambda: EverySeconds(None), r"seconds=None"),
        (lambda: EverySeconds(timedelta(seconds=-3)), r"seconds=-3\.0"),
        (lambda: FirstOf(), r"FirstOf\(\)"),
        (lambda: FirstOf(schedules=[]), r"FirstOf\(\)"),
        (lambda: FirstOf(60), r"^60 is not a schedule"),
        (lambda: FirstOf([STEPS]), r"^\[EverySteps\(n=10\)\] is not a schedule"),
        (lambda: FirstOf(EverySteps), r"EverySteps'> is not a schedule"),
        (lambda: FirstOf(schedules=STEPS), r"schedules=EverySteps\(n=10\)"),
        (lambda: FirstOf(STEPS, None), r"^None is not a schedule"),
        (lambda: check_schedule("hourly"), r"^'hourly' is not a schedule"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(make, named: str) -> None:
    with pytest.raises(SetupError, match=named):
        make()


@pytest.mark.parametrize("schedule", [STEPS, SECONDS, FirstOf(STEPS, SECONDS)])
def test_a_schedule_is_a_value(schedule: Schedule) -> None:
    check_schedule(schedule)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(pickle.loads(pickle.dumps(schedule)))
    with pytest.raises(AttributeError):
        schedule.n = 3


def test_repr_is_what_one_would_type() -> None:
    schedule = FirstOf(STEPS, EverySeconds(0.5))
    assert repr(schedule) == "FirstOf(EverySteps(n=10), EverySeconds(seconds=0.5))"
    assert eval(repr(schedule)) == schedule
