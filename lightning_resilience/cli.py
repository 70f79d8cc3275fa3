"""The console command ``lightning-resilience``: look at checkpoints, and look after them, without loading them.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lightning_resilience import housekeeping, store
from lightning_resilience._version import __version__
from lightning_resilience.console import Meter, age, clean, count_of, human_size, table
from lightning_resilience.errors import (
    CheckpointCorrupt,
    CheckpointIncompatible,
    CheckpointNotFound,
    ResilienceError,
    SetupError,
)
from lightning_resilience.housekeeping import open_url
from lightning_resilience.manifest import (
    EXTENSION,
    MANIFEST,
    META,
    METADATA,
    PARTIAL,
    REMOVED,
    SHARD,
    WEIGHTS_ONLY,
    FileEntry,
    Manifest,
    newest_first,
)
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking, judge, understood
from lightning_resilience.tiers import LocalTier, Tier, local_path
from lightning_resilience.urls import is_url

PROG = "lightning-resilience"
READERS = 4
"""Files that ``verify`` reads at once: enough to keep a disk busy, few enough to leave a training machine usable."""

Document = dict[str, Any]

EXAMPLES = """\
examples:
  lightning-resilience ls runs/7                              what is there, newest first
  lightning-resilience show runs/7/epoch=0-step=1200.ckpt     one checkpoint and its files
  lightning-resilience verify runs/7                          read every byte, compare it with what was saved
  lightning-resilience pull s3://bucket/run7 runs/7           the newest one, from the cold tier
  lightning-resilience simulate --mtbf 8h --state-bytes 20e9 --step-time 0.5    what the schedule would cost
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
        description="Look at the checkpoints of a training run, and look after them, without loading them.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"{PROG} {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, help: str, description: str, example: str) -> argparse.ArgumentParser:
        epilog = f"example: {PROG} {name} {example}"
        command = commands.add_parser(name, help=help, description=description, epilog=epilog)
        command.set_defaults(wrong_usage=command.error)
        command.add_argument("--json", action="store_true", help="print one JSON document and nothing else")
        command.add_argument(
            "--storage-options",
            type=_json_object,
            metavar="JSON",
            help="options for URLs, as fsspec takes them; what the environment says is enough for most",
        )
        return command

    command = add(
        "ls",
        "list checkpoints, newest first",
        "List the committed checkpoints of a run, newest first, and what cannot be used, with the cause. "
        "Reads manifests only: `verify` looks at the bytes.",
        "runs/7 --remote s3://bucket/run7",
    )
    command.add_argument("path", metavar="ROOT", help="folder or URL that holds the checkpoints (or one checkpoint)")
    command.add_argument("--remote", type=_url, metavar="URL", help="cold tier: say for each checkpoint where it is")
    command.set_defaults(gather=ls, render=render_ls)

    command = add(
        "show",
        "show one checkpoint and its files",
        "Show the manifest of one checkpoint, what it holds, and whether its files are there at their size.",
        "runs/7/epoch=0-step=1200.ckpt",
    )
    command.add_argument("path", metavar="CKPT", help="folder or URL of a checkpoint")
    command.set_defaults(gather=show, render=render_show)

    command = add(
        "verify",
        "read every byte and compare it with what was saved",
        "Read every byte of all checkpoints of a run, or of one, and compare sizes and digests with the manifest.",
        "runs/7",
    )
    command.add_argument(
        "path", metavar="ROOT_OR_CKPT", help="folder or URL that holds the checkpoints, or of one checkpoint"
    )
    command.set_defaults(gather=verify, render=render_verify)

    command = add(
        "pull",
        "copy a checkpoint from a cold tier to a folder",
        "Copy a checkpoint from a cold tier to a folder, every byte checked; stock tools read it there.",
        "s3://bucket/run7 runs/7",
    )
    command.add_argument("path", type=_url, metavar="URL", help="cold tier, or one checkpoint in it")
    command.add_argument("folder", metavar="DIR", help="folder that will hold the checkpoint's folder")
    command.add_argument("--step", type=int, help="which one; the newest to resume from if not given")
    command.set_defaults(gather=pull, render=render_copies)

    command = add(
        "push",
        "copy checkpoints from a folder to a cold tier",
        "Copy the checkpoints of a folder that a cold tier does not have to it, every byte checked.",
        "runs/7 s3://bucket/run7",
    )
    command.add_argument("path", metavar="DIR", help="folder that holds the checkpoints, or of one checkpoint")
    command.add_argument("url", type=_url, metavar="URL", help="cold tier")
    command.add_argument("--step", type=int, help="only the one of this step")
    command.set_defaults(gather=push, render=render_copies)

    command = add(
        "prune",
        "remove what a rule does not keep",
        "Judge the checkpoints of a folder or a cold tier by a rule, say why each stays or goes, and remove what goes.",
        "runs/7 --last 3 --milestones 10000 --dry-run",
    )
    command.add_argument("path", metavar="ROOT", help="folder or URL that holds the checkpoints")
    command.add_argument("--last", type=_number(1, -1), default=3, help="how many of the newest stay (3); -1: all")
    command.add_argument("--top-k", type=_number(0, -1), help="how many of the best by --monitor stay besides; -1: all")
    command.add_argument("--monitor", help="metric for --top-k")
    command.add_argument("--mode", choices=("min", "max"), default="min", help="which scores are best (min)")
    command.add_argument(
        "--milestones", type=_number(1), help="one checkpoint for each multiple of so many steps stays"
    )
    command.add_argument(
        "--marked",
        type=_number(0),
        default=1,
        help="how many of the newest that the schedule labelled milestone stay (1)",
    )
    command.add_argument("--max-bytes", type=_number(1), help="size of all that stay together")
    command.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    command.set_defaults(gather=prune, render=render_prune)

    for name, does in (("pin", "let no rule remove a checkpoint"), ("unpin", "let rules remove a checkpoint again")):
        command = add(name, does, f"{does.capitalize()}.", "runs/7/epoch=0-step=1200.ckpt")
        command.add_argument("path", metavar="CKPT", help="folder or URL of a checkpoint")
        command.set_defaults(gather=pin, render=render_pin, pinned=name == "pin")

    command = add(
        "simulate",
        "what a schedule would cost",
        "Run AdaptiveSchedule, fixed intervals and an oracle that knows the failure rate against drawn failures, and "
        "say what share of the time each wastes. What is not given is taken from the ledger of a run folder.",
        "runs/7 --plot waste.png",
    )
    command.add_argument("path", metavar="ROOT", nargs="?", help="run folder whose ledger says what saves cost there")
    command.add_argument("--mtbf", type=_duration, help="mean time between failures of the job: 3600, 90min, 8h, 7d")
    command.add_argument("--state-bytes", type=float, help="bytes of one rank's state")
    command.add_argument("--stage-bandwidth", type=float, default=5e9, help="bytes/s of a copy into memory (5e9)")
    command.add_argument("--persist-bandwidth", type=float, default=1e9, help="bytes/s a rank writes to storage (1e9)")
    command.add_argument("--step-time", type=_duration, help="seconds of one training step")
    command.add_argument("--restart", type=_duration, default=120.0, help="from a failure until training goes on (120)")
    command.add_argument("--noise", type=float, default=0.05, help="standard deviation of the loss (0.05)")
    command.add_argument("--max-overhead", type=float, default=0.01, help="of the schedule (0.01)")
    command.add_argument("--rpo", type=_duration, default=1800.0, help="of the schedule (30min)")
    command.add_argument("--prior-mtbf", type=_duration, default=86400.0, help="of the schedule (24h)")
    command.add_argument("--runs", type=_number(1), default=3, help="how many runs are averaged (3)")
    command.add_argument("--plot", metavar="FILE", help="draw waste against interval; needs matplotlib")
    command.set_defaults(gather=simulate, render=render_simulate)
    return parser


def _duration(text: str) -> float:
    """Seconds of a duration: a number, with ``s``, ``min``, ``h`` or ``d`` behind it or not."""
    number, factor = text.strip(), 1.0
    for unit, seconds in (("min", 60.0), ("s", 1.0), ("h", 3600.0), ("d", 86400.0)):
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), seconds
            break
    try:
        value = float(number) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 90, 90s, 30min, 8h or 7d")
    return value


def _number(least: int, *others: int) -> Callable[[str], int]:
    """A whole number of ``least`` or more, or one of the others."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or (value < least and value not in others):
            choices = "".join(f", or {other}" for other in others)
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more{choices}")
        return value

    return read


def _url(text: str) -> str:
    if "://" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL, such as s3://bucket/run7 or file:///path")
    return text


def _json_object(text: str) -> dict[str, Any]:
    """A JSON object; what is wrong with it is said without repeating it, because it may hold credentials."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("a JSON object is wanted")
    return found


def _answer(options: argparse.Namespace) -> tuple[int, list[str]]:
    """Run one command: its exit code, and the lines for stdout."""
    if reconfigure := getattr(sys.stdout, "reconfigure", None):
        reconfigure(errors="backslashreplace")  # a name or a reason that the terminal cannot show is not a crash
    try:
        document: Document = options.gather(options)
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

    tier: Tier
    committed: dict[str, Manifest] = field(default_factory=dict)
    broken: dict[str, ResilienceError] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    stock: list[str] = field(default_factory=list)

    def mentioned(self) -> Document:
        """The part of a document that says what is no checkpoint of ours, and no problem."""
        return {"leftovers": self.leftovers, "stock": self.stock}


def find(options: argparse.Namespace) -> Found:
    """Look at a run folder or URL, or at one checkpoint, which is then all that is found.

    Raises:
        CheckpointNotFound: nothing is there, or a file.
        CheckpointUncommitted: it is what a save or a removal left unfinished.
    """
    if is_url(options.path):
        return _find_remote(options.path, options.storage_options)
    path = local_path(options.path).absolute()
    if _names_a_checkpoint(path):
        try:
            tier, name, manifest = store.open_checkpoint(path)
        except (CheckpointCorrupt, CheckpointIncompatible) as error:
            return Found(LocalTier(path.parent), broken={path.name: error})
        return Found(tier, committed={name: manifest})
    if not path.is_dir():
        raise _not_a_folder(path)
    tier = LocalTier(path)
    listing = store.list_checkpoints(tier, in_part=True)
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


def _find_remote(url: str, storage: dict[str, Any] | None) -> Found:
    tier, name = open_url(url, storage)
    if name is None:
        listing = store.list_checkpoints(tier, in_part=True)
        committed = {name: listing.committed[name] for name in listing.newest_first()}
        under_way = sorted(name for name in listing.uncommitted if tier.is_marked(name))
        broken = {name: cause for name, cause in listing.unusable.items() if name not in under_way}
        return Found(tier, committed, broken, leftovers=under_way)
    try:
        return Found(tier, {name: store.read_manifest(tier, name)})
    except (CheckpointCorrupt, CheckpointIncompatible) as error:
        return Found(tier, broken={name: error})


def _names_a_checkpoint(path: Path) -> bool:
    folder = path.name.endswith(EXTENSION) or PARTIAL in path.name or REMOVED in path.name
    return (folder and not path.is_file()) or (path / MANIFEST).exists()


def _not_a_folder(path: Path) -> CheckpointNotFound:
    if path.exists():
        return CheckpointNotFound(f"{str(path)!r} is a file, such as stock Lightning writes: it has no manifest.")
    return CheckpointNotFound(f"There is no folder {str(path)!r}.", hint="Give the dirpath= of the run.")


# -- ls ---------------------------------------------------------------------------------------------------------------


def ls(options: argparse.Namespace) -> Document:
    """The checkpoints of a run, newest first, and what cannot be used; where each is, if a cold tier is given too."""
    found = find(options)
    cold: dict[str, Manifest] = {}
    if options.remote is not None:
        there = _find_remote(options.remote, options.storage_options)
        cold = there.committed
        found.broken |= {there.tier.where(name): error for name, error in there.broken.items()}
        found.leftovers += [there.tier.where(name) for name in there.leftovers]
    own = "cold" if is_url(options.path) else "hot"
    here_by_rule = _reasons(found.committed, own) or _reasons(found.committed, "hot")
    there_by_rule = _reasons(cold, "cold")
    copies = {name: housekeeping.same_save(cold, manifest) for name, manifest in found.committed.items()}
    rows: list[tuple[Manifest, Document]] = []
    for name, manifest in found.committed.items():
        copy = copies[name]
        reasons = [*here_by_rule.get(name, ()), *(there_by_rule.get(copy, ()) if copy is not None else ())]
        tiers = [own, "cold"] if copy is not None else [own]
        rows.append((manifest, {**_row(name, manifest, reasons, tiers), "copy": copy}))
    for name in cold.keys() - copies.values():
        row = _row(name, cold[name], [*there_by_rule.get(name, ())], ["cold"])
        rows.append((cold[name], {**row, "copy": None}))
    rows.sort(key=lambda row: (row[0].order, row[1]["tiers"], row[1]["name"]), reverse=True)
    return {
        "ok": not found.broken,
        "root": found.tier.where(),
        "checkpoints": [row for _, row in rows],
        "unusable": [{"name": name, **_failure(error)} for name, error in found.broken.items()],
        **found.mentioned(),
    }


def _reasons(committed: dict[str, Manifest], tier: str) -> dict[str, tuple[str, ...]]:
    """Why each checkpoint of a tier stays, or does not, by the rules that the newest one states."""
    said = committed[newest_first(committed)[0]].extra.get("retention") if committed else None
    rule = understood(said, tier) if said is not None else None
    if rule is None:
        return {}
    return {judgement.name: judgement.reasons for judgement in judge(committed, *rule)}


def _row(name: str, manifest: Manifest, reasons: list[str], tiers: list[str]) -> Document:
    """A manifest without its list of files; why it stays, and where it is."""
    document = {**manifest.to_dict(), "name": name, "size": manifest.size}
    return {**document, "files": len(manifest.files), "kept": list(dict.fromkeys(reasons)), "tiers": tiers}


def render_ls(document: Document, width: int | None, now: datetime) -> Iterator[str]:
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
            "METRICS": _metrics(ckpt["metrics"]),
            "KEPT": "; ".join(ckpt["kept"]),
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


# -- show -------------------------------------------------------------------------------------------------------------


def one_checkpoint(options: argparse.Namespace) -> tuple[LocalTier | RemoteTier, str, Manifest]:
    """The checkpoint at a path or URL.

    Raises:
        CheckpointNotFound, CheckpointUncommitted, CheckpointCorrupt: it is none; says what is there.
    """
    if is_url(options.path):
        remote, name = open_url(options.path, options.storage_options)
        if name is None:
            raise CheckpointNotFound(f"{options.path!r} is not a checkpoint.", hint=store.available(remote))
        return remote, name, store.read_manifest(remote, name)
    path = local_path(options.path).absolute()
    if path.is_file():
        raise _not_a_folder(path)
    if path.is_dir() and not _names_a_checkpoint(path):
        raise CheckpointNotFound(f"{str(path)!r} is not a checkpoint.", hint=store.available(LocalTier(path)))
    return store.open_checkpoint(path)


def show(options: argparse.Namespace) -> Document:
    """One checkpoint: its manifest, what it holds, and which of its files are not there at their size."""
    tier, name, manifest = one_checkpoint(options)
    problems = _problems(manifest, [store.size_problem(tier, name, entry) for entry in manifest])
    return {
        **manifest.to_dict(),
        "ok": not problems,
        "name": name,
        "path": tier.where(name),
        "size": manifest.size,
        "holds": _holds(manifest),
        "problems": problems,
    }


def _holds(manifest: Manifest) -> list[str]:
    """What is in a checkpoint, judged by the names of its files."""
    names = [entry.path for entry in manifest]
    shards = [entry for entry in manifest if entry.path.endswith(SHARD)]
    ranks = [name for name in names if name.startswith("rank_")]
    weights_only = WEIGHTS_ONLY in manifest.labels
    parts = {
        f"tensors in {count_of(len(shards), 'shard file')}, {human_size(sum(entry.size for entry in shards))}"
        + (" (weights only)" if weights_only else ""): shards,
        "planning record": METADATA in names,
        "trainer state": META in names,
        f"state of {count_of(len(ranks), 'rank')}": ranks,
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


def verify(options: argparse.Namespace) -> Document:
    """Every file of every checkpoint, read and compared with its manifest."""
    found = find(options)
    work = [(name, entry) for name, manifest in found.committed.items() for entry in manifest]
    answers = iter(_read_all(found.tier, work))
    checkpoints = []
    for name, manifest in found.committed.items():
        problems = _problems(manifest, [next(answers) for _ in manifest])
        if problems and not found.tier.exists(name):
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
        "root": found.tier.where(),
        "checkpoints": checkpoints,
        **found.mentioned(),
    }


def _read_all(tier: Tier, work: list[tuple[str, FileEntry]]) -> list[str | None]:
    """The problem of each file, or None, in the order of ``work``."""
    from concurrent.futures import ThreadPoolExecutor  # not at the top: `ls` does without

    meter = Meter(sum(entry.size for _, entry in work), sys.stderr, "verified")
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


def _metrics(metrics: dict[str, float | str]) -> str:
    return ", ".join(
        f"{name}={value}" if isinstance(value, str) else f"{name}={value:.4g}" for name, value in metrics.items()
    )


# -- pull, push, prune, pin -------------------------------------------------------------------------------------------


def pull(options: argparse.Namespace) -> Document:
    """Copy a checkpoint from a cold tier."""
    tier, name = housekeeping.open_url(options.path, options.storage_options)
    if name is None:
        committed = store.list_checkpoints(tier).committed
        name = housekeeping.choose(committed, options.step, tier.where())
        manifest = committed[name]
    elif options.step is not None:
        options.wrong_usage(f"--step chooses a checkpoint, and {name} is one already")
    else:
        manifest = store.read_manifest(tier, name)
    target = LocalTier(local_path(options.folder).absolute())
    meter = Meter(manifest.size, sys.stderr, "fetched")
    try:
        size = housekeeping.pull(tier, name, manifest, target, meter.advance)
    finally:
        meter.close()
    return _copies(tier, target, [(name, manifest, size)])


def push(options: argparse.Namespace) -> Document:
    """Copy checkpoints to a cold tier."""
    found = find(options)
    if not isinstance(found.tier, LocalTier):
        raise SetupError("push copies from a folder to a URL.", hint="Use pull to copy from a URL.")
    for name, error in found.broken.items():
        print(f"{PROG}: {name} is left out: {error.message}", file=sys.stderr)
    names = list(reversed(found.committed))
    if options.step is not None:
        names = [housekeeping.choose(found.committed, options.step, found.tier.where())]
    if not names:
        raise CheckpointNotFound(f"There are no checkpoints in {found.tier.where()!r}.")
    target = RemoteTier(options.url, options.storage_options)
    target.probe()
    there = store.list_checkpoints(target).committed
    meter = Meter(sum(found.committed[name].size for name in names), sys.stderr, "sent")
    copied: list[tuple[str, Manifest, int]] = []
    left_out: dict[str, ResilienceError] = {}
    try:
        for name in names:
            manifest = found.committed[name]
            try:
                is_there = housekeeping.same_save(there, manifest) is not None
                sent = 0 if is_there else housekeeping.push(found.tier, name, manifest, target, meter.advance)
                copied.append((name, manifest, sent))
            except (CheckpointCorrupt, SetupError) as error:  # of this one; the others go on
                left_out[name] = error
    finally:
        meter.close()
    for name, why in left_out.items():
        print(f"{PROG}: {name} is left out: {why.message} {why.hint}".rstrip(), file=sys.stderr)
    first = next(iter(left_out.values()), None)
    return {
        **_copies(found.tier, target, copied),
        **(_failure(first) if first is not None else {}),
        "left_out": [{"name": name, **_failure(why)} for name, why in left_out.items()],
    }


def _copies(source: Tier, target: Tier, copied: list[tuple[str, Manifest, int]]) -> Document:
    return {
        "ok": True,
        "from": source.where(),
        "to": target.where(),
        "checkpoints": [
            {"name": name, "step": manifest.step, "size": manifest.size, "copied": size}
            for name, manifest, size in copied
        ],
    }


def render_copies(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A line a checkpoint."""
    for ckpt in document["checkpoints"]:
        how = f"copied {human_size(ckpt['copied'])}" if ckpt["copied"] else "was there already"
        yield clean(f"{ckpt['name']}: {how}")
    yield clean(f"{document['from']} -> {document['to']}")


def prune(options: argparse.Namespace) -> Document:
    """Judge checkpoints by a rule, and remove what goes."""
    if options.top_k is not None and options.monitor is None:
        options.wrong_usage("--top-k ranks checkpoints, and there is no --monitor to rank them by")
    keep = Keep(options.last, options.top_k, options.milestones, options.max_bytes, options.marked)
    ranking = Ranking(options.monitor, options.mode) if options.monitor is not None else None
    tier: LocalTier | RemoteTier
    if is_url(options.path):
        tier = RemoteTier(options.path, options.storage_options)
    else:
        path = local_path(options.path).absolute()
        if not path.is_dir():
            raise _not_a_folder(path)
        tier = LocalTier(path)
    judgements, removed = housekeeping.prune(tier, keep, ranking, dry_run=options.dry_run)
    return {
        "ok": options.dry_run or all(judgement.keep or judgement.name in removed for judgement in judgements),
        "root": tier.where(),
        "dry_run": options.dry_run,
        "checkpoints": [
            {
                "name": judgement.name,
                "keep": judgement.keep,
                "removed": judgement.name in removed,
                "reasons": list(judgement.reasons),
            }
            for judgement in judgements
        ],
    }


def render_prune(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """A line a checkpoint, with the reasons."""
    going = "would go" if document["dry_run"] else "could not be removed"
    rows = [
        {
            "VERDICT": "stays" if ckpt["keep"] else "removed" if ckpt["removed"] else going,
            "NAME": ckpt["name"],
            "REASONS": "; ".join(ckpt["reasons"]),
        }
        for ckpt in document["checkpoints"]
    ]
    yield from table(rows, width) if rows else [f"No checkpoints in {document['root']}."]


def pin(options: argparse.Namespace) -> Document:
    """Pin a checkpoint, or unpin it."""
    tier, name, manifest = one_checkpoint(options)
    changed = housekeeping.label(tier, name, manifest, pinned=options.pinned)
    return {"ok": True, "name": name, "pinned": options.pinned, "changed": changed}


def render_pin(document: Document, width: int | None, now: datetime) -> Iterator[str]:
    """One line."""
    state = "pinned" if document["pinned"] else "not pinned"
    yield clean(f"{document['name']} is {state}{'' if document['changed'] else ' already'}.")


# -- simulate ---------------------------------------------------------------------------------------------------------


def simulate(options: argparse.Namespace) -> Document:
    """What a schedule would waste, beside fixed intervals and an oracle."""
    from lightning_resilience import forecast  # not at the top: it needs numpy
    from lightning_resilience.adaptive import AdaptiveSchedule

    if options.plot is not None:
        forecast.check_plot()
    for name in ("state_bytes", "stage_bandwidth", "persist_bandwidth"):
        value = getattr(options, name)
        if value is not None and not 0 < value < float("inf"):
            options.wrong_usage(f"--{name.replace('_', '-')} {value:g}: a number larger than 0 is wanted")
    if not 0 <= options.noise < float("inf"):
        options.wrong_usage(f"--noise {options.noise:g}: a number from 0 is wanted")
    try:
        rule = AdaptiveSchedule(
            max_overhead=options.max_overhead, rpo_seconds=options.rpo, prior_mtbf_seconds=options.prior_mtbf
        )
    except SetupError as error:
        options.wrong_usage(error.message)
    stall = commit = None
    if options.state_bytes is not None:
        stall = options.state_bytes / options.stage_bandwidth
        commit = stall + options.state_bytes / options.persist_bandwidth
    folder = None if options.path is None else local_path(options.path).absolute()
    if folder is not None and not folder.is_dir():
        raise _not_a_folder(folder)
    found = forecast.observed(folder, options.prior_mtbf) if folder is not None else forecast.Observed()
    setting = forecast.setting_of(
        found.overruled(mtbf=options.mtbf, stall=stall, commit=commit, step=options.step_time),
        restart=options.restart,
        noise=options.noise,
    )
    answer = forecast.compare(rule, setting, range(options.runs))
    if options.plot is not None:
        forecast.plot(answer, options.plot)
    return {"ok": True, **answer, "plot": options.plot}


def render_simulate(document: Document, width: int | None, now: datetime) -> Iterator[str]:
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


if __name__ == "__main__":
    sys.exit(main())
