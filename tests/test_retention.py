"""What to keep, as tables and as laws."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest

from lightning_resilience.errors import SetupError
from lightning_resilience.manifest import HEALTHY, MILESTONE, SUSPECT, WEIGHTS_ONLY, FileEntry, Manifest
from lightning_resilience.retention import PINNED, Keep, Ranking, judge
from on_disk import manifest

NAN, INF = math.nan, math.inf


def run(*losses: float | None, **by_step: dict) -> dict[str, Manifest]:
    """Checkpoints ``s1``, ``s2``, … with these losses (None: not logged); ``s2=dict(…)`` changes one."""
    found = {}
    for step, loss in enumerate(losses, start=1):
        name = f"s{step}"
        found[name] = manifest(step, **{"metrics": {} if loss is None else {"loss": loss}, **by_step.get(name, {})})
    return found


def kept(manifests: dict[str, Manifest], keep: Keep, ranking: Ranking | None = None, in_use: tuple = ()) -> set[str]:
    return {judgement.name for judgement in judge(manifests, keep, ranking, in_use) if judgement.keep}


LOSS = Ranking("loss")
FIVE = (5.0, 1.0, 3.0, 2.0, 4.0)


@pytest.mark.parametrize(
    ("manifests", "keep", "in_use", "expected"),
    [
        ({}, Keep(), (), ""),
        (run(*FIVE), Keep(last=1), (), "s5"),
        (run(*FIVE), Keep(last=3), (), "s3 s4 s5"),
        (run(*FIVE), Keep(last=-1), (), "s1 s2 s3 s4 s5"),
        (run(*FIVE), Keep(last=9), (), "s1 s2 s3 s4 s5"),
        (run(*FIVE), Keep(last=1, top_k=0), (), "s5"),
        (run(*FIVE), Keep(last=1, top_k=1), (), "s2 s5"),
        (run(*FIVE), Keep(last=1, top_k=2), (), "s2 s4 s5"),
        (run(*FIVE), Keep(last=1, top_k=-1), (), "s1 s2 s3 s4 s5"),
        (run(1.0, None, 2.0), Keep(last=1, top_k=-1), (), "s1 s3"),
        # suspect ones older than a healthy one do not count among the newest
        (run(*FIVE, s3={"health": SUSPECT}, s4={"health": SUSPECT}), Keep(last=3), (), "s1 s2 s5"),
        (run(*FIVE, s5={"health": SUSPECT}, s2={"health": SUSPECT}), Keep(last=3), (), "s3 s4 s5"),
        (run(*FIVE, s3={"health": SUSPECT}), Keep(last=-1), (), "s1 s2 s3 s4 s5"),
        # guards
        (run(*FIVE, s5={"health": SUSPECT}), Keep(last=1), (), "s4 s5"),
        (run(*FIVE, s5={"health": SUSPECT}, s4={"health": SUSPECT}), Keep(last=1), (), "s3 s5"),
        (run(*FIVE, s5={"labels": (WEIGHTS_ONLY,)}), Keep(last=1), (), "s4 s5"),
        (run(*FIVE, s5={"labels": (WEIGHTS_ONLY,)}, s4={"health": SUSPECT}), Keep(last=1), (), "s3 s4 s5"),
        (run(*FIVE, s1={"labels": (PINNED,)}), Keep(last=1), (), "s1 s5"),
        (run(*FIVE), Keep(last=1), ("s2", "gone"), "s2 s5"),
    ],
)
def test_what_stays(manifests, keep: Keep, in_use: tuple, expected: str) -> None:
    assert kept(manifests, keep, LOSS, in_use) == set(expected.split())


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("score", [NAN, INF, -INF, None])
def test_a_score_that_is_no_number_is_never_best(mode: str, score: float | None) -> None:
    manifests = run(score, 1.0, score, 2.0, score)
    ranking = Ranking("loss", mode)
    assert set(ranking.best(manifests)) == {"s2", "s4"}
    assert kept(manifests, Keep(last=1, top_k=2), ranking) == {"s2", "s4", "s5"}


def test_only_bad_scores_leave_no_best_and_the_newest_stays() -> None:
    manifests = run(NAN, NAN, INF)
    assert LOSS.best(manifests) == []
    assert kept(manifests, Keep(last=1, top_k=1), LOSS) == {"s3"}


def test_a_suspect_checkpoint_is_never_best_however_good_its_score() -> None:
    manifests = run(0.0, 1.0, 2.0, 3.0, s1={"health": SUSPECT})
    assert LOSS.best(manifests) == ["s2", "s3", "s4"]
    assert "s1" not in kept(manifests, Keep(last=1, top_k=1), LOSS)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_of_equal_scores_the_older_stays(mode: str) -> None:
    manifests = run(1.0, 1.0, 1.0, 1.0)
    for order in itertools.permutations(manifests):
        shuffled = {name: manifests[name] for name in order}
        assert Ranking("loss", mode).best(shuffled) == ["s1", "s2", "s3", "s4"]
        assert kept(shuffled, Keep(last=1, top_k=1), Ranking("loss", mode)) == {"s1", "s4"}


@pytest.mark.parametrize(
    ("mode", "expected"), [("min", ["s2", "s4", "s3", "s5", "s1"]), ("max", ["s1", "s5", "s3", "s4", "s2"])]
)
def test_mode_says_which_end_is_best(mode: str, expected: list[str]) -> None:
    assert Ranking("loss", mode).best(run(*FIVE)) == expected


def test_newer_means_saved_later_whatever_step_and_clock_say() -> None:
    """A run that was rolled back saves smaller steps later, perhaps on a machine whose clock is behind."""
    manifests = {
        "before": manifest(500, sequence=1, created="2030-01-01T00:00:00Z"),
        "after": manifest(200, sequence=2, created="2020-01-01T00:00:00Z"),
    }
    assert [judgement.name for judgement in judge(manifests, Keep(last=1))] == ["after", "before"]
    assert kept(manifests, Keep(last=1)) == {"after"}


def test_judgements_come_newest_first_with_reasons() -> None:
    manifests = run(5.0, 1.0, 3.0, 2.0, 4.0, s1={"labels": (PINNED,)}, s4={"health": SUSPECT}, s5={"health": SUSPECT})
    judgements = judge(manifests, Keep(last=1, top_k=1), LOSS, {"s2"})
    assert [(judgement.name, judgement.keep, judgement.reasons) for judgement in judgements] == [
        ("s5", True, ("newest",)),
        ("s4", False, ("not among the newest 1 nor among the 1 best",)),
        ("s3", True, ("newest healthy",)),
        ("s2", True, ("best loss", "in use")),
        ("s1", True, ("pinned",)),
    ]


@pytest.mark.parametrize(
    ("place", "word"),
    [(2, "2nd"), (3, "3rd"), (4, "4th"), (11, "11th"), (12, "12th"), (13, "13th"), (21, "21st"), (22, "22nd")],
)
def test_places_are_written_as_people_write_them(place: int, word: str) -> None:
    judgements = judge(run(*range(30)), Keep(last=30), None)
    assert judgements[place - 1].reasons == (f"{word} newest",)


def test_what_goes_for_lack_of_a_score_says_so() -> None:
    judgements = judge(run(None, 1.0), Keep(last=1, top_k=-1), LOSS)
    assert judgements[-1].reasons == ("not among the newest 1 and without a score",)


def random_run(rng: random.Random) -> dict[str, Manifest]:
    sequences = rng.sample(range(100), rng.randrange(1, 12))
    return {
        f"s{sequence}": manifest(
            rng.randrange(50),
            sequence=sequence,
            health=rng.choice([HEALTHY, HEALTHY, SUSPECT]),
            labels=tuple(rng.sample([PINNED, WEIGHTS_ONLY, "milestone"], rng.choice([0, 0, 1, 2]))),
            metrics=rng.choice([{}, {"loss": rng.choice([NAN, INF, -INF, 1.0, rng.random()])}]),
        )
        for sequence in sequences
    }


def more(keep: Keep, rng: random.Random) -> Keep:
    """``keep`` with one rule added or widened."""
    if keep.milestones is None and rng.random() < 0.3:
        return replace(keep, milestones=rng.choice([7, [3, 20, 41]]))
    if rng.random() < 0.5:
        return replace(keep, last=-1 if keep.last == -1 or rng.random() < 0.2 else keep.last + rng.randrange(4))
    top_k = keep.top_k or 0
    return replace(keep, top_k=-1 if top_k == -1 or rng.random() < 0.2 else top_k + rng.randrange(4))


def test_adding_a_rule_never_removes_more() -> None:
    rng = random.Random(0)
    grew = 0
    for _ in range(3000):
        manifests, keep = random_run(rng), Keep(last=rng.randrange(1, 5), top_k=rng.choice([None, 0, 1, 2]))
        ranking = Ranking("loss", rng.choice(["min", "max"]))
        in_use = tuple(name for name in manifests if rng.random() < 0.1)
        before = kept(manifests, keep, ranking, in_use)
        after = kept(manifests, more(keep, rng), ranking, (*in_use, rng.choice(list(manifests))))
        assert before <= after
        grew += before < after
    assert grew > 300


def test_no_rule_ever_takes_what_is_guarded() -> None:
    rng = random.Random(1)
    removed = 0
    for _ in range(3000):
        manifests = random_run(rng)
        in_use = [name for name in manifests if rng.random() < 0.1]
        keep = Keep(last=1, top_k=rng.choice([None, 1]), max_bytes=rng.choice([None, 1]))
        stays = kept(manifests, keep, LOSS, tuple(in_use))
        newest_first = sorted(manifests.values(), key=lambda found: found.sequence, reverse=True)
        resumable = [found for found in newest_first if WEIGHTS_ONLY not in found.labels]
        healthy = [found for found in resumable if found.health == HEALTHY]
        pinned = [found for found in newest_first if PINNED in found.labels]
        guarded = {f"s{found.sequence}" for found in (newest_first[0], *resumable[:1], *healthy[:1], *pinned)}
        assert guarded | set(in_use) <= stays
        removed += len(manifests) - len(stays)
    assert removed > 3000


def test_no_more_stay_than_the_rules_and_the_guards_can_ask_for() -> None:
    rng = random.Random(2)
    for _ in range(2000):
        manifests = random_run(rng)
        milestones = rng.choice([None, 7, [3, 20, 41]])
        keep = Keep(last=rng.randrange(1, 4), top_k=rng.choice([None, 1, 2]), milestones=milestones)
        pinned = [found for found in manifests.values() if PINNED in found.labels]
        # 50 steps have 8 multiples of 7.  Guarded are the newest, the newest to resume from, the newest healthy.
        most = keep.last + (keep.top_k or 0) + (8 if milestones == 7 else 3 if milestones else 0) + len(pinned) + 3
        assert len(kept(manifests, keep, LOSS)) <= most


def at_steps(*steps: int, size: int = 10, **metrics: list[float]) -> dict[str, Manifest]:
    """Checkpoints of these steps, saved in this order."""
    return {
        f"s{step}": manifest(
            step,
            sequence=place,
            files=(FileEntry("f", size, "0" * 32),),
            metrics={name: values[place] for name, values in metrics.items()},
        )
        for place, step in enumerate(steps)
    }


@pytest.mark.parametrize(
    ("steps", "milestones", "expected"),
    [
        ((10, 20, 30, 40, 50, 60), 20, {"s20", "s40", "s60"}),
        ((95, 104, 199, 230, 290), 100, {"s104", "s199", "s290"}),
        ((7, 90, 110, 190), 100, {"s90", "s190"}),  # of equally close ones the older
        ((3, 40), 100, {"s40"}),  # none is close to a multiple: the newest only
        ((100, 150, 260, 300), [140, 900], {"s150", "s300"}),
    ],
)
def test_milestones_keep_the_closest_of_each(steps: tuple[int, ...], milestones: Any, expected: set[str]) -> None:
    assert kept(at_steps(*steps), Keep(last=1, milestones=milestones)) == expected


def test_newest_that_the_schedule_marked_stay_besides_and_no_more_than_so_many() -> None:
    marked = {7: (MILESTONE,), 20: (MILESTONE,), 30: (MILESTONE, WEIGHTS_ONLY)}
    manifests = {
        f"s{step}": manifest(step, sequence=step, labels=marked.get(step, ())) for step in (7, 10, 20, 30, 40, 50)
    }
    assert kept(manifests, Keep(last=1)) == {"s50", "s20"}
    assert kept(manifests, Keep(last=1, marked=5)) == {"s50", "s20", "s7"}
    assert kept(manifests, Keep(last=1, marked=0)) == {"s50"}
    manifests["s20"] = replace(manifests["s20"], health="suspect")
    assert kept(manifests, Keep(last=1)) == {"s50", "s7"}
    reasons = {judgement.name: judgement.reasons for judgement in judge(manifests, Keep(last=1, marked=2))}
    assert reasons["s7"] == ("newest milestone",)


def test_milestones_are_the_same_whether_judged_after_each_save_or_at_the_end() -> None:
    rng = random.Random(2)
    for _ in range(300):
        steps = sorted(rng.sample(range(1, 400), rng.randrange(2, 30)))
        keep = Keep(last=1, milestones=rng.choice([50, 70, [30, 200, 390]]))
        everything, there = at_steps(*steps), {}
        for name, found in everything.items():
            there[name] = found
            there = {name: there[name] for name in there if name in kept(there, keep)}
        assert set(there) == kept(everything, keep)


def test_rules_add_up_to_exactly_what_they_say() -> None:
    manifests = at_steps(10, 20, 30, 40, 50, 60, loss=[1, 9, 0.5, 9, 9, 9])
    judgements = judge(manifests, Keep(last=1, top_k=1, milestones=20), LOSS)
    assert {judgement.name: judgement.reasons for judgement in judgements if judgement.keep} == {
        "s60": ("newest", "milestone 60"),
        "s40": ("milestone 40",),
        "s30": ("best loss",),
        "s20": ("milestone 20",),
    }


def test_bytes_are_bounded_the_oldest_going_first_and_the_best_last() -> None:
    manifests = at_steps(1, 2, 3, 4, 5, loss=[0.1, 5, 5, 5, 5])
    keep = Keep(last=-1, top_k=1, max_bytes=30)
    assert kept(manifests, keep, LOSS) == {"s1", "s4", "s5"}
    assert kept(manifests, replace(keep, max_bytes=5), LOSS) == {"s5"}
    assert kept(manifests, replace(keep, max_bytes=50), LOSS) == set(manifests)
    [judgement] = [found for found in judge(manifests, keep, LOSS) if found.name == "s2"]
    assert judgement.reasons == ("over max_bytes=30",)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: Keep(last=0), "last=0"),
        (lambda: Keep(last=-2), "last=-2"),
        (lambda: Keep(last=1.5), r"last=1\.5"),
        (lambda: Keep(last=True), "last=True"),
        (lambda: Keep(last=None), "last=None"),
        (lambda: Keep(top_k=-2), "top_k=-2"),
        (lambda: Keep(top_k="3"), "top_k='3'"),
        (lambda: Keep(top_k=False), "top_k=False"),
        (lambda: Keep(milestones=0), "milestones=0"),
        (lambda: Keep(marked=-1), "marked=-1"),
        (lambda: Keep(marked=True), "marked=True"),
        (lambda: Keep(milestones=[10, -5]), "milestones="),
        (lambda: Keep(milestones="1000"), "milestones='1000'"),
        (lambda: Keep(max_bytes=0), "max_bytes=0"),
        (lambda: Keep(max_bytes=1e9), "max_bytes="),
        (lambda: Ranking("loss", "best"), "mode='best'"),
    ],
)
def test_a_bad_argument_is_refused_by_name_and_value(make, named: str) -> None:
    with pytest.raises(SetupError, match=named):
        make()
