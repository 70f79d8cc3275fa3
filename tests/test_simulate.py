"""Simulated runs: the schedules keep their promises against drawn failures; and the command that shows it."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import cli, console
from lightning_resilience.adaptive import AdaptiveSchedule
from lightning_resilience.forecast import Observed, compare, runs_of, setting_of
from lightning_resilience.ledger import Ledger
from lightning_resilience.schedule import EverySeconds, Progress, Schedule
from lightning_resilience.simulate import DAY, Setting, average, failures_of, simulate
from lightning_resilience.useful import Useful

HOUR = 3600.0

SETTINGS = {
    "1 h": Setting(mtbf=HOUR, stall=0.5, commit=20.0, step=4.0),
    "8 h": Setting(mtbf=8 * HOUR, stall=0.5, commit=20.0, step=10.0),
    "7 d": Setting(mtbf=7 * DAY, stall=0.5, commit=20.0, step=50.0),
}
SEEDS = {"1 h": range(1), "8 h": range(2), "7 d": range(16)}


def check(setting: Setting, rule: AdaptiveSchedule, seeds: range) -> None:
    """The promises of issue and README: within ten percent of an oracle that keeps the same ones."""
    ours = average(rule, setting, seeds)
    oracle = average(EverySeconds(setting.oracle_within(rule)), setting, seeds)
    assert ours.waste <= 1.10 * oracle.waste, (ours, oracle)
    assert ours.longest_gap <= rule.rpo_seconds
    if setting.stall / rule.max_overhead < rule.rpo_seconds - setting.commit - setting.step:
        assert ours.stalled <= 1.1 * rule.max_overhead


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("wrong", [0.1, 10.0])
def test_waste_is_near_the_oracles_with_a_prior_that_is_wrong_by_ten(name: str, wrong: float) -> None:
    """Shorter than the runs of the slow test, but for the failures that are rare."""
    setting = SETTINGS[name]
    if name != "7 d":
        setting = replace(setting, duration=(4 if name == "1 h" else 15) * DAY)
    check(setting, AdaptiveSchedule(prior_mtbf_seconds=wrong * setting.mtbf), SEEDS[name][:6])


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.01, 0.03, 0.1])
@pytest.mark.parametrize("wrong", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_waste_over_thirty_days_is_near_the_oracles(name: str, wrong: float, noise: float) -> None:
    setting = replace(SETTINGS[name], noise=noise)
    check(setting, AdaptiveSchedule(prior_mtbf_seconds=wrong * setting.mtbf), SEEDS[name])
    assert setting.oracle_within(AdaptiveSchedule()) == setting.oracle  # no promise stands in the way


@pytest.mark.parametrize(
    ("stall", "commit", "rule"),
    [
        (5.0, 30.0, AdaptiveSchedule()),  # the budget is larger than what pays
        (30.0, 120.0, AdaptiveSchedule()),  # RPO before budget
        (0.01, 400.0, AdaptiveSchedule()),  # one save at a time
        (0.5, 5.0, AdaptiveSchedule(max_overhead=0.05, rpo_seconds=120)),
        (2.0, 900.0, AdaptiveSchedule(rpo_seconds=1200)),
    ],
)
def test_promises_are_kept_where_they_stand_against_what_pays(
    stall: float, commit: float, rule: AdaptiveSchedule
) -> None:
    setting = Setting(mtbf=4 * HOUR, stall=stall, commit=commit, step=5.0, duration=4 * DAY)
    outcome = simulate(rule, setting)
    assert outcome.saves > 50
    assert outcome.longest_gap <= rule.rpo_seconds
    if stall / rule.max_overhead < rule.rpo_seconds / 2:
        assert outcome.stalled <= 1.1 * rule.max_overhead


def test_waste_of_a_fixed_interval_is_what_the_formula_says() -> None:
    setting = Setting(mtbf=2 * HOUR, stall=2.0, commit=10.0, step=1.0, duration=20 * DAY)
    for interval in (60.0, setting.oracle, 900.0):
        outcome = average(EverySeconds(interval), setting, range(3))
        assert outcome.waste == pytest.approx(setting.waste(interval), rel=0.08)


def test_a_run_that_fails_all_the_time_wastes_all_of_it_and_not_more() -> None:
    outcome = average(EverySeconds(3600), Setting(mtbf=60.0, stall=5.0, commit=30.0, duration=DAY), range(2))
    assert outcome.waste == 1.0


class OnlyDue(Schedule):
    """As ``EverySeconds``, for all that anybody knows of it."""

    def due(self, now: Progress, last: Progress) -> str | None:
        return "due" if now.seconds - last.seconds >= 300 else None


def test_stretches_that_are_passed_over_change_nothing() -> None:
    setting = Setting(mtbf=HOUR, stall=1.0, commit=10.0, step=3.0, duration=2 * DAY)
    assert simulate(OnlyDue(), setting) == simulate(EverySeconds(300), setting)


def test_failures_are_the_same_for_every_schedule_and_come_at_their_rate() -> None:
    setting = Setting(mtbf=HOUR, stall=1.0, commit=10.0, duration=60 * DAY)
    times = failures_of(setting, 3)
    assert times == failures_of(setting, 3) != failures_of(setting, 4)
    assert len(times) == pytest.approx(60 * DAY / (HOUR + setting.restart), rel=0.1)


def test_lost_work_in_expectation_is_what_failures_lose_on_average() -> None:
    """Counted the other way: by where the failures fell."""
    setting = Setting(mtbf=HOUR / 2, stall=1.0, commit=30.0, step=1.0, duration=60 * DAY, restart=0.0)
    lost = 0.0
    for seed in range(6):
        begin = 0.0
        for failure in failures_of(setting, seed):
            if failure < setting.duration:
                committed = max(math.floor((failure - begin - setting.commit) / 300), 0)
                lost += failure - begin - 300 * committed
            begin = failure
    expected = average(EverySeconds(300), setting, range(6)).lost
    assert expected == pytest.approx(lost / (6 * setting.duration), rel=0.03)


# -- the command ------------------------------------------------------------------------------------------------------

KNOWN = ("--mtbf", "20min", "--state-bytes", "2e9", "--step-time", "5", "--runs", "1")


@pytest.fixture
def call(capsys):
    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main(["simulate", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_simulate_shows_the_schedule_beside_fixed_intervals_and_oracles(call) -> None:
    code, out, err = call(*KNOWN)
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].startswith(
        "MTBF 0.3333 h, a save stalls 0.4 s and is committed after 2.4 s, a restart takes 120 s;"
    )
    assert lines[2].split() == ["SCHEDULE", "INTERVAL", "WASTE", "STALLED", "LOST", "RESTARTING", "LONGEST"]
    assert [line.split("  ")[0] for line in lines[3:]] == [
        "adaptive",
        "oracle",
        "oracle that keeps the promises",
        *(f"every {seconds} s" for seconds in (60, 300, 900, 1800, 3600)),
    ]


def test_simulate_as_json_is_one_document(call) -> None:
    code, out, _ = call(*KNOWN, "--json")
    document = json.loads(out)
    assert (code, document["ok"]) == (0, True)
    assert document["setting"]["mtbf"] == 1200
    by_name = {entry["schedule"]: entry for entry in document["schedules"]}
    assert by_name["adaptive"]["waste"] <= 1.1 * by_name["oracle that keeps the promises"]["waste"]
    assert by_name["every 3600 s"]["waste"] > 2 * by_name["adaptive"]["waste"]
    assert min(waste for _, waste in document["curve"]) >= 0.95 * by_name["oracle"]["waste"]


@pytest.mark.parametrize(
    ("mtbf", "stall", "failures", "runs"),
    [
        (HOUR, 0.5, 100, 1),
        (60.0, 5.0, 1440, 1),  # a day at least
        (7 * DAY, 0.5, 30 / 7, 3),  # thirty days at most
        (5 * HOUR, 0.005, 30, 1),  # so many saves that a hundred would take minutes
        (HOUR, 0.005, 50, 1),
    ],
)
def test_runs_are_as_long_and_as_many_as_it_takes_to_see_failures(
    mtbf: float, stall: float, failures: float, runs: int
) -> None:
    setting = setting_of(Observed(mtbf, stall, 1.0, 1.0), restart=120.0, noise=0.05)
    assert setting.duration / mtbf == pytest.approx(failures, rel=0.01)
    assert runs_of(setting) == runs


def test_all_of_the_work_is_told_of_as_it_is_done() -> None:
    told: list[tuple[float, str]] = []
    totals: list[float] = []

    def progress(total: float) -> Any:
        totals.append(total)
        return lambda count, what: told.append((count, what))

    setting = Setting(mtbf=HOUR, stall=1.0, commit=10.0, step=5.0, duration=DAY, restart=0.0)
    compare(AdaptiveSchedule(), setting, range(2), progress)
    assert sum(count for count, _ in told) == pytest.approx(totals[0], rel=0.01)
    assert len(told) > 1000
    assert told[0][1] == "adaptive"


def test_simulate_shows_how_far_it_is_on_a_terminal_and_takes_that_away(call, monkeypatch) -> None:
    monkeypatch.setattr(console.Share, "SHORT", 0.0)
    monkeypatch.setattr(console.Share, "BAR_SECONDS", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    code, _, err = call(*KNOWN)
    shown = err.split("\r\x1b[K")
    assert code == 0
    assert "%  adaptive" in shown[1]
    assert "%  every 3600 s" in shown[-2]
    assert shown[-1] == ""


def write_ledger(folder: Path) -> None:
    for _ in range(20):
        book = Ledger(folder)
        book.start(Useful(0.0), 0)
        for number in range(1, 11):
            book.commit(number * 72.0, number * 18, 0.25, 4.0)
        book.end(720.0, 180, "exception")


def test_simulate_takes_what_it_is_not_told_from_the_ledger_of_a_run(tmp_path: Path, call) -> None:
    write_ledger(tmp_path)
    code, out, _ = call(tmp_path, "--runs", 1, "--json")
    setting = json.loads(out)["setting"]
    assert code == 0
    assert setting["mtbf"] == pytest.approx((8640 + 20 * 720) / 20.5)
    assert (setting["stall"], setting["commit"], setting["step"]) == (0.25, 4.0, 4.0)
    code, out, _ = call(tmp_path, "--mtbf", "10min", "--runs", 1, "--json")
    assert json.loads(out)["setting"]["mtbf"] == 600
    assert json.loads(out)["setting"]["stall"] == 0.25


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--mtbf", "2h"), "--state-bytes, --step-time: not given"),
        (("/nowhere",), "/nowhere"),
    ],
)
def test_what_cannot_be_simulated_is_an_error_with_its_name(call, argv: tuple[str, ...], said: str) -> None:
    code, _, err = call(*argv)
    assert code == 1
    assert said in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--state-bytes", "-1"), "--state-bytes -1"),
        (("--persist-bandwidth", "0"), "--persist-bandwidth 0"),
        (("--runs", "0"), "'0' is not a whole number of 1 or more"),
        (("--noise", "-1"), "--noise -1"),
        (("--max-overhead", "2"), "max_overhead=2.0"),
    ],
)
def test_numbers_that_cannot_be_meant_are_wrong_usage(call, capsys, argv: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        call(*KNOWN, *argv)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


def test_run_folder_without_a_ledger_is_said_to_be_one(tmp_path: Path, call) -> None:
    code, _, err = call(tmp_path)
    assert code == 1
    assert "has no .ledger.jsonl" in err
    assert "--mtbf" in err


@pytest.mark.parametrize("text", ["", "0", "-3", "h", "3 weeks", "nan", "inf"])
def test_bad_duration_is_wrong_usage(call, capsys, text: str) -> None:
    with pytest.raises(SystemExit) as stop:
        call("--mtbf", text)
    assert stop.value.code == 2
    assert "is not a duration" in capsys.readouterr().err


def test_plot_without_matplotlib_says_what_to_install_before_it_computes(call, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lightning_resilience.forecast.compare", pytest.fail)
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    code, _, err = call(*KNOWN, "--plot", tmp_path / "waste.png")
    assert code == 1
    assert "lightning_resilience[plot]" in err


def test_plot_is_drawn(call, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = call(*KNOWN, "--plot", tmp_path / "waste.png")
    assert code == 0
    assert (tmp_path / "waste.png").read_bytes().startswith(b"\x89PNG")
    assert "waste.png" in out
    code, _, err = call(*KNOWN, "--plot", tmp_path / "waste.nothing")
    assert code == 1
    assert "waste.nothing" in err


def test_listing_does_without_numpy() -> None:
    import subprocess

    code = "import sys; from lightning_resilience import cli; sys.exit(not {'numpy', 'torch'}.isdisjoint(sys.modules))"
    environment: dict[str, Any] = {"cwd": Path(cli.__file__).parents[1], "timeout": 60}
    assert subprocess.run([sys.executable, "-c", code], **environment).returncode == 0
