"""What each command found, as lines: one function a command, from its plain document."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from lightning_resilience.console import age, clean, count_of, human_size, table
from lightning_resilience.manifest import HEALTHY, PARTIAL, REMOVED

Document = dict[str, Any]


def ls(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A table, what is wrong, what is only mentioned."""
    several = any("cold" in ckpt["tiers"] for ckpt in document["checkpoints"])
    rows = [
        {
            "NAME": ckpt["name"],
            "STEP": str(ckpt["step"]),
            "TIERS": _tiers(ckpt) if ckpt["tiers"] != ["hot"] or several else "",
            "EPOCH": str(ckpt["epoch"]),
            "AGE": age(ckpt["created"], now),
            "SIZE": human_size(ckpt["size"]),
            "RANKS": str(ckpt["world_size"]),
            "HEALTH": ckpt["health"],
            "LABELS": ",".join(ckpt["labels"]),
            "KEPT": "; ".join(ckpt["kept"]),
            "METRICS": _metrics(_worth_a_column(ckpt["metrics"], document["monitor"])),
            "REASON": ckpt["reason"],
        }
        for ckpt in document["checkpoints"]
    ]
    if rows:
        plain = ("HEALTH",) if all(ckpt["health"] == HEALTHY for ckpt in document["checkpoints"]) else ()
        spare = ("RANKS", "EPOCH", *plain, "REASON", "LABELS")
        yield from table(rows, width, right=("STEP", "EPOCH", "AGE", "SIZE", "RANKS"), spare=spare)
    else:
        yield f"No checkpoints in {document['root']}."
    if document["unusable"]:
        yield ""
        yield "not usable:"
        yield from (clean(f"  {item['name']}: {item['message']} {item['hint']}") for item in document["unusable"])
    yield from _mentions(document)


def _tiers(ckpt: Document) -> str:
    """Where a checkpoint is, and under which name in the cold tier, where that differs."""
    elsewhere = ckpt["copy"] is not None and ckpt["copy"] != ckpt["name"]
    return "+".join(ckpt["tiers"]) + (f" as {ckpt['copy']}" if elsewhere else "")


def _mentions(document: Document) -> Iterator[str]:
    if document["leftovers"] or document["stock"]:
        yield ""
    for name in document["leftovers"]:
        what = "save" if PARTIAL in name else "removal" if REMOVED in name else "copy or removal"
        yield clean(f"left by a {what} under way or killed: {name}")
    for name in document["stock"]:
        yield clean(f"written by stock Lightning, no manifest: {name}")


def show(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """The fields, one a line, then a table of the files."""
    fields = {
        "path": document["path"],
        "step": document["step"],
        "epoch": document["epoch"],
        "created": f"{document['created']} ({age(document['created'], now)} ago)",
        "reason": document["reason"],
        "health": document["health"],
        "labels": ", ".join(document["labels"]),
        "metrics": _metrics(document["metrics"]),
        "ranks": document["world_size"],
        "strategy": document["strategy"],
        "versions": ", ".join(f"{name} {version}" for name, version in document["versions"].items()),
        "run": f"{document['run']}, save {document['sequence']}",
        "size": human_size(document["size"]),
        "holds": "; ".join(document["holds"]),
    }
    for name, value in fields.items():
        if value != "":
            yield clean(f"{name:9} {value}")
    yield ""
    rows = [
        {
            "FILE": entry["path"],
            "SIZE": human_size(entry["size"]),
            "BYTES": str(entry["size"]),
            "RANK": str(entry["rank"]),
            "XXH3_128": entry["xxh3_128"],
            "AT": entry.get("at", ""),
        }
        for entry in document["files"]
    ]
    yield from table(rows, width, right=("SIZE", "BYTES", "RANK"))
    if document["problems"]:
        yield ""
        yield from (clean(f"problem: {item['problem']}") for item in document["problems"])


def verify(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A line a checkpoint, its problems under it, and a sum."""
    for ckpt in document["checkpoints"]:
        if ckpt["ok"]:
            yield clean(f"ok       {ckpt['name']}: {count_of(ckpt['files'], 'file')}, {human_size(ckpt['size'])}")
        else:
            yield clean(f"PROBLEM  {ckpt['name']}")
            yield from (clean(f"         {item['problem']}") for item in ckpt["problems"])
    total, bad = len(document["checkpoints"]), sum(not ckpt["ok"] for ckpt in document["checkpoints"])
    if not total:
        yield f"No checkpoints in {document['root']}."
    elif bad:
        yield f"{bad} of {count_of(total, 'checkpoint')} {'has' if bad == 1 else 'have'} a problem."
    else:
        size = human_size(sum(ckpt["size"] for ckpt in document["checkpoints"]))
        yield f"{count_of(total, 'checkpoint')} verified, {size}."
    yield from _mentions(document)


def _worth_a_column(metrics: dict[str, float | str], monitor: str | None) -> dict[str, float | str]:
    """The monitored metric, then the others, without those that Lightning has under several names: what is logged by
    step and by epoch is there as ``NAME``, ``NAME_step`` and ``NAME_epoch``."""

    def stem(name: str) -> str:
        plain = name.removesuffix("_step") if name.endswith("_step") else name.removesuffix("_epoch")
        return plain if plain in metrics else name

    first = [monitor] if monitor is not None and monitor in metrics else []
    others = [name for name in metrics if stem(name) == name and name not in map(stem, first)]
    return {name: metrics[name] for name in (*first, *others)}


def _metrics(metrics: dict[str, float | str]) -> str:
    return ", ".join(
        f"{name}={value}" if isinstance(value, str) else f"{name}={value:.4g}" for name, value in metrics.items()
    )


def copies(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A line a checkpoint."""
    for ckpt in document["checkpoints"]:
        how = f"copied {human_size(ckpt['copied'])}" if ckpt["copied"] else "was there already"
        yield clean(f"{ckpt['name']}: {how}")
    yield clean(f"{document['from']} -> {document['to']}")


def export(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """One line."""
    what = f"{'weights' if document['weights_only'] else 'all'} of step {document['step']}"
    yield clean(f"{document['file']}: {what}, {human_size(document['size'])}, from {document['from']}")


def prune(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """The rule, then a line a checkpoint, with the reasons."""
    if not document["checkpoints"]:
        yield f"No checkpoints in {document['root']}."
        return
    rule = document["rule"]
    typed = ", ".join(rule["given"])
    if rule["recorded_by"] is None:
        origin = f"by {typed}; no checkpoint there records a rule that this version knows"
    else:
        origin = f"as {rule['recorded_by']} records it" + (f", but for {typed}" if typed else "")
    yield clean(f"What stays: {rule['keeps']}")
    runs = f"; {document['runs']} runs, each for itself" if document["runs"] > 1 else ""
    yield clean(f"  ({origin}{runs})")
    yield ""
    going = "would go" if document["dry_run"] else "not removed"
    rows = [
        {
            "VERDICT": "stays" if ckpt["keep"] else "removed" if ckpt["removed"] else going,
            "NAME": ckpt["name"],
            "REASONS": "; ".join(ckpt["reasons"]),
        }
        for ckpt in document["checkpoints"]
    ]
    yield from table(rows, width)


def pin(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A line a checkpoint."""
    state = "pinned" if document["pinned"] else "not pinned"
    for ckpt in document["checkpoints"]:
        yield clean(f"{ckpt['name']} is {state}{'' if ckpt['changed'] else ' already'}.")


def simulate(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """What was assumed, then a line a schedule."""
    setting = document["setting"]
    yield (
        f"MTBF {setting['mtbf'] / 3600:.4g} h, a save stalls {setting['stall']:.4g} s and is committed after"
        f" {setting['commit']:.4g} s, a restart takes {setting['restart']:.4g} s;"
        f" {count_of(document['runs'], 'run')} of {setting['duration'] / 86400:.3g} d"
    )
    yield ""
    rows = [
        {
            "SCHEDULE": entry["schedule"],
            "INTERVAL": f"{entry['mean_gap']:.0f} s",
            "WASTE": f"{entry['waste']:.3%}",
            "STALLED": f"{entry['stalled']:.3%}",
            "LOST": f"{entry['lost']:.3%}",
            "RESTARTING": f"{entry['restarting']:.3%}",
            "LONGEST": f"{entry['longest_gap']:.0f} s",
        }
        for entry in document["schedules"]
    ]
    yield from table(rows, width, right=("INTERVAL", "WASTE", "STALLED", "LOST", "RESTARTING", "LONGEST"))
    if document["plot"]:
        yield clean(f"plot: {document['plot']}")
