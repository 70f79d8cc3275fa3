"""What the cold tier lacks and what of that goes next, as tables."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_resilience.backlog import Backlog, Task
from lightning_resilience.manifest import SUSPECT, FileEntry, Manifest
from lightning_resilience.retention import Keep, Ranking
from on_disk import manifest

RUN = manifest(1).run


def save(step: int, size: int = 1, **changes: Any) -> Manifest:
    """The save of a step: one file."""
    files = (FileEntry("__0_0.distcp", size, f"{step:032x}", 0),)
    return manifest(step, files=files, **changes)


def saves(*steps: int, **changes: Any) -> dict[str, Manifest]:
    """Saves by the names that the steps give them."""
    return {f"s{step}.ckpt": save(step, **changes) for step in steps}


TWO = Keep(last=2)


def backlog(
    hot: dict[str, Manifest],
    cold: dict[str, Manifest] | None = None,
    keep: Keep = TWO,
    ranking: Ranking | None = None,
    *,
    in_use: tuple[str, ...] = (),
    taken: tuple[str, ...] = (),
    now: float = 0.0,
) -> Backlog:
    """One that has been told so much."""
    made = Backlog(keep, ranking, lambda: RUN)
    made.offer(hot, in_use, now)
    made.learn(cold or {})
    made.reserve(taken)
    return made


def names(found: set[str]) -> str:
    return " ".join(sorted(name.removesuffix(".ckpt") for name in found))


def step_after_step(made: Backlog) -> list[tuple[str, str]]:
    """Name and target of each task, all of which succeed."""
    done = []
    while (task := made.next()) is not None:
        done.append((task.name, task.target))
        made.arrive(task, task.manifest)
    return done


@pytest.mark.parametrize(
    ("hot", "cold", "keep", "pending"),
    [
        ({}, {}, Keep(last=2), ""),
        (saves(1), {}, Keep(last=2), "s1"),
        (saves(1, 2), saves(1, 2), Keep(last=2), ""),
        (saves(1, 2), saves(1), Keep(last=2), "s2"),
        # an outage makes no queue: what newer ones made redundant is passed over
        (saves(1, 2, 3, 4), {}, Keep(last=2), "s3 s4"),
        (saves(1, 2, 3, 4), saves(4), Keep(last=2), "s3"),
        (saves(1, 2, 3, 4), saves(3, 4), Keep(last=2), ""),
        (saves(1, 2, 3, 4), saves(3, 4), Keep(last=-1), "s1 s2"),
        # the rule is applied to this run's alone
        (saves(1, 2), {f"other{n}.ckpt": save(n, run="other") for n in (8, 9)}, Keep(last=2), "s1 s2"),
        # a copy by another name is a copy
        (saves(1, 2), {"s1-v1.ckpt": save(1)}, Keep(last=2), "s2"),
        # one save by two names is sent once
        ({"a.ckpt": save(1), "b.ckpt": save(1)}, {}, Keep(last=2), "a"),
    ],
)
def test_on_its_way_is_what_the_rule_would_keep_and_the_cold_tier_lacks(
    hot: dict[str, Manifest], cold: dict[str, Manifest], keep: Keep, pending: str
) -> None:
    made = backlog(hot, cold, keep)
    assert names(made.pending()) == names(made.waiting()) == pending
    assert sorted(name for name, _ in step_after_step(made)) == [f"{name}.ckpt" for name in pending.split()]
    assert not made.pending()


def test_best_by_the_metric_is_on_its_way_besides_the_newest() -> None:
    losses = {1: 0.5, 2: 0.1, 3: 0.4, 4: 0.9}
    hot = {f"s{step}.ckpt": save(step, metrics={"loss": loss}) for step, loss in losses.items()}
    made = backlog(hot, keep=Keep(last=1, top_k=1), ranking=Ranking("loss"))
    assert names(made.pending()) == "s2 s4"


@pytest.mark.parametrize(
    ("cold", "taken", "target"),
    [
        ({}, (), "best.ckpt"),
        ({"best.ckpt": save(1)}, (), "best-v1.ckpt"),
        ({"best.ckpt": save(1), "best-v1.ckpt": save(2)}, (), "best-v2.ckpt"),
        ({}, ("best.ckpt",), "best-v1.ckpt"),
        ({"best.ckpt": save(1)}, ("best-v1.ckpt",), "best-v2.ckpt"),
        ({"best.ckpt": save(1, run="other")}, (), "best-v1.ckpt"),
    ],
)
def test_a_name_that_another_save_has_there_is_not_written_over(
    cold: dict[str, Manifest], taken: tuple[str, ...], target: str
) -> None:
    made = backlog({"best.ckpt": save(9)}, cold, taken=taken)
    assert made.targets() == {target}
    assert made.next() == Task("best.ckpt", target, save(9), owners_only=True)


@pytest.mark.parametrize(
    ("failed", "expected"),
    [
        ([], ("s1", True)),
        ([(1, False)], ("s2", True)),
        ([(1, False), (2, False)], ("s3", True)),
        ([(1, False), (2, False), (3, False)], ("s1", False)),
        ([(1, False), (1, False), (2, False), (3, False)], ("s2", False)),
        ([(1, True)], ("s2", True)),
        ([(1, True), (2, True), (3, False)], ("s3", False)),
        ([(1, True), (2, True), (3, True)], None),
    ],
    ids=str,
)
def test_the_oldest_of_those_that_failed_least_often_is_next_and_all_ranks_send_what_failed(
    failed: list[tuple[int, bool]], expected: tuple[str, bool] | None
) -> None:
    made = backlog(saves(1, 2, 3), keep=Keep(last=3))
    for step, for_good in failed:
        made.fail(Task(f"s{step}.ckpt", f"s{step}.ckpt", save(step), owners_only=True), for_good=for_good)
    found = made.next()
    assert (found and (found.name.removesuffix(".ckpt"), found.owners_only)) == expected


def test_what_is_spoiled_holds_its_hot_copy_and_nobody_waits_for_it() -> None:
    made = backlog(saves(1, 2))
    task = made.next()
    assert task is not None
    made.fail(task, for_good=True)
    assert names(made.pending()) == "s1 s2"
    assert names(made.waiting()) == "s2"
    assert made.is_done_with(save(1))
    assert not made.retries()


def test_what_failed_and_arrives_is_no_retry() -> None:
    made = backlog(saves(1))
    task = made.next()
    assert task is not None
    made.fail(task, for_good=False)
    assert made.retries() == {save(1).save_id}
    assert not made.is_done_with(save(1))
    made.arrive(task, save(1))
    assert not made.retries()
    assert made.is_done_with(save(1))


@pytest.mark.parametrize(
    ("hot", "left", "cold", "target"),
    [
        ({}, [], saves(1), None),
        (saves(1), [], saves(1), None),
        (saves(1, health=SUSPECT), [], saves(1), "s1.ckpt"),
        (saves(1, health=SUSPECT), [], saves(1, health=SUSPECT), None),
        ({}, [save(1, health=SUSPECT)], saves(1), "s1.ckpt"),
        ({"a.ckpt": save(1, health=SUSPECT)}, [], {"b.ckpt": save(1)}, "b.ckpt"),
        ({}, [save(2, health=SUSPECT)], saves(1), None),
    ],
)
def test_what_is_suspect_by_now_is_restated_there(
    hot: dict[str, Manifest], left: list[Manifest], cold: dict[str, Manifest], target: str | None
) -> None:
    made = backlog(hot, cold)
    made.leave_behind(left)
    found = made.next()
    if target is None:
        assert found is None
        return
    assert found is not None
    assert (found.name, found.target, found.restates, found.owners_only) == (target, target, True, False)
    assert found.manifest.health == SUSPECT
    assert made.pending() == hot.keys()
    made.arrive(found, found.manifest)
    assert made.next() is None


def test_lag_is_that_of_the_oldest_that_waits_and_offering_again_does_not_renew_it() -> None:
    made = backlog(saves(1), now=10.0)
    made.offer(saves(1, 2), (), 25.0)
    assert made.lag(30.0) == 20.0
    assert (made.known_since(save(1), 99.0), made.known_since(save(3), 99.0)) == (10.0, 99.0)
    made.learn(saves(1))
    assert made.lag(30.0) == 5.0
    made.learn(saves(2))
    assert made.lag(30.0) == 0.0


def test_bytes_of_what_waits() -> None:
    made = backlog({"a.ckpt": save(1, size=10), "b.ckpt": save(2, size=7)})
    assert made.size() == 17
    made.learn({"a.ckpt": save(1, size=10)})
    assert made.size() == 7


@pytest.mark.parametrize(
    ("in_use", "expected"),
    [
        ((), ""),
        (("s1.ckpt",), "s1"),
        (("best.ckpt",), "best best-v1"),
        (("gone.ckpt",), "gone"),
    ],
)
def test_what_is_in_use_stays_there_by_whatever_name(in_use: tuple[str, ...], expected: str) -> None:
    hot = saves(1) | {"best.ckpt": save(2)}
    cold = saves(1) | {"best-v1.ckpt": save(2), "best.ckpt": save(1, run="other")}
    assert names(backlog(hot, cold, in_use=in_use).in_use()) == expected


def test_of_other_runs_nothing_is_its_own_and_what_is_removed_is_lacking_again() -> None:
    made = backlog(saves(1), saves(1) | {"other.ckpt": save(5, run="other")})
    assert made.own() == saves(1)
    assert made.there().keys() == {"s1.ckpt", "other.ckpt"}
    made.remove(["s1.ckpt", "gone.ckpt"])
    assert made.own() == {}
    assert names(made.pending()) == "s1"


def test_a_save_is_found_by_what_it_holds_whatever_it_is_called() -> None:
    made = backlog({"best.ckpt": save(2), "s1.ckpt": save(1)})
    assert made.name_of(save(1, labels=("pinned",))) == "s1.ckpt"
    assert made.name_of(save(3)) is None
