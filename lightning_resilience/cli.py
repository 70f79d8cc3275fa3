"""The console command ``lightning-resilience``: look at checkpoints without loading them.

Each command is two functions: one gathers a plain document, one renders that document as lines.  ``--json`` prints the
document itself, and nothing else.  Every document carries ``ok``, which is also the exit code: 0 where it is true, 1
where a problem was found; 2 is left to argparse, for wrong usage.

Nothing here imports torch or lightning, so that a listing answers at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TextIO

from lightning_resilience import store
from lightning_resilience._version import __version__
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointNotFound,
    ResilienceError,
)
from lightning_resilience.manifest import (
    EXTENSION,
    MANIFEST,
    META,
    METADATA,
    PARTIAL,
    REMOVED,
    WEIGHTS_ONLY,
    FileEntry,
    Manifest,
)
from lightning_resilience.tiers import LocalTier, local_path

PROG = "lightning-resilience"
READERS = 4
"""Files that ``verify`` reads at once: enough to keep a disk busy, few enough to leave a training machine usable."""

Document = dict[str, Any]

EXAMPLES = """\
examples:
  lightning-resilience ls runs/7                              what is there, newest first
  lightning-resilience show runs/7/epoch=0-step=1200.ckpt     one checkpoint and its files
  lightning-resilience verify runs/7                          read every byte, compare it with what was saved
  lightning-resilience ls runs/7 --json | jq -r '.checkpoints[0].name'

exit codes: 0 fine, 1 a problem was found, 2 wrong usage
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of the process where it is None.

    Returns:
        The exit code.

    Raises:
        SystemExit: from argparse, for ``--help``, ``--version`` and wrong usage.
    """
    code = 0
    try:
        try:
            code, lines = _answer(_parser().parse_args(argv))
            for line in lines:
                print(line)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough (`| head`); what is still buffered must not raise again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        print(f"{PROG}: interrupted", file=sys.stderr)
        code = 130
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Look at the checkpoints of a training run without loading them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, help: str, description: str, example: str) -> argparse.ArgumentParser:
        epilog = f"example: {PROG} {name} {example}"
        command = commands.add_parser(name, help=help, description=description, epilog=epilog)
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        return command

    command = add(
        "ls",
        "list checkpoints, newest first",
        "List the committed checkpoints of a run, newest first, and what cannot be used, with the cause. "
        "Reads manifests only: `verify` looks at the bytes.",
        "runs/7",
    )
    command.add_argument("path", metavar="ROOT", help="folder that holds the checkpoints (or one checkpoint)")
    command.set_defaults(gather=ls, render=render_ls)

    command = add(
        "show",
        "show one checkpoint and its files",
        "Show the manifest of one checkpoint, what it holds, and whether its files are there at their size.",
        "runs/7/epoch=0-step=1200.ckpt",
    )
    command.add_argument("path", metavar="CKPT", help="folder of a checkpoint")
    command.set_defaults(gather=show, render=render_show)

    command = add(
        "verify",
        "read every byte and compare it with what was saved",
        "Read every byte of all checkpoints of a run, or of one, and compare sizes and digests with the manifest.",
        "runs/7",
    )
    command.add_argument(
        "path", metavar="ROOT_OR_CKPT", help="folder that holds the checkpoints, or folder of one checkpoint"
    )
    command.set_defaults(gather=verify, render=render_verify)
    return parser


def _answer(options: argparse.Namespace) -> tuple[int, list[str]]:
    """Run one command: its exit code, and the lines for stdout."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # a name or a reason that the terminal cannot show is not a crash
    try:
        document: Document = options.gather(local_path(options.path).absolute())
    except (ResilienceError, OSError) as error:
        document = _failure(error)
        print("\n".join(filter(None, (f"{PROG}: {document['message']}", document["hint"]))), file=sys.stderr)
        return 1, [json.dumps(document, indent=2)] if options.json else []
    code = 0 if document["ok"] else 1
    if options.json:
        return code, [json.dumps(document, indent=2)]
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return code, list(options.render(document, width, datetime.now(timezone.utc)))


def _failure(error: ResilienceError | OSError) -> Document:
    """What stopped a command, for scripts that asked for JSON too."""
    message, hint = (error.message, error.hint) if isinstance(error, ResilienceError) else (str(error), "")
    return {"ok": False, "error": type(error).__name__, "message": message, "hint": hint}


# -- what is there ----------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """What lies at a path: committed checkpoints, folders with a problem, and what is only mentioned."""

    tier: LocalTier
    committed: dict[str, Manifest] = field(default_factory=dict)
    broken: dict[str, ResilienceError] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    stock: list[str] = field(default_factory=list)

    def mentioned(self) -> Document:
        """The part of a document that says what is no checkpoint of ours, and no problem."""
        return {"leftovers": self.leftovers, "stock": self.stock}


def find(path: Path) -> Found:
    """Look at a run folder, or at one checkpoint, which is then all that is found.

    Raises:
        CheckpointNotFound: nothing is there, or a file.
        CheckpointUncommitted: ``path`` itself is what a save or a removal left unfinished.
    """
    if _names_a_checkpoint(path):
        try:
            tier, name, manifest = store.open_checkpoint(path)
        except (CheckpointCorrupt, CheckpointIncompatible) as error:
            return Found(LocalTier(path.parent), broken={path.name: error})
        return Found(tier, committed={name: manifest})
    if not path.is_dir():
        raise _not_a_folder(path)
    tier = LocalTier(path)
    listing = store.list_checkpoints(tier)
    found = Found(tier, committed={name: listing.committed[name] for name in listing.newest_first()})
    for name, cause in listing.unusable.items():
        if PARTIAL in name or REMOVED in name:
            found.leftovers.append(name)
        elif store.is_stock_folder(tier.path(name)):
            found.stock.append(name)
        else:
            found.broken[name] = cause
    with os.scandir(path) as entries:
        found.stock += sorted(entry.name for entry in entries if entry.name.endswith(EXTENSION) and entry.is_file())
    return found


def _names_a_checkpoint(path: Path) -> bool:
    folder = path.name.endswith(EXTENSION) or PARTIAL in path.name or REMOVED in path.name
    return (folder and not path.is_file()) or (path / MANIFEST).exists()


def _not_a_folder(path: Path) -> CheckpointNotFound:
    if path.exists():
        return CheckpointNotFound(f"{str(path)!r} is a file, such as stock Lightning writes: it has no manifest.")
    return CheckpointNotFound(f"There is no folder {str(path)!r}.", hint="Give the dirpath= of the run.")


# -- ls ---------------------------------------------------------------------------------------------------------------


def ls(path: Path) -> Document:
    """The checkpoints of a run, newest first, and what cannot be used."""
    found = find(path)
    return {
        "ok": not found.broken,
        "root": str(found.tier.root),
        "checkpoints": [_summary(name, manifest) for name, manifest in found.committed.items()],
        "unusable": [{"name": name, **_failure(error)} for name, error in found.broken.items()],
        **found.mentioned(),
    }


def _summary(name: str, manifest: Manifest) -> Document:
    """A manifest without its list of files."""
    document = {**manifest.to_dict(), "name": name, "size": manifest.size}
    document["files"] = len(manifest.files)
    return document


def render_ls(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A table, what is wrong, what is only mentioned."""
    rows = [
        {
            "NAME": ckpt["name"],
            "STEP": str(ckpt["step"]),
            "EPOCH": str(ckpt["epoch"]),
            "AGE": age(ckpt["created"], now),
            "SIZE": human_size(ckpt["size"]),
            "RANKS": str(ckpt["world_size"]),
            "HEALTH": ckpt["health"],
            "LABELS": ",".join(ckpt["labels"]),
            "METRICS": _metrics(ckpt["metrics"]),
            "REASON": ckpt["reason"],
        }
        for ckpt in document["checkpoints"]
    ]
    if rows:
        yield from table(rows, width, right=("STEP", "EPOCH", "AGE", "SIZE", "RANKS"))
    else:
        yield f"No checkpoints in {document['root']}."
    if document["unusable"]:
        yield ""
        yield "not usable:"
        yield from (clean(f"  {item['name']}: {item['message']} {item['hint']}") for item in document["unusable"])
    yield from _mentions(document)


def _mentions(document: Document) -> Iterator[str]:
    if document["leftovers"] or document["stock"]:
        yield ""
    for name in document["leftovers"]:
        yield clean(f"left by a {'save' if PARTIAL in name else 'removal'} under way or killed: {name}")
    for name in document["stock"]:
        yield clean(f"written by stock Lightning, no manifest: {name}")


# -- show -------------------------------------------------------------------------------------------------------------


def show(path: Path) -> Document:
    """One checkpoint: its manifest, what it holds, and which of its files are not there at their size."""
    if path.is_file():
        raise _not_a_folder(path)
    if path.is_dir() and not _names_a_checkpoint(path):
        raise CheckpointNotFound(f"{str(path)!r} is not a checkpoint.", hint=store.available(LocalTier(path)))
    tier, name, manifest = store.open_checkpoint(path)
    problems = _problems(manifest, [store.size_problem(tier, name, entry) for entry in manifest])
    return {
        **manifest.to_dict(),
        "ok": not problems,
        "name": name,
        "path": str(tier.path(name)),
        "size": manifest.size,
        "holds": _holds(manifest),
        "problems": problems,
    }


def _holds(manifest: Manifest) -> list[str]:
    """What is in a checkpoint, judged by the names of its files."""
    names = [entry.path for entry in manifest]
    shards = [entry for entry in manifest if entry.path.endswith(".distcp")]
    ranks = [name for name in names if name.startswith("rank_")]
    weights_only = WEIGHTS_ONLY in manifest.labels
    parts = {
        f"tensors in {_count(len(shards), 'shard file')}, {human_size(sum(entry.size for entry in shards))}"
        + (" (weights only)" if weights_only else ""): shards,
        "planning record": METADATA in names,
        "trainer state": META in names,
        f"state of {_count(len(ranks), 'rank')}": ranks,
    }
    return [part for part, there in parts.items() if there]


def render_show(document: Document, width: int | None, now: datetime) -> Iterator[str]:
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


# -- verify -----------------------------------------------------------------------------------------------------------


def verify(path: Path) -> Document:
    """Every file of every checkpoint, read and compared with its manifest."""
    found = find(path)
    work = [(name, entry) for name, manifest in found.committed.items() for entry in manifest]
    answers = iter(_read_all(found.tier, work))
    checkpoints = []
    for name, manifest in found.committed.items():
        problems = _problems(manifest, [next(answers) for _ in manifest])
        if problems and not found.tier.path(name).exists():
            continue  # retention of a run that is going on took it while we were reading
        checkpoints.append(
            {
                "name": name,
                "ok": not problems,
                "step": manifest.step,
                "files": len(manifest.files),
                "size": manifest.size,
                "problems": problems,
            }
        )
    for name, error in found.broken.items():
        problem = {"file": MANIFEST, "problem": f"{error.message} {error.hint}".strip()}
        checkpoints.append({"name": name, "ok": False, "step": None, "files": 0, "size": 0, "problems": [problem]})
    return {
        "ok": all(ckpt["ok"] for ckpt in checkpoints),
        "root": str(found.tier.root),
        "checkpoints": checkpoints,
        **found.mentioned(),
    }


def _read_all(tier: LocalTier, work: list[tuple[str, FileEntry]]) -> list[str | None]:
    """The problem of each file, or None, in the order of ``work``."""
    from concurrent.futures import ThreadPoolExecutor  # not at the top: `ls` does without

    meter = Meter(sum(entry.size for _, entry in work), sys.stderr)
    pool = ThreadPoolExecutor(READERS, thread_name_prefix="verify")
    try:
        futures = [pool.submit(store.content_problem, tier, name, entry) for name, entry in work]
        answers = []
        for (name, entry), future in zip(work, futures, strict=True):
            answers.append(future.result())
            meter.advance(entry.size, name)
        return answers
    finally:
        pool.shutdown(cancel_futures=True)  # on Ctrl-C, wait for the files at hand, not for all
        meter.close()


def _problems(manifest: Manifest, answers: list[str | None]) -> list[dict[str, str]]:
    return [{"file": entry.path, "problem": answer} for entry, answer in zip(manifest, answers, strict=True) if answer]


def render_verify(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A line a checkpoint, its problems under it, and a sum."""
    for ckpt in document["checkpoints"]:
        if ckpt["ok"]:
            yield clean(f"ok       {ckpt['name']}: {_count(ckpt['files'], 'file')}, {human_size(ckpt['size'])}")
        else:
            yield clean(f"PROBLEM  {ckpt['name']}")
            yield from (clean(f"         {item['problem']}") for item in ckpt["problems"])
    total, bad = len(document["checkpoints"]), sum(not ckpt["ok"] for ckpt in document["checkpoints"])
    if not total:
        yield f"No checkpoints in {document['root']}."
    elif bad:
        yield f"{bad} of {_count(total, 'checkpoint')} {'has' if bad == 1 else 'have'} a problem."
    else:
        size = human_size(sum(ckpt["size"] for ckpt in document["checkpoints"]))
        yield f"{_count(total, 'checkpoint')} verified, {size}."
    yield from _mentions(document)


class Meter:
    """Progress of long work: a bar that is drawn over itself on a terminal, a plain line now and then elsewhere.

    Args:
        total: bytes to do.
        stream: where to show it.
        clock: seconds; monotonic.
    """

    BAR_SECONDS, LINE_SECONDS = 0.1, 10.0
    CELLS = 24

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.stream, self.clock = total, stream, clock
        self.done = 0
        self.bar = stream.isatty()
        self.begun = self.shown = clock()

    def advance(self, count: int, what: str) -> None:
        """``count`` more bytes are done; they were those of ``what``."""
        self.done += count
        now = self.clock()
        if now - self.shown < (self.BAR_SECONDS if self.bar else self.LINE_SECONDS):
            return
        self.shown = now
        share = self.done / self.total if self.total else 1.0
        speed = human_size(self.done / max(now - self.begun, 1e-9))
        text = f"{share:4.0%}  {human_size(self.done)} of {human_size(self.total)}, {speed}/s  {clean(what)}"
        if self.bar:
            filled = round(share * self.CELLS)
            columns = shutil.get_terminal_size().columns
            line = fit(f"[{'#' * filled}{'-' * (self.CELLS - filled)}] {text}", columns - 1)
            self.stream.write(f"\r\x1b[K{line}")
        else:
            self.stream.write(f"verified {text.strip()}\n")
        self.stream.flush()

    def close(self) -> None:
        """Take the bar away."""
        if self.bar:
            self.stream.write("\r\x1b[K")
            self.stream.flush()


# -- text -------------------------------------------------------------------------------------------------------------


def table(rows: list[dict[str, str]], width: int | None, right: Sequence[str] = ()) -> Iterator[str]:
    """Rows under their keys, in columns; columns without any value are left out.

    Args:
        rows: one dict a row, all with the same keys; the first column is never shortened.  No rows, no table.
        width: columns of the terminal: the last columns are shortened to fit, or left out; None for no limit.
        right: keys of the columns that are aligned to the right.
    """
    if not rows:
        return
    cells = [{key: clean(value) for key, value in row.items()} for row in rows]
    used = [key for key in rows[0] if any(row[key] for row in cells)]
    widths = {key: max(len(key), *(len(row[key]) for row in cells)) for key in used}
    if width is not None:
        widths = _narrow(widths, width)
    for row in ({key: key for key in widths}, *cells):
        texts = (
            fit(row[key], size).rjust(size) if key in right else fit(row[key], size).ljust(size)
            for key, size in widths.items()
        )
        yield "  ".join(texts).rstrip()


def _narrow(widths: dict[str, int], width: int) -> dict[str, int]:
    """Shorten columns from the last one to the left, to ten characters at least, then leave them out, until all fit."""
    widths = dict(widths)

    def surplus() -> int:
        return sum(widths.values()) + 2 * (len(widths) - 1) - width

    names = list(widths)[:0:-1]
    for name in names:
        widths[name] -= max(0, min(surplus(), widths[name] - 10))
    for name in names:
        if surplus() > 0:
            del widths[name]
    return widths


def fit(text: str, size: int) -> str:
    """``text``, or its beginning and an ellipsis where it is longer than ``size``."""
    return text if len(text) <= size else text[: max(size - 1, 0)] + "…"


def clean(text: str) -> str:
    """``text`` on one line and without control characters: a name must not redraw somebody's terminal."""
    return "".join(char if char.isprintable() else " " for char in text).rstrip()


def human_size(size: float) -> str:
    """Bytes for people: ``1.2 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def age(created: str, now: datetime) -> str:
    """How long ago ``created`` (as in the manifest) was, to one unit; ``created`` itself where that cannot be said."""
    try:
        then = datetime.strptime(created, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    except ValueError:
        return created
    seconds = int((now - then).total_seconds())
    if seconds < 0:
        return created  # the clock that wrote it is ahead of ours
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length} {unit}"
    return f"{seconds} s"


def _metrics(metrics: dict[str, float | str]) -> str:
    return ", ".join(
        f"{name}={value}" if isinstance(value, str) else f"{name}={value:.4g}" for name, value in metrics.items()
    )


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
