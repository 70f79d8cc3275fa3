"""A schedule beside its alternatives: from what is known of a run to a table of waste, and a plot of it."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from lightning_resilience import ledger
from lightning_resilience.adaptive import AdaptiveSchedule, mean_time_between_failures
from lightning_resilience.errors import SetupError
from lightning_resilience.schedule import EverySeconds, Schedule
from lightning_resilience.simulate import DAY, Setting, average

FIXED = (60.0, 300.0, 900.0, 1800.0, 3600.0)
"""Intervals that people pick, in seconds."""
STEPS_PER_INTERVAL = 20
"""Training steps an interval is simulated with at the most: more say nothing more."""
FAILURES, FEW_FAILURES = 100, 30
"""Failures that a run is to see, and that are enough where saves are so many that it would take minutes: the waste is
then the same to half a percent of it."""
MANY_SAVES = 30_000
"""So many saves of a run are many."""
MOST_RUNS = 3
"""Runs that are averaged where one sees few failures."""
PLOTTED = 25
"""Fixed intervals in a plot."""


@dataclass(frozen=True)
class Observed:
    """What is known of a run, in seconds; see ``Setting``."""

    mtbf: float | None = None
    stall: float | None = None
    commit: float | None = None
    step: float | None = None

    def overruled(self, **given: float | None) -> Observed:
        """The same with what was given."""
        return replace(self, **{name: value for name, value in given.items() if value is not None})


def observed(folder: Path, prior_mtbf: float) -> Observed:
    """What the ledger of a run folder says.

    Raises:
        SetupError: there is none.
    """
    record = ledger.read(folder)
    if record.empty:
        raise SetupError(
            f"{str(folder)!r} has no {ledger.LEDGER}.",
            hint="It is written while a run trains; without it, give --mtbf, --state-bytes and --step-time.",
        )
    history = record.history()
    costs = [(line["stall"], line["commit"]) for life in record.lives for line in life.lines if "commit" in line]
    steps = sum(life.steps for life in record.lives)
    seconds = sum(life.seconds for life in record.lives)
    return Observed(
        mean_time_between_failures(prior_mtbf, history.failures, history.seconds),
        float(np.mean([stall for stall, _ in costs])) if costs else None,
        float(np.mean([commit for _, commit in costs])) if costs else None,
        seconds / steps if steps and seconds else None,
    )


def setting_of(found: Observed, *, restart: float, noise: float) -> Setting:
    """A run to simulate: long enough to see a hundred failures (or thirty, with many saves), but at most 30 days.

    Raises:
        SetupError: something is not known.
    """
    if found.mtbf is None or found.stall is None or found.commit is None or found.step is None:
        options = {"mtbf": "--mtbf", "stall": "--state-bytes", "step": "--step-time"}
        missing = [option for name, option in options.items() if getattr(found, name) is None]
        raise SetupError(f"{', '.join(missing)}: not given, and no ledger says.", hint="See simulate --help.")
    setting = Setting(found.mtbf, found.stall, found.commit, found.step, restart, noise=noise)
    duration = min(max(FAILURES * found.mtbf, DAY), 30 * DAY)
    enough = max(FEW_FAILURES * found.mtbf, MANY_SAVES * setting.oracle)
    return replace(setting, duration=min(duration, enough))


def runs_of(setting: Setting) -> int:
    """How many runs it takes to see enough failures."""
    return min(math.ceil(FEW_FAILURES * setting.mtbf / setting.duration), MOST_RUNS)


Told = Callable[[float, str], None]
"""Hears of work that is done, in a unit of its own, and of what it was."""


def compare(
    rule: AdaptiveSchedule, setting: Setting, seeds: Sequence[int], progress: Callable[[float], Told]
) -> dict[str, Any]:
    """The waste of a schedule, of fixed intervals, and of an oracle, as a plain document.

    Args:
        rule: the schedule.
        setting: a run.
        seeds: one for each run.
        progress: gets all of the work that is to be done, and gives what hears of it as it is.
    """
    within = setting.oracle_within(rule)
    coarse = replace(setting, step=max(setting.step, min(within, setting.oracle) / STEPS_PER_INTERVAL))
    schedules: list[tuple[str, Schedule, float]] = [  # with about how many decisions a second it takes
        ("adaptive", rule, 1 / coarse.step),
        ("oracle", EverySeconds(setting.oracle), 1 / setting.oracle),
        ("oracle that keeps the promises", EverySeconds(within), 1 / within),
        *((f"every {seconds:.0f} s", EverySeconds(seconds), 1 / seconds) for seconds in FIXED),
    ]
    tell = progress(sum(rate for _, _, rate in schedules) * setting.duration * len(seeds))

    def entry(name: str, schedule: Schedule, rate: float) -> dict[str, Any]:
        outcome = average(
            schedule, coarse if schedule is rule else setting, seeds, lambda seconds: tell(seconds * rate, name)
        )
        return {"schedule": name, **asdict(outcome), "waste": outcome.waste}

    around = np.geomspace(max(setting.oracle / 10, setting.step), setting.oracle * 10, PLOTTED).tolist()
    return {
        "setting": asdict(setting),
        "runs": len(seeds),
        "schedules": [entry(*schedule) for schedule in schedules],
        "curve": [[seconds, setting.waste(seconds)] for seconds in around],
    }


def check_plot() -> None:
    """Raise SetupError where nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError(
            "--plot draws with matplotlib, which is not installed.", hint="pip install 'lightning_resilience[plot]'"
        )


def plot(answer: dict[str, Any], path: str) -> None:
    """Draw waste against interval.

    Raises:
        SetupError: matplotlib is not installed, or cannot write such a file.
    """
    check_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.0, 4.5), layout="constrained")
    axes = figure.subplots()
    seconds, waste = zip(*answer["curve"], strict=True)
    axes.plot(seconds, [100 * share for share in waste], label="fixed interval")
    for entry, marker in zip(answer["schedules"][:3], "o^v", strict=False):
        axes.plot(entry["mean_gap"], 100 * entry["waste"], marker, label=entry["schedule"])
    axes.set(xscale="log", yscale="log", xlabel="seconds between saves", ylabel="time wasted, %")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise SetupError(f"--plot {path!r}: {error}", hint="Try --plot waste.png.") from error
