"""What checkpoints cost and what they are worth, worked out by hand."""

from __future__ import annotations

import pytest

from lightning_resilience.ledger import Life, Record
from lightning_resilience.telemetry import Before, Cost, Telemetry, before
from lightning_resilience.useful import Useful


def life(began: float, first: int, last: int, seconds: float, stalled: float = 0.0) -> Life:
    """One life as a ledger has it."""
    end = {"event": "end", "time": began + seconds, "step": last, "seconds": seconds, "stalled": stalled}
    return Life("x", [{"event": "start", "time": began, "step": first}, end])


COST = Cost(stall=0.5, stage=0.2, persist=4.0, bytes=8 * 10**9)


def test_what_saves_keep_training_still_for_is_not_of_use() -> None:
    useful, told = Useful(began=100.0), Telemetry(None, now=1000.0)
    assert told.goodput(1010.0, useful.seconds(110.0)) == 1.0
    useful.saved((1, 10), began=104.0, stall=0.5)
    useful.saved((2, 20), began=108.0, stall=0.5)
    assert useful.seconds(110.0) == 9.0
    assert told.goodput(1010.0, useful.seconds(110.0)) == pytest.approx(0.9)


def test_what_came_to_nothing_is_what_was_done_since_the_checkpoint_that_a_run_goes_back_to() -> None:
    useful = Useful(began=100.0)
    useful.saved((1, 10), began=110.0, stall=1.0)  # 10 s done
    useful.saved((2, 20), began=121.0, stall=1.0)  # 20 s done
    useful.saved((3, 30), began=132.0, stall=1.0)  # 30 s done
    assert useful.back_to((2, 20), now=135.0) == pytest.approx(12.0)  # 32 s done, 20 s kept
    useful.saved((4, 25), began=140.0, stall=0.0)  # 5 s since: 25 s done
    assert useful.back_to((4, 25), now=141.0) == pytest.approx(1.0)
    assert useful.back_to((0, 5), now=143.0) == pytest.approx(27.0)  # to an earlier life: all of this one
    assert useful.seconds(143.0) == 0.0
    assert useful.wasted == pytest.approx(43.0)


def test_goodput_counts_the_time_that_a_run_was_down_and_the_steps_that_were_done_again() -> None:
    lives = [life(0.0, 0, 100, 100.0, 0.0), life(120.0, 80, 180, 110.0, 10.0)]
    known = before(Record(lives), resumed_at=130)
    assert known == Before(0.0, 80.0 + 50.0, 2)
    told = Telemetry(known, now=250.0)
    assert told.goodput(300.0, useful=50.0) == pytest.approx((130 + 50) / 300)
    assert told.of_commit(COST, True, 300.0, 50.0, (5.0, 7))["resilience/restarts"] == 2


@pytest.mark.parametrize(
    ("lives", "resumed_at", "useful"),
    [
        ([life(0, 0, 100, 100, 0)], 100, 100),
        ([life(0, 0, 100, 100, 0)], 0, 0),
        ([life(0, 0, 0, 30, 0)], 0, 0),  # it crashed before its first step
        ([life(0, 0, 100, 100, 0), life(0, 90, 95, 5, 0)], 80, 80),  # back beyond the life before
        ([life(0, 0, 100, 100, 0), life(0, 0, 50, 50, 0)], 50, 50),  # begun anew
        ([life(0, 0, 100, 10, 20)], 100, 0),
    ],
)
def test_what_lasted_of_each_life(lives: list[Life], resumed_at: int, useful: float) -> None:
    known = before(Record(lives), resumed_at)
    assert known is not None
    assert known.useful == pytest.approx(useful)


def test_lives_that_were_folded_into_one_line_count() -> None:
    past = {"event": "past", "began": 10.0, "lives": 7, "seconds": 500.0, "stalled": 20.0}
    assert before(Record([life(2000, 50, 60, 10)], [past]), 60) == Before(10.0, 490.0, 8)


def test_no_lives_are_no_past() -> None:
    assert before(Record(), 0) is None


def test_slowdown_is_told_once_there_are_steps_of_both_kinds_and_outliers_do_not_count() -> None:
    told = Telemetry(None, now=0.0)
    for _ in range(10):
        told.step(1.0, saving=False)
        assert told.slowdown is None
    for _ in range(9):
        told.step(1.1, saving=True)
    told.step(100.0, saving=True)
    assert told.slowdown == pytest.approx(0.1)
    assert told.of_commit(COST, True, 1.0, 1.0, (0.0, 0))["resilience/step_slowdown"] == pytest.approx(0.1)


def test_what_loggers_see_of_a_commit_and_of_a_copy() -> None:
    told = Telemetry(None, now=0.0)
    told.skipped, told.failures = 3, 1
    told.committed(COST, healthy=False)
    assert told.of_commit(COST, False, 10.0, 9.5, (12.5, 40)) == {
        "resilience/stall_seconds": 0.5,
        "resilience/stage_seconds": 0.2,
        "resilience/persist_seconds": 4.0,
        "resilience/persist_gb_per_second": 2.0,
        "resilience/bytes": 8e9,
        "resilience/at_risk_seconds": 12.5,
        "resilience/at_risk_steps": 40.0,
        "resilience/health": 0.0,
        "resilience/skipped": 3.0,
        "resilience/failures": 1.0,
        "resilience/restarts": 0.0,
        "resilience/goodput": pytest.approx(0.95),
    }
    assert told.of_copy(2.0, 4 * 10**9, 7.0, 2) == {
        "resilience/upload_seconds": 2.0,
        "resilience/upload_gb_per_second": 2.0,
        "resilience/upload_bytes": 4e9,
        "resilience/lag_seconds": 7.0,
        "resilience/backlog": 2.0,
    }


def test_the_summary_says_what_there_was_and_nothing_else() -> None:
    told = Telemetry(None, now=0.0)
    assert told.summary(10.0, 10.0) == "saves=0 bytes='0 B' restarts=0 goodput=100.0%"
    told.committed(COST, healthy=True)
    told.replicated(10**9, 7.0)
    told.failures = 1
    assert told.summary(10.0, 9.5) == (
        "saves=1 bytes='7.5 GiB' stall=0.50 median_stall=0.500 median_persist=4.00 replicated=1 sent='953.7 MiB'"
        " most_lag=7.0 failures=1 restarts=0 goodput=95.0%"
    )
