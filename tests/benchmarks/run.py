"""Measure what a save and a resume cost: one command prints a table and, with ``--json``, writes every sample.

    python tests/benchmarks/run.py --ranks 1 2 --json result.json

Everything is a ratio to what the machine can do with the same bytes in the same run, so a busy machine changes the
numbers less than it changes seconds; ratios are of medians.  With several ranks the state is the same on all of them,
as with DDP.  One thread a rank by default: on two cores, one rank leaves a core to spare and two ranks keep both busy.

==================  ===================================================================================================
preparation         seconds that the training thread spends once, after the first step, so that the first save is like
                    the others ÷ the memory copy
first stall, stall  seconds until training may change parameters, of the first save and from the third on ÷ a memory
                    copy (to memory that is there) of the rank's even share of the state
blocked             what the training thread waits in all when it trains on: the call, and before the optimizer step
lost                what training takes longer, in all, until the save is durable ÷ the same memory copy
steps slower        how much longer a step takes while a save is in the background
durable             seconds from the call until the bytes survive power loss ÷ writing and syncing the rank's share in
                    large blocks, buffered or direct, whichever is faster
restore             seconds to find the newest checkpoint, to fill the existing tensors and to check what they get ÷
                    reading the same files into memory that is there; they are in the page cache for both
recall              the same, from what a killed process left in memory
memory              most that the process, and processes it started, held beyond the state ÷ the state
==================  ===================================================================================================
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[1]
sys.path[0] = str(TESTS)

from benchmarks.measure import Config, Samples, measure  # noqa: E402
from benchmarks.routes import ROUTES  # noqa: E402
from lightning_resilience.slots import SlotMemory  # noqa: E402
from processes import run_ranks  # noqa: E402

SLOW_TO_START = "dcp.async-process"
OURS = "lightning_resilience"
COLUMNS = {
    "preparation": ("preparation", "copy"),
    "first stall": ("first stall", "copy"),
    "stall": ("steady stall", "copy"),
    "blocked": ("blocked", "copy"),
    "lost": ("lost", "copy"),
    "durable": ("durable", "write"),
    "restore": ("restore", "read"),
    "recall": ("recall", "read"),
    "memory": ("memory", "state"),
}
"""Heading of each ratio, its quantity, and the limit that it is divided by."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left behind
    folder = Path(tempfile.mkdtemp(prefix="benchmark-", dir=options.dir))
    tempfile.tempdir = str(folder)
    document: dict[str, Any] = {"about": about(options), "runs": []}
    try:
        for ranks in options.ranks:
            run = measure_ranks(options, ranks, options.size_mib * 2**20, options.tensors, options.routes)
            document["runs"].append(run)
            print_table(run)
        if options.many:
            for ranks in options.ranks:
                run = measure_ranks(
                    options, ranks, options.many * 1024, options.many, [OURS], rounds=1, steady=5, steps=0
                )
                document["runs"].append(run)
                print_overhead(run)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        SlotMemory().close()  # sweeps what ranks that were killed left in memory
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mib", type=int, default=256, help="parameters and moments together (default 256)")
    parser.add_argument("--tensors", type=int, default=100, help="number of parameters and moments (default 100)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of processes (default 1 2)")
    parser.add_argument(
        "--routes",
        nargs="+",
        choices=ROUTES,
        default=[name for name in ROUTES if name != SLOW_TO_START],
        help=f"what to compare (default: all but {SLOW_TO_START}, which starts a process in every round)",
    )
    parser.add_argument("--repeat", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--steps", type=int, default=4, help="training steps around a save; 0: no training (default 4)")
    parser.add_argument("--passes", type=int, default=1, help="forward and backward passes in a step (default 1)")
    parser.add_argument(
        "--many", type=int, default=20000, help=f"tensors of 1 KiB for {OURS}'s cost a tensor; 0: skip (default 20000)"
    )
    parser.add_argument("--threads", type=int, default=1, help="compute threads a rank (default 1)")
    parser.add_argument("--dir", type=Path, help="where files are written (default: the system's temporary folder)")
    parser.add_argument("--json", type=Path, help="write every sample to this file")
    return parser.parse_args(arguments)


def measure_ranks(
    options: argparse.Namespace,
    ranks: int,
    size: int,
    tensors: int,
    routes: Sequence[str],
    **other: int,
) -> dict[str, Any]:
    """Start the ranks, measure, and put what they say together."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        config = Config(
            folder=Path(place),
            size=size,
            tensors=tensors,
            routes=tuple(routes),
            **({"rounds": options.repeat, "steps": options.steps, "passes": options.passes} | other),
        )
        path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        results = run_ranks(
            measure,
            config,
            world_size=ranks,
            timeout=900,
            env={"OMP_NUM_THREADS": str(options.threads), "PYTHONPATH": path},
        )
    samples = slowest(results)
    return {
        "ranks": ranks,
        "threads": options.threads,
        "tensors": tensors,
        "seconds": time.monotonic() - begin,
        "limits": limits(samples, routes[0]),
        "routes": {name: summary(samples, name) for name in routes},
        "samples": samples,
    }


def slowest(results: Sequence[Samples]) -> Samples:
    """For each time that something was measured, the rank that took longest (or held most)."""
    return {
        name: {
            quantity: [max(values) for values in zip(*(result[name][quantity] for result in results), strict=True)]
            for quantity in quantities
        }
        for name, quantities in results[0].items()
    }


def variants(samples: Samples, route: str) -> dict[str, list[float]]:
    """What limits were measured, all of them with the same bytes, and reading with a route's own files."""
    return samples["limits"] | {name: values for name, values in samples[route].items() if name.startswith("read/")}


def limits(samples: Samples, route: str) -> dict[str, float]:
    """Each limit: the median of its fastest variant.  Seconds, and bytes of ``state`` and of a rank's ``share``."""
    best: dict[str, float] = {}
    for name, values in variants(samples, route).items():
        limit = name.partition("/")[0]
        best[limit] = min(statistics.median(values), best.get(limit, float("inf")))
    return best


def summary(samples: Samples, route: str) -> dict[str, float]:
    """A route's medians: seconds as ``… s``, and ratios by column."""
    medians = {quantity: statistics.median(values) for quantity, values in samples[route].items()}
    best = limits(samples, route)
    result = {
        column: medians[quantity] / best[limit] for column, (quantity, limit) in COLUMNS.items() if quantity in medians
    }
    if "inflation" in medians:
        result["steps slower"] = medians["inflation"]
    return result | {f"{name} s": value for name, value in medians.items() if name not in ("memory", "inflation")}


def print_table(run: dict[str, Any]) -> None:
    best, samples = run["limits"], run["samples"]
    measured = ", ".join(
        f"{name} {statistics.median(values) * 1e3:.0f} ms"
        for name, values in variants(samples, next(iter(run["routes"]))).items()
        if name not in ("share", "state")
    )
    print(
        f"\n{run['ranks']} rank(s) × {run['threads']} thread(s), state {best['state'] / 2**20:.0f} MiB in"
        f" {run['tensors']} tensors, share of a rank {best['share'] / 2**20:.0f} MiB; {run['seconds']:.0f} s\n"
        f"limits: {measured}\n"
    )
    headings = [f"{name} ÷ {limit}" for name, (_, limit) in COLUMNS.items()]
    print(f"| {'route':20} | {' | '.join(headings)} | steps slower |")
    print("|---" * (len(headings) + 2) + "|")
    for name, result in run["routes"].items():
        cells = [f"{result[column]:.2g}" if column in result else "–" for column in COLUMNS]
        cells.append(f"{result['steps slower']:.0%}" if "steps slower" in result else "–")
        row = " | ".join(
            cell.rjust(len(heading)) for cell, heading in zip(cells, [*headings, "steps slower"], strict=True)
        )
        print(f"| {name:20} | {row} |")
    ours = run["routes"].get(OURS)
    if ours is not None:
        raw = limits(samples, OURS)["read"]
        find, read = (ours[f"restore/{part} s"] / raw for part in ("find", "read"))
        print(f"\n{OURS}: restore = find {find:.2f} + read {read:.2f}", flush=True)


def print_overhead(run: dict[str, Any]) -> None:
    result, copy = run["routes"][OURS], run["limits"]["copy"]
    first, steady = ((result[f"{name} s"] - copy) * 1e3 for name in ("first stall", "steady stall"))
    print(
        f"\n{run['tensors']} tensors of 1 KiB, {run['ranks']} rank(s): stall beyond the memory copy of"
        f" {copy * 1e3:.0f} ms: first {first:.0f} ms, then {steady:.0f} ms; durable {result['durable s'] * 1e3:.0f} ms;"
        f" restore {result['restore s'] * 1e3:.0f} ms",
        flush=True,
    )


def about(options: argparse.Namespace) -> dict[str, Any]:
    import lightning
    import torch

    from lightning_resilience import __version__

    return {
        "options": {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()},
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
        "lightning_resilience": __version__,
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
