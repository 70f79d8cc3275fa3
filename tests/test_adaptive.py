"""The schedules that go by cost, failures and the loss, as values: no clock, no ranks, no Trainer."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from lightning_resilience.adaptive import AdaptiveDecider, AdaptiveSchedule
from lightning_resilience.errors import SetupError
from lightning_resilience.loss_trend import LossTrend
from lightning_resilience.loss_variance import LossVariance
from lightning_resilience.manifest import MILESTONE
from lightning_resilience.schedule import Decider, EverySeconds, EverySteps, FirstOf, Progress, Schedule, check_schedule

NAN, INF = math.nan, math.inf
START = Progress(0, 0.0)


def noise(seed: int = 0, deviation: float = 0.1, level: float = 2.0) -> Iterable[float]:
    rng = random.Random(seed)
    while True:
        yield level + rng.gauss(0.0, deviation)


def losses(count: int, **kwargs: Any) -> list[float]:
    return [loss for loss, _ in zip(noise(**kwargs), range(count), strict=False)]


def saves(decider: Decider, values: Iterable[float], *, step: float = 1.0, cost: tuple[float, float] = (0.5, 5.0)):
    """Train on ``values``, one step each, and save whenever that is due: the steps saved, with the decisions."""
    last, made = START, []
    committed = INF
    for number, loss in enumerate(values, start=1):
        now = Progress(number, number * step)
        decider.see_loss(loss)
        if now.seconds >= committed:
            decider.see_save(*cost)
            committed = INF
        decision = decider.decide(now, last) if committed == INF else None
        if decision is not None:
            decider.see_start()
            made.append((number, decision))
            last, committed = now, now.seconds + cost[1]
    return made


def gaps(made: list[tuple[int, Any]]) -> list[int]:
    steps = [0, *(step for step, _ in made)]
    return [after - before for before, after in itertools.pairwise(steps)]


# -- the interval -----------------------------------------------------------------------------------------------------


def informed(rule: AdaptiveSchedule, stall: float, commit: float, failures: int, seconds: float) -> AdaptiveDecider:
    decider = rule.decider()
    decider.see_failures(failures, seconds)
    for _ in range(3):
        decider.see_save(stall, commit)
    return decider


@pytest.mark.parametrize(
    ("stall", "commit", "failures", "hours", "interval"),
    [
        (0.5, 5.0, 99, 99.5, math.sqrt(2 * 0.5 * 3600 * 101.9 / 99.5)),  # √(2·C·M), M = (2.4 h + 99.5 h) / 99.5
        (10.0, 20.0, 999, 999.5, 1000.0),  # C/q: saves may take one percent of the time
        (0.1, 300.0, 999, 999.5, 300.0),  # D: there is one save at a time
        (5.0, 5.0, 0, 10_000.0, 1800.0 - 5.0 - 0.25),  # RPO, less what it takes until the save is committed
        (60.0, 100.0, 999, 999.5, 1800.0 - 100.0 - 0.25),  # RPO before the budget, which would ask for 6000 s
        (60.0, 4000.0, 999, 999.5, 900.0),  # half the RPO where a save takes longer than that allows for
    ],
)
def test_interval_is_youngs_between_the_promises(
    stall: float, commit: float, failures: int, hours: float, interval: float
) -> None:
    decider = informed(AdaptiveSchedule(), stall, commit, failures, hours * 3600)
    plan = decider.plan(0.0)
    assert plan.interval == pytest.approx(interval)
    assert plan.latest <= 1800 - min(commit, 900)
    assert plan.earliest <= plan.interval <= plan.latest


def test_failures_shorten_the_interval_and_time_without_any_lengthens_it() -> None:
    intervals = [
        informed(AdaptiveSchedule(), 0.1, 1.0, failures, 86400.0).plan(0.0).interval for failures in (0, 1, 5, 50)
    ]
    assert intervals == sorted(intervals, reverse=True)
    assert len(set(intervals)) == 4
    decider = informed(AdaptiveSchedule(), 0.1, 1.0, 5, 3600.0)
    decider.decide(Progress(1, 100.0), Progress(0, 99.0))
    assert decider.plan(100_000.0).interval > decider.plan(101.0).interval


def test_first_save_of_a_process_does_not_count_once_there_are_others() -> None:
    decider = AdaptiveSchedule().decider()
    decider.see_save(9.0, 90.0)
    assert decider.plan(0.0).earliest >= 900  # the only one there is
    for _ in range(2):
        decider.see_save(0.5, 5.0)
    assert decider.plan(0.0).earliest == pytest.approx(0.7 * decider.plan(0.0).interval)
    restarted = AdaptiveSchedule().decider()
    restarted.restore(decider.state())
    before = restarted.plan(0.0)
    restarted.see_save(9.0, 90.0)
    assert restarted.plan(0.0) == before


def test_gap_stays_below_the_rpo_whatever_steps_and_answers_take() -> None:
    rng = random.Random(4)
    for _ in range(40):
        rule = AdaptiveSchedule(rpo_seconds=rng.choice([60.0, 600.0, 1800.0]))
        commit, ahead, step = rng.uniform(0, 0.2) * rule.rpo_seconds, rng.randrange(4), rng.uniform(0.1, 5.0)
        decider = informed(rule, rng.uniform(0.01, 30.0), commit, 0, 1e7)
        last, now, number, made = START, 0.0, 0, []
        due_in = None
        for _ in range(int(5 * rule.rpo_seconds / step)):
            now, number = now + step * rng.uniform(0.8, 1.2), number + 1
            decider.see_loss(rng.gauss(2.0, 0.1))
            decision = decider.decide(Progress(number, now), last, ahead)
            if due_in is None and decision is not None:
                due_in = ahead  # ranks hear of it so many steps later
            elif due_in is not None:
                due_in -= 1
            if due_in == 0:
                made.append(now - last.seconds)
                last, due_in = Progress(number, now), None
                decider.see_start()
        assert made
        assert max(made) + commit <= rule.rpo_seconds, rule


# -- the loss ---------------------------------------------------------------------------------------------------------


def test_calm_loss_picks_the_moment_and_a_rough_one_waits_for_the_end() -> None:
    decider = informed(AdaptiveSchedule(window=20), 0.5, 5.0, 99, 99 * 28800.0)
    calm = losses(3000, deviation=0.1)
    for loss in calm:
        decider.see_loss(loss)
    quiet, rough = copy.deepcopy(decider), copy.deepcopy(decider)
    for value in losses(30, deviation=0.03):
        quiet.see_loss(value)
    for value in losses(30, deviation=0.15):
        rough.see_loss(value)
    plan = quiet.plan(0.0)
    assert plan.earliest == pytest.approx(0.7 * plan.interval)
    early = quiet.decide(Progress(1, 0.75 * plan.interval), START)
    assert early is not None
    assert "the loss calm" in early.reason
    plan = rough.plan(0.0)
    assert plan.interval < quiet.plan(0.0).interval  # unusual scatter: more often
    assert rough.decide(Progress(1, 1.2 * plan.interval), START) is None
    forced = rough.decide(Progress(2, 1.41 * plan.interval), START)
    assert forced is not None
    assert "not calm" in forced.reason


def test_decision_stays_until_the_save_is_made() -> None:
    decider = informed(AdaptiveSchedule(), 0.5, 5.0, 99, 99 * 28800.0)
    at = decider.plan(0.0).latest + 1
    decisions = [decider.decide(Progress(step, at + step / 1000), START) for step in range(1, 50)]
    assert all(decisions)


@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (4.0, 0.0), (1000.0, 0.0), (0.003, -7.0), (2.0, 50.0)])
@pytest.mark.parametrize("rule", [AdaptiveSchedule(window=20, rpo_seconds=200), AdaptiveSchedule(window=50)])
def test_scaling_and_shifting_the_loss_changes_nothing(rule: AdaptiveSchedule, scale: float, shift: float) -> None:
    values = [
        2.0 * math.exp(-step / 900) + loss for step, loss in enumerate(losses(6000, seed=3, deviation=0.05, level=0.0))
    ]
    values[2000] += 30.0
    reference = saves(rule.decider(), values)
    changed = saves(rule.decider(), [scale * value + shift for value in values])
    assert len(reference) > 5
    assert [step for step, _ in changed] == [step for step, _ in reference]
    assert [decision.labels for _, decision in changed] == [decision.labels for _, decision in reference]
    assert any(decision.labels for _, decision in reference)
    assert not all(decision.labels for _, decision in reference)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_losses_that_are_not_finite_leave_the_statistics_alone(bad: float) -> None:
    clean, dirty = LossTrend(20), LossTrend(20)
    for number, loss in enumerate(losses(500)):
        clean.see(loss)
        dirty.see(loss)
        if number % 7 == 0:
            dirty.see(bad)
            assert not dirty.is_calm()
            assert dirty.milestone() is None
    dirty.see(2.0)
    clean.see(2.0)
    assert dirty.state() == clean.state()
    assert all(math.isfinite(value) for value in clean.state().values())


def test_a_loss_that_stays_nan_neither_bunches_saves_nor_stops_them() -> None:
    rule = AdaptiveSchedule(window=20, rpo_seconds=300)
    made = saves(rule.decider(), [*losses(1000), *[NAN] * 2000, *losses(1000, seed=1)])
    assert max(gaps(made)) <= 300
    assert min(gaps(made)[1:]) >= 50  # C/q
    during = [decision for step, decision in made if 1000 < step <= 3000]
    assert during
    assert not any(decision.labels for decision in during)


def test_one_spike_counts_as_one_step_and_a_lasting_change_is_followed() -> None:
    trend = LossTrend(20)
    for loss in losses(1000):
        trend.see(loss)
    before = trend.state()["mean"]
    trend.see(1e6)
    for loss in losses(3, seed=9):
        trend.see(loss)
    assert abs(trend.state()["mean"] - before) < 0.3
    for loss in losses(400, level=5.0, seed=2):
        trend.see(loss)
    assert trend.state()["mean"] == pytest.approx(5.0, abs=0.1)


def test_constant_loss_is_calm_and_needs_no_division() -> None:
    trend = LossTrend(10)
    for _ in range(200):
        trend.see(3.0)
    assert trend.is_calm()
    assert trend.volatility == 1.0


# -- milestones -------------------------------------------------------------------------------------------------------


def test_milestones_are_new_bests_and_one_for_each_plateau() -> None:
    rule = AdaptiveSchedule(window=20, rpo_seconds=100)
    falling = [2.0 - step / 1000 for step in range(1000)]
    flat = [1.0] * 4000
    scatter = losses(5000, level=0.0, deviation=0.02)
    made = saves(rule.decider(), [trend + extra for trend, extra in zip([*falling, *flat], scatter, strict=True)])
    marked = [step for step, decision in made if decision.labels == (MILESTONE,)]
    assert len([step for step in marked if 100 < step <= 1000]) >= 5
    plateau = [step for step in marked if step > 1200]
    assert len(plateau) == 1


def test_spike_makes_no_milestones_and_the_one_before_it_is_known() -> None:
    """T-01, as far as it is the schedule's: flat, a spike, then nothing but NaN."""
    rule = AdaptiveSchedule(window=5, rpo_seconds=50, max_overhead=0.05)
    flat = losses(400, deviation=0.01)
    spiked = [*flat, *(20 * loss for loss in losses(5)), *[NAN] * 200]
    made = saves(rule.decider(), spiked, cost=(0.1, 1.0))
    marked = [step for step, decision in made if decision.labels]
    assert marked
    assert max(marked) <= 400
    assert min(gaps(made)[1:]) >= 2


# -- state ------------------------------------------------------------------------------------------------------------

RULES = [
    AdaptiveSchedule(window=20, rpo_seconds=120),
    AdaptiveSchedule(window=50),
    LossVariance(threshold=0.009, near_best=None, window=20, min_seconds=20, max_seconds=200),
    FirstOf(EverySeconds(170), AdaptiveSchedule(window=30), LossVariance(window=10, min_seconds=99)),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("resumed_at", [1, 4])
def test_saves_after_a_resume_are_those_of_the_run_that_was_left_alone(rule: Schedule, resumed_at: int) -> None:
    """T-03: the state that the save itself keeps is enough."""
    values = losses(2500, seed=7)
    state: dict[str, Any] = {}
    alone, last, made = rule.decider(), START, []
    pending = INF
    for number, loss in enumerate(values, start=1):
        now = Progress(number, float(number))
        alone.see_loss(loss)
        if now.seconds >= pending:
            alone.see_save(0.5, 3.0)
            pending = INF
        if (decision := alone.decide(now, last)) is not None:
            made.append((number, decision))
            if len(made) == resumed_at:
                state = pickle.loads(pickle.dumps(alone.state()))
                costs = min(resumed_at - 1, 8)
            alone.see_start()
            last, pending = now, number + 3.0
    at = made[resumed_at - 1][0]

    again, last, after = rule.decider(), Progress(at, float(at)), []
    again.restore(state)
    again.see_start()
    again.see_failures(0, float(at - 1))  # the decider was first asked at second 1
    # A process's first save does not count where others are known, so the second life is told as the first was.
    pending = at + 3.0
    if costs:
        again.see_save(99.0, 99.0)
    again.decide(Progress(at, float(at)), last)
    for number, loss in enumerate(values[at:], start=at + 1):
        now = Progress(number, float(number))
        again.see_loss(loss)
        if now.seconds >= pending:
            again.see_save(0.5, 3.0)
            pending = INF
        if (decision := again.decide(now, last)) is not None:
            after.append((number, decision))
            again.see_start()
            last, pending = now, number + 3.0
    assert len(after) > 3
    assert after == made[resumed_at:]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_state_of_another_rule_is_passed_over(rule: Schedule) -> None:
    states: list[dict[str, Any]] = [{}, {"parts": [{}]}]
    for other in (*RULES, EverySeconds(5), AdaptiveSchedule(window=7)):
        decider = other.decider()
        for loss in losses(30):
            decider.see_loss(loss)
        states.append(decider.state())
    for state in states:
        decider = rule.decider()
        decider.restore(state)
        assert saves(decider, losses(600))


# -- other rules ------------------------------------------------------------------------------------------------------


class Odd(Schedule):
    """A rule of somebody's own, with ``due`` alone."""

    def due(self, now: Progress, last: Progress) -> str | None:
        return "odd" if now.step % 2 and now.step > last.step else None


def test_rule_with_due_alone_goes_on_working() -> None:
    made = saves(Odd().decider(), losses(9), cost=(0.0, 1.0))
    assert [(step, decision.reason, decision.labels) for step, decision in made] == [
        (step, "odd", ()) for step in (1, 3, 5, 7, 9)
    ]
    both = FirstOf(Odd(), AdaptiveSchedule(window=5, rpo_seconds=30)).decider()
    assert both.wants_losses
    assert not FirstOf(Odd(), EverySeconds(3)).decider().wants_losses
    assert {decision.reason for _, decision in saves(both, losses(40), cost=(0.0, 1.0))} >= {"odd"}


def test_loss_variance_is_the_plain_rule_between_its_bounds() -> None:
    """T-02: a loss that is never calm is saved at the longest interval, one that always is at the shortest."""
    rule = LossVariance(threshold=1e-4, near_best=None, window=10, min_seconds=30, max_seconds=200)
    assert set(gaps(saves(rule.decider(), losses(2000, deviation=0.1)))) == {200}
    assert set(gaps(saves(rule.decider(), losses(2000, deviation=1e-4)))[1:]) == {30}
    near = LossVariance(threshold=None, near_best=0.5, window=10, min_seconds=30, max_seconds=200)
    assert set(gaps(saves(near.decider(), losses(2000)))) == {30}
    rising = [2.0 + step / 50 for step in range(2000)]
    assert set(gaps(saves(near.decider(), rising))[2:]) == {200}
    assert set(gaps(saves(near.decider(), [NAN] * 2000))) == {200}


def test_variance_of_the_window_is_exact_after_many_losses() -> None:
    decider = LossVariance(window=10).decider()
    values = [1e6 + loss for loss in losses(5003)]
    for loss in values:
        decider.see_loss(loss)
    window = values[-10:]
    mean = math.fsum(window) / 10
    assert decider._squares / 10 == pytest.approx(math.fsum((loss - mean) ** 2 for loss in window) / 10, rel=1e-6)


@pytest.mark.parametrize(("before", "after"), [(30, 10), (10, 30), (10, 10)])
@pytest.mark.parametrize("seen", [4, 10, 25, 100])
def test_another_window_goes_on_with_the_losses_that_it_knows(before: int, after: int, seen: int) -> None:
    old = LossVariance(window=before).decider()
    values = [2.0 + loss for loss in losses(200)]
    for loss in values[:seen]:
        old.see_loss(loss)
    new = LossVariance(window=after).decider()
    new.restore(old.state())
    for loss in values[seen:]:
        new.see_loss(loss)
    window = values[-after:]
    mean = math.fsum(window) / after
    assert new._mean == pytest.approx(mean)
    assert new._squares == pytest.approx(math.fsum((loss - mean) ** 2 for loss in window), rel=1e-6)
    assert 1.5 < new._best <= mean + 1


def test_unstable_loss_shortens_the_interval_but_never_below_the_least() -> None:
    """T-02 for the adaptive rule."""
    rule = AdaptiveSchedule(window=20, rpo_seconds=400)
    calm = saves(rule.decider(), losses(8000))
    wild = [loss * (1 + 30 * (step // 300 % 2)) for step, loss in enumerate(losses(8000, level=0.0))]
    unstable = saves(rule.decider(), wild)
    for made in (calm, unstable):
        assert max(gaps(made)) <= 400
        assert min(gaps(made)[2:]) >= 50  # C/q
    assert sum(gaps(unstable)[2:]) / len(unstable) < sum(gaps(calm)[2:]) / len(calm)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: AdaptiveSchedule(max_overhead=0), "max_overhead=0"),
        (lambda: AdaptiveSchedule(max_overhead=1.5), r"max_overhead=1\.5"),
        (lambda: AdaptiveSchedule(max_overhead=True), "max_overhead=True"),
        (lambda: AdaptiveSchedule(rpo_seconds=0), "rpo_seconds=0"),
        (lambda: AdaptiveSchedule(rpo_seconds=NAN), "rpo_seconds=nan"),
        (lambda: AdaptiveSchedule(rpo_seconds="1h"), "rpo_seconds='1h'"),
        (lambda: AdaptiveSchedule(window=1), "window=1"),
        (lambda: AdaptiveSchedule(window=2.5), r"window=2\.5"),
        (lambda: AdaptiveSchedule(prior_mtbf_seconds=-1), "prior_mtbf_seconds=-1"),
        (lambda: LossVariance(threshold=-1), "threshold=-1"),
        (lambda: LossVariance(near_best="x"), "near_best='x'"),
        (lambda: LossVariance(threshold=None, near_best=None), "no rule"),
        (lambda: LossVariance(min_seconds=60, max_seconds=60), "max_seconds=60"),
        (lambda: LossVariance(min_seconds=0), "min_seconds=0"),
    ],
)
def test_bad_argument_is_refused_by_name_and_value(make: Callable[[], object], named: str) -> None:
    with pytest.raises(SetupError, match=named):
        make()


@pytest.mark.parametrize("rule", [AdaptiveSchedule(), LossVariance(), FirstOf(EverySteps(3), AdaptiveSchedule())])
def test_a_rule_is_a_value_and_its_repr_is_what_one_would_type(rule: Schedule) -> None:
    check_schedule(rule)
    assert pickle.loads(pickle.dumps(rule)) == rule
    assert eval(repr(rule)) == rule
    decider = rule.decider()
    saves(decider, losses(300))
    assert rule.decider() is not decider
    assert pickle.loads(pickle.dumps(rule)) == rule


def test_rule_alone_answers_as_in_a_run_of_which_nothing_is_known() -> None:
    assert AdaptiveSchedule().due(Progress(5, 29.9), START) is None
    assert AdaptiveSchedule().due(Progress(5, 30.0), START) == "30.0 s since the last save"
    assert "since the last save" in str(AdaptiveSchedule().due(Progress(5, 1799.0), START))
    assert LossVariance().due(Progress(5, 1799.0), START) is None
    assert LossVariance().due(Progress(5, 1800.0), START)
