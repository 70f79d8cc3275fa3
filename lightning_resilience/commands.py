"""What each command of the command line does: one function a command, from its options to a plain document.

Every document carries ``ok``: false where a problem was found.  What is to be said on the way, progress and what was
left out, goes to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from lightning_resilience import housekeeping, retention, store
from lightning_resilience.at_path import find, find_remote, not_a_folder, one_checkpoint, refuse_strange
from lightning_resilience.console import Meter, Share, clean, count_of, doing, human_size
from lightning_resilience.errors import CheckpointCorrupt, CheckpointNotFound, ResilienceError, SetupError
from lightning_resilience.manifest import (
    MANIFEST,
    META,
    METADATA,
    SHARD,
    WEIGHTS_ONLY,
    FileEntry,
    Manifest,
)
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.tiers import LocalTier, Tier, local_path
from lightning_resilience.urls import is_url

PROG = "lightning-resilience"
READERS = 4
"""Files that ``verify`` reads at once: enough to keep a disk busy, few enough to leave a training machine usable."""

Document = dict[str, Any]


def failure(error: ResilienceError | OSError) -> Document:
    """What stopped a command, for scripts that asked for JSON too."""
    message, hint = (error.message, error.hint) if isinstance(error, ResilienceError) else (str(error), "")
    return {"ok": False, "error": type(error).__name__, "message": message, "hint": hint}


# -- ls ---------------------------------------------------------------------------------------------------------------


def ls(options: argparse.Namespace) -> Document:
    """The checkpoints of a run, newest first, and what cannot be used; where each is, if a cold tier is given too."""
    found = find(options.path, options.storage_options)
    cold: dict[str, Manifest] = {}
    if options.remote is not None:
        there = find_remote(options.remote, options.storage_options)
        cold = there.committed
        found.broken |= {there.tier.where(name): error for name, error in there.broken.items()}
        found.leftovers += [there.tier.where(name) for name in there.leftovers]
    refuse_strange(found, cold)
    own = "cold" if is_url(options.path) else "hot"
    here_by_rule = _reasons(found.committed, *_rules_for(options.path))
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
        "monitor": _monitor(found.committed or cold),
        "checkpoints": [row for _, row in rows],
        "unusable": [{"name": name, **failure(error)} for name, error in found.broken.items()],
        **found.mentioned(),
    }


def _rules_for(place: str) -> tuple[str, ...]:
    """Whose rules are those of a place, as manifests record them."""
    return ("cold", "hot") if is_url(place) else ("hot",)


def _reasons(committed: dict[str, Manifest], *tiers: str) -> dict[str, tuple[str, ...]]:
    """Why each checkpoint of a tier stays, or does not, by the rule that they record."""
    found = retention.recorded(committed, *tiers)
    if found is None:
        return {}
    _, keep, ranking = found
    return {judgement.name: judgement.reasons for judgement in retention.judge_runs(committed, keep, ranking)}


def _monitor(committed: dict[str, Manifest]) -> str | None:
    """The metric that a run goes by."""
    found = retention.recorded(committed, "hot", "cold")
    return found[2].monitor if found is not None and found[2] is not None else None


def _row(name: str, manifest: Manifest, reasons: list[str], tiers: list[str]) -> Document:
    """A manifest without its list of files; why it stays, and where it is."""
    document = {**manifest.to_dict(), "name": name, "size": manifest.size}
    return {**document, "files": len(manifest.files), "kept": list(dict.fromkeys(reasons)), "tiers": tiers}


# -- show -------------------------------------------------------------------------------------------------------------


def show(options: argparse.Namespace) -> Document:
    """One checkpoint: its manifest, what it holds, and which of its files are not there at their size."""
    tier, name, manifest = one_checkpoint(options.path, options.storage_options)
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


# -- verify -----------------------------------------------------------------------------------------------------------


def verify(options: argparse.Namespace) -> Document:
    """Every file of every checkpoint, read and compared with its manifest."""
    found = find(options.path, options.storage_options)
    refuse_strange(found)
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
    found = find(options.path, options.storage_options)
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
        **(failure(first) if first is not None else {}),
        "left_out": [{"name": name, **failure(why)} for name, why in left_out.items()],
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


def export(options: argparse.Namespace) -> Document:
    """One file, as stock Lightning writes it, from a checkpoint of any strategy."""
    if is_url(options.file):
        options.wrong_usage(f"{options.file}: the file is written to a folder, not to a URL")
    file = local_path(options.file).absolute()
    housekeeping.check_target(file, force=options.force)
    tier, name, manifest = one_checkpoint(options.path, options.storage_options)
    with ExitStack() as scope:
        if isinstance(tier, RemoteTier):
            meter = scope.enter_context(closing(Meter(manifest.size, sys.stderr, "fetched")))
            here = scope.enter_context(housekeeping.fetched(tier, name, manifest, meter.advance))
            manifest = manifest.standing_alone()
        else:
            here = tier
            answers = _read_all(tier, [(name, entry) for entry in manifest])
            if problems := [item["problem"] for item in _problems(manifest, answers)]:
                raise CheckpointCorrupt(
                    f"{tier.where(name)!r} is damaged: {'; '.join(problems)}.",
                    problems=tuple(problems),
                    hint="Export another one; verify says which are whole.",
                )
        with doing(f"reading {human_size(manifest.size)} …", sys.stderr):
            from lightning_resilience import export as one_file  # here alone: it needs torch

            checkpoint = one_file.read(here, name, manifest, weights_only=options.weights_only)
    with closing(Meter(one_file.size_of(checkpoint), sys.stderr, "written")) as meter:
        tell = partial(meter.advance, what=file.name)
        size = one_file.write(checkpoint, file, force=options.force, tell=tell)
    return {
        "ok": True,
        "from": tier.where(name),
        "file": str(file),
        "step": manifest.step,
        "size": size,
        "weights_only": options.weights_only or WEIGHTS_ONLY in manifest.labels,
    }


def prune(options: argparse.Namespace) -> Document:
    """Judge checkpoints by a rule, and remove what goes."""
    tier: LocalTier | RemoteTier
    if is_url(options.path):
        tier = RemoteTier(options.path, options.storage_options)
    else:
        path = local_path(options.path).absolute()
        if not path.is_dir():
            raise not_a_folder(path)
        tier = LocalTier(path)
    committed = store.list_checkpoints(tier).committed
    document: Document = {"ok": True, "root": tier.where(), "dry_run": options.dry_run, "checkpoints": []}
    if not committed:
        refuse_strange(find(options.path, options.storage_options))
        return document
    keep, ranking, origin = _rule(options, committed)
    pruned = housekeeping.prune(tier, committed, keep, ranking, dry_run=options.dry_run)
    for name, why in pruned.left.items():
        print(clean(f"{PROG}: {name} was not removed: {why}"), file=sys.stderr)
    rule = {**dataclasses.asdict(keep), **(dataclasses.asdict(ranking) if ranking is not None else {})}
    return {
        **document,
        "ok": not pruned.left,
        "rule": {"keeps": retention.described(keep, ranking), **origin, **rule},
        "runs": len({manifest.run for manifest in committed.values()}),
        "checkpoints": [
            {
                "name": judgement.name,
                "keep": judgement.keep,
                "removed": judgement.name in pruned.removed,
                "reasons": list(judgement.reasons),
                "left": pruned.left.get(judgement.name),
            }
            for judgement in pruned.judgements
        ],
    }


def _rule(options: argparse.Namespace, committed: dict[str, Manifest]) -> tuple[Keep, Ranking | None, Document]:
    """The rule that the checkpoints record, with what was typed in the place of its parts; and where it is from."""
    found = retention.recorded(committed, *_rules_for(options.path))
    name, keep, ranking = found if found is not None else (None, Keep(), None)
    parts = ("last", "top_k", "milestones", "marked", "max_bytes", "monitor", "mode")
    given = {part: value for part in parts if (value := getattr(options, part)) is not None}
    if found is None and not given:
        options.wrong_usage(
            "no checkpoint there records a rule that this version knows: say what is to stay, such as --last 3"
        )
    keep = dataclasses.replace(
        keep, **{part: value for part, value in given.items() if part not in ("monitor", "mode")}
    )
    monitor = options.monitor or (ranking.monitor if ranking is not None else None)
    if ranking is not None and monitor != ranking.monitor and options.mode is None:
        options.wrong_usage(f"--monitor {monitor}: say which of its scores are best, with --mode min or --mode max")
    mode = options.mode or (ranking.mode if ranking is not None else "min")
    if monitor is None and (options.top_k is not None or options.mode is not None):
        option = "--top-k" if options.top_k is not None else "--mode"
        options.wrong_usage(f"{option} ranks checkpoints, and there is no --monitor to rank them by")
    if options.monitor is not None:
        metrics = sorted({metric for manifest in committed.values() for metric in manifest.metrics})
        if monitor not in metrics:
            there = f"there are {', '.join(metrics)}" if metrics else "they have none"
            options.wrong_usage(f"--monitor {monitor}: no checkpoint has that metric; {there}")
        if not keep.top_k:
            options.wrong_usage("--monitor ranks checkpoints, and there is no --top-k to say how many stay")
    origin = {"recorded_by": name, "given": [f"--{part.replace('_', '-')}" for part in given]}
    return keep, Ranking(monitor, mode) if monitor is not None else None, origin


def pin(options: argparse.Namespace) -> Document:
    """Pin checkpoints, or unpin them; none of them where one is not there."""
    opened = [one_checkpoint(path, options.storage_options) for path in options.paths]
    checkpoints = [
        {
            "name": name,
            "path": tier.where(name),
            "changed": housekeeping.label(tier, name, manifest, pinned=options.pinned),
        }
        for tier, name, manifest in opened
    ]
    changed = any(ckpt["changed"] for ckpt in checkpoints)
    return {"ok": True, "pinned": options.pinned, "changed": changed, "checkpoints": checkpoints}


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
        raise not_a_folder(folder)
    found = forecast.observed(folder, options.prior_mtbf) if folder is not None else forecast.Observed()
    setting = forecast.setting_of(
        found.overruled(mtbf=options.mtbf, stall=stall, commit=commit, step=options.step_time),
        restart=options.restart,
        noise=options.noise,
    )
    runs = options.runs if options.runs is not None else forecast.runs_of(setting)
    with ExitStack() as scope:

        def progress(total: float) -> Callable[[float, str], None]:
            return scope.enter_context(closing(Share(total, sys.stderr, "simulated"))).advance

        answer = forecast.compare(rule, setting, range(runs), progress)
    if options.plot is not None:
        forecast.plot(answer, options.plot)
    return {"ok": True, **answer, "plot": options.plot}
