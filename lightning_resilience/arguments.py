"""Arguments of ``ResilientCheckpoint``: what they mean together, and a clear error for what they cannot mean."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_resilience.adaptive import AdaptiveSchedule
from lightning_resilience.divergence import Rollback
from lightning_resilience.errors import SetupError
from lightning_resilience.fsspec_objects import FsspecObjects
from lightning_resilience.manifest import EXTENSION, PARTIAL, REMOVED
from lightning_resilience.numeric import is_number, is_whole
from lightning_resilience.objects import Objects, open_objects
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep
from lightning_resilience.schedule import EverySeconds, EverySteps, FirstOf, Never, Schedule, check_schedule
from lightning_resilience.tiers import LocalTier, local_path
from lightning_resilience.urls import check_url, is_url, shown

DEFAULT_SCHEDULE = AdaptiveSchedule()


def the_schedule(
    schedule: Schedule | None, steps: int | None, interval: timedelta | None, epochs: int | None
) -> Schedule:
    """One schedule from what was given; SetupError where it contradicts itself."""
    for name, value in (("every_n_train_steps", steps), ("every_n_epochs", epochs)):
        if value is not None:
            check_number(name, value, least=0, whole=True)
    triggers: list[Schedule] = []
    if steps:
        triggers.append(EverySteps(steps))
    if interval is not None:
        if not isinstance(interval, timedelta):
            raise SetupError(
                f"train_time_interval={interval!r}: a datetime.timedelta is wanted, as ModelCheckpoint takes."
            )
        triggers.append(EverySeconds(interval.total_seconds()))
    if schedule is not None:
        check_schedule(schedule)
        if triggers:
            raise SetupError(
                f"schedule={schedule!r} was given together with every_n_train_steps or train_time_interval.",
                hint=f"Use schedule=FirstOf({schedule!r}, {', '.join(map(repr, triggers))}).",
            )
        return schedule
    if triggers:
        return FirstOf(*triggers) if len(triggers) > 1 else triggers[0]
    return Never() if epochs is not None or steps == 0 else DEFAULT_SCHEDULE


def the_keep(keep: Keep | None, monitor: str | None, save_top_k: int) -> Keep:
    """What is retained, ModelCheckpoint's arguments included."""
    if keep is None:
        keep = Keep(last=-1 if save_top_k == -1 and monitor is None else 3)
    return replace(keep, top_k=save_top_k) if monitor is not None and keep.top_k is None else keep


CHOICES: dict[str, tuple[object, ...]] = {
    "mode": ("min", "max"),
    "overlap_staging": ("auto", False),
    "on_save_error": ("warn", "raise"),
    "on_unrestorable": ("raise", "fresh"),
    "save_last": (None, True, False, "link"),
    **dict.fromkeys(
        ("exact_data", "log_metrics", "restore_optimizers", "save_weights_only", "save_on_exception"), (True, False)
    ),
}
"""The values that an argument may have."""
COUNTS = {"peers": 0, "max_failures": 1, "max_attempts": 1}
"""The least that an argument may be which is a whole number."""
SECONDS = {"save_timeout": 0.001, "grace_seconds": 0.001}
"""The same of those which are a time."""
OPTIONAL = ("max_attempts", "grace_seconds")
"""Which of these may be None."""


def check_values(given: Mapping[str, object]) -> None:
    """Raise SetupError unless each argument has a value that it may have, whatever the others are.

    Args:
        given: the arguments by name, among others.
    """
    for name, choices in CHOICES.items():
        check_choice(name, given[name], choices)
    for name, least in {**COUNTS, **SECONDS}.items():
        if given[name] is not None or name not in OPTIONAL:
            check_number(name, given[name], least=least, whole=name in COUNTS)


def check_dirpath(dirpath: str | os.PathLike[str] | None) -> str | None:
    """The folder as given, made absolute unless it has variables; SetupError where it cannot be one."""
    if dirpath is None:
        return None
    if not isinstance(dirpath, (str, os.PathLike)) or not os.fspath(dirpath):
        raise SetupError(f"dirpath={dirpath!r} is not a path.", hint="Give dirpath= a folder.")
    text = os.fspath(dirpath)
    if is_url(text):
        check_url(text)
        return text.rstrip("/")
    if text.startswith("file://") and not text.startswith("file://$"):
        check_url(text)
    path = str(local_path(text))
    if "$" in path:
        return path
    if os.path.exists(path) and not os.path.isdir(path):
        raise SetupError(f"dirpath={path!r} is a file.", hint="Give dirpath= a folder.")
    return os.path.realpath(path)


def check_remote(remote: object, options: object, keep: object, dirpath: str | None) -> None:
    """Raise SetupError unless there can be a tier behind each URL; nothing is asked of it yet."""
    is_remote = dirpath is not None and is_url(dirpath)
    if options is not None and not isinstance(options, Mapping):
        raise SetupError(f"storage_options of type {type(options).__name__}: a dict is wanted.")
    if remote is None:
        for name, value in (("storage_options", None if is_remote else options), ("remote_keep", keep)):
            if value is not None:
                raise SetupError(f"{name}= is for a cold tier, and there is none.", hint="Give remote='s3://…' too.")
    elif not isinstance(remote, str) or "://" not in remote:
        raise SetupError(
            f"remote={shown(str(remote))!r} is not a URL.", hint="Use 's3://bucket/folder' or 'file:///path'."
        )
    elif is_remote:
        raise SetupError(
            f"dirpath={shown(str(dirpath))!r} is a URL already, and remote={shown(remote)!r} is another.",
            hint="Give dirpath= a local folder, or leave out remote=.",
        )
    for url in filter(None, (remote, dirpath if is_remote else None)):
        there = open_objects(str(url), options)
        if dirpath is not None and not is_remote and "$" not in dirpath:
            check_apart(dirpath, there)


def check_apart(folder: str | os.PathLike[str], cold: Objects) -> None:
    """Raise SetupError where a cold tier is the folder itself, by whatever path, or one lies in a checkpoint of the
    other: a removal in one would take what is in the other."""
    where = folder_of(cold)
    if where is None:
        return
    here = os.path.realpath(folder)
    with suppress(OSError):
        if os.path.samefile(here, where):  # also where it is mounted twice
            where = here
    common = os.path.commonpath([here, where])
    below = [os.path.relpath(path, common).split(os.sep)[0] for path in (here, where) if path != common]
    if not below:
        raise SetupError(
            f"remote={cold.url!r} is the folder {here!r} of dirpath= itself: there would be no second copy.",
            hint="Give remote= a place of its own.",
        )
    if len(below) == 1 and EXTENSION in below[0]:
        raise SetupError(
            f"Of remote={cold.url!r} and the folder {here!r} of dirpath= one is in a checkpoint of the other, and would"
            " be removed with that.",
            hint="Give remote= a place of its own.",
        )


def folder_of(objects: Objects) -> str | None:
    """Real path of a place on this machine, or None."""
    return os.path.realpath(objects.folder) if isinstance(objects, FsspecObjects) and objects.folder else None


def identity(tier: LocalTier | RemoteTier) -> str:
    """The same text for the same place, by whatever path or URL it was given."""
    return os.path.realpath(tier.root) if isinstance(tier, LocalTier) else folder_of(tier.objects) or tier.where()


def check_filename(filename: str | None, callback: type[ModelCheckpoint]) -> None:
    """Raise SetupError unless a template of names can be filled in, and gives names that are found again."""
    if filename is None:
        return
    try:
        if not isinstance(filename, str) or not filename or len(filename) > 200:
            raise ValueError("it must be a text of 1 to 200 characters")
        if PARTIAL in filename or REMOVED in filename:
            raise ValueError(f"{PARTIAL!r} and {REMOVED!r} mark what is not a checkpoint")
        example = {"epoch": torch.tensor(0), "step": torch.tensor(0)}
        callback._format_checkpoint_name(callback(), filename, example)
    except (ValueError, TypeError, KeyError, IndexError) as error:
        raise SetupError(f"filename={filename!r}: {error}.", hint="Try filename='{epoch}-{step}'.") from error


def check_rollback(rollback: object, weights_only: bool, versions: bool) -> None:
    """Raise SetupError unless there will be something to go back to."""
    if rollback is None:
        return
    if not isinstance(rollback, Rollback):
        raise SetupError(f"rollback={rollback!r} is not a Rollback.", hint="Try rollback=Rollback(patience=50).")
    if weights_only or not versions:
        why = "save_weights_only=True" if weights_only else "enable_version_counter=False"
        raise SetupError(f"rollback= has nothing to go back to with {why}.", hint="Leave one of the two out.")


def check_ranking(monitor: object, save_top_k: int, rules: Mapping[str, object]) -> None:
    """Raise SetupError unless what ranks checkpoints has something to rank them by."""
    if monitor is not None:
        check_name("monitor", monitor, "the name of a metric")
    check_number("save_top_k", save_top_k, least=-1, whole=True)
    if monitor is None and save_top_k > 1:
        raise SetupError(f"save_top_k={save_top_k} ranks checkpoints, but there is no monitor= to rank them by.")
    for name, rule in rules.items():
        if rule is not None and not isinstance(rule, Keep):
            raise SetupError(f"{name}={rule!r} is not a retention rule.", hint="Use Keep(last=3).")
        if rule is not None and rule.top_k and monitor is None:
            raise SetupError(f"{name}={rule!r} ranks checkpoints, but there is no monitor= to rank them by.")


def doubt_mode(monitor: str | None, mode: str) -> None:
    """Warn where a score is kept at its lowest."""
    if monitor is not None and mode == "min" and any(word in monitor.lower() for word in ("acc", "auroc", "f1")):
        rank_zero_warn(f"monitor={monitor!r} looks like a score where more is better, but mode='min' keeps the lowest.")


def check_name(name: str, value: object, what: str) -> None:
    if not isinstance(value, str) or not value:
        raise SetupError(f"{name}={value!r} is not {what}.")


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if not any(value is choice or value == choice for choice in choices):
        raise SetupError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}.")


def check_number(name: str, value: object, *, least: float, whole: bool = False) -> None:
    is_one = is_whole if whole else is_number
    if not is_one(value, least) or value == math.inf:
        raise SetupError(f"{name}={value!r}: a {'whole ' if whole else ''}number of {least:g} or more is wanted.")
