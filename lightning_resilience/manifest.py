"""The on-disk format, version 1.  This docstring is its specification.

A checkpoint is a folder whose name ends in ``.ckpt`` (``EXTENSION``)::

    epoch=0-step=1200.ckpt/
        __0_0.distcp  __1_0.distcp …    each rank's shards: a row of ``torch.save`` streams, DCP's own file format
        __0_1.distcp …                  what all ranks read beside their shards (counters, ``param_groups``), written by
                                        one of them, so that a node that lost its files fetches no more than these and
                                        the shards of its own ranks
        .metadata                       DCP's planning record: which piece of which tensor lies where
        meta.pt                         Lightning's trainer state (loops, callbacks, lr schedulers, hparams, …)
        rank_00000.pt …                 each rank's own state: ``python``, ``numpy``, ``torch``, ``cuda`` random number
                                        generators; ``data``, its place in the training loaders; ``logged``,
                                        what the epoch has logged so far; ``buffers``, where they are its own;
                                        ``thawed``, rank 0's: names of parameters that were frozen
                                        when training began, and are not now;
                                        ``accumulation``, batches a step, as configured and then;
                                        ``settled``, whether Lightning was between two batches
        manifest.json                   the commit record, described below

**Existence.**  A checkpoint exists if and only if ``manifest.json`` does and every file it names is there at its size
and digest.  Writers put every other file in place first, make them durable, then the manifest; on a local tier all of
this happens in ``NAME.partial-TOKEN`` and the rename to ``NAME`` publishes it.  A name that carries ``.partial-`` or
``.removed-`` is never a checkpoint.  Removal goes the other way: rename to ``NAME.removed-TOKEN``, manifest, files.  A
published folder is never written again, except to heal a damaged file with the bytes that its manifest names, and to
change labels, or to call it suspect, each by one rename.  Behind a URL the files have their names from the start, and
the manifest decides; while there is none, or a removal is under way, there is a file ``.unsealed`` beside them (JSON:
``time`` in seconds since 1970, ``token``).

**manifest.json.**  UTF-8 JSON with sorted keys, no insignificant blanks and a final newline:

=============  =====================================================================================================
``format``     1.  A reader refuses any other number.
``run``        uuid of the training run; kept when the run is resumed.
``sequence``   counts the saves of a run across restarts: of two checkpoints the one with the larger number is newer,
               whatever the clocks of the machines say.
``step``       ``trainer.global_step`` at the saved step boundary.
``epoch``      ``trainer.current_epoch``.
``created``    UTC time of the commit, ``YYYY-MM-DDTHH:MM:SSZ``.  For people; nothing is decided by it.
``reason``     why it was saved, in words.
``health``     ``healthy`` or ``suspect``: never the best, never a milestone, never resumed from by itself.
``off_since``  optional: the step with whose weights the loss was first off its course, where it was not back yet
``suspicion``  optional: why it is suspect, e.g. which parameter is not finite, or that the run went back from it.
``labels``     list of words, e.g. ``weights-only``, ``pinned``, ``milestone``, ``last-good`` (saved when a run was
               taken back).
``world_size`` number of ranks that wrote it.
``strategy``   class name of the Lightning strategy.
``metrics``    numbers logged at that step; a number that is not finite is written as ``"nan"``, ``"inf"``, ``"-inf"``.
``retention``  optional: the run's rules when it was saved, ``hot`` and ``cold`` (arguments of ``Keep``), ``monitor``,
               ``mode``.  For people: a run goes by the rules it is given now.
``versions``   of ``torch``, ``lightning`` and ``lightning_resilience``.
``files``      one object a file: ``path`` (a plain name), ``size`` (bytes), ``xxh3_128`` (hex digest of the content),
               ``rank`` (who wrote it), and optionally ``at``: the name of the checkpoint beside this one that holds
               the bytes, for a file that an incremental save did not write again.  Never a chain.
``digest``     xxh3_128 of this document without ``digest``, so that damage to the record itself is noticed.  A reader
               refuses a document without it, and one that is not in the form described here to the byte.
=============  =====================================================================================================

Keys that a reader does not know are kept when the manifest is rewritten.

This module is pure: bytes in, values out.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import xxhash

from lightning_resilience.errors import CheckpointCorrupt, CheckpointIncompatible

FORMAT = 1
EXTENSION = ".ckpt"
MANIFEST = "manifest.json"
SHARD = ".distcp"
METADATA = ".metadata"
META = "meta.pt"
PARTIAL = ".partial-"
REMOVED = ".removed-"

HEALTHY = "healthy"
SUSPECT = "suspect"
WEIGHTS_ONLY = "weights-only"
PINNED = "pinned"
LAST_GOOD = "last-good"
OFF_SINCE = "off_since"
MILESTONE = "milestone"


def rank_file(rank: int) -> str:
    """Name of the file with one rank's own state."""
    return f"rank_{rank:05d}.pt"


def shard_file(rank: int, part: int = 0) -> str:
    """Name of one rank's shard file; with ``part`` 1 of what all ranks read."""
    return f"__{rank}_{part}{SHARD}"


def digest(data: bytes | memoryview) -> str:
    """The content digest the format uses: xxh3_128, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint: ``size`` in bytes, ``xxh3_128`` of its content, and the rank that wrote it."""

    path: str
    size: int
    xxh3_128: str
    rank: int = 0
    at: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        out = {**self.extra, "path": self.path, "size": self.size, "xxh3_128": self.xxh3_128, "rank": self.rank}
        return out if self.at is None else {**out, "at": self.at}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> FileEntry:
        at = raw.get("at")
        return cls(
            path=plain_name(raw["path"]),
            size=int(raw["size"]),
            xxh3_128=str(raw["xxh3_128"]),
            rank=int(raw.get("rank", 0)),
            at=None if at is None else plain_name(at),
            extra={k: v for k, v in raw.items() if k not in _ENTRY_KEYS},
        )


_ENTRY_KEYS = frozenset(f.name for f in dataclasses.fields(FileEntry)) - {"extra"}


@dataclass(frozen=True)
class Manifest:
    """The commit record of one checkpoint; see the module's docstring for each field."""

    run: str
    step: int
    epoch: int
    created: str
    reason: str
    files: tuple[FileEntry, ...]
    sequence: int = 0
    health: str = HEALTHY
    labels: tuple[str, ...] = ()
    world_size: int = 1
    strategy: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files)

    @property
    def unresumable(self) -> str | None:
        """Why a run does not resume from it, however whole it is; None where it may."""
        if WEIGHTS_ONLY in self.labels:
            return "it holds weights only"
        why = self.extra.get("suspicion")
        return None if self.health == HEALTHY else f"it is {self.health}" + (f": {why}" if why else "")

    def suspected(self, why: str) -> Manifest:
        """The manifest of the same save once there is a reason not to resume from it."""
        return dataclasses.replace(self, health=SUSPECT, extra={**self.extra, "suspicion": why})

    def is_same_save(self, other: Manifest) -> bool:
        """Whether both are of one save; labels may have changed since."""
        return self.save_id == other.save_id

    @cached_property
    def save_id(self) -> str:
        """Tells this save from every other one: its run, its number there, and a digest of what its files hold.  Copies
        have the same, whatever they are called, wherever the bytes lie, and whichever labels they got since."""
        content = "".join(f"{entry.path}\0{entry.size}\0{entry.xxh3_128}\n" for entry in self.files)
        return f"{self.run}/{self.sequence}/{digest(content.encode())}"

    def outline(self) -> Outline:
        """What ranks tell each other of it: the files are more the more ranks there are."""
        said = {f.name: getattr(self, f.name) for f in dataclasses.fields(Manifest)}
        return Outline(**{**said, "files": ()}, size=self.size, own_size=self.own_size, save_id=self.save_id)

    def standing_alone(self) -> Manifest:
        """The manifest of a copy that holds the bytes of all its files itself."""
        return dataclasses.replace(self, files=tuple(dataclasses.replace(entry, at=None) for entry in self.files))

    @property
    def own_size(self) -> int:
        """Bytes of the files that lie in its own folder."""
        return sum(entry.size for entry in self.files if entry.at is None)

    @property
    def order(self) -> tuple[int, int]:
        """Sorts checkpoints from old to new."""
        return (self.sequence, self.step)

    def __iter__(self) -> Iterator[FileEntry]:
        return iter(self.files)

    @property
    def paths(self) -> set[str]:
        """Names of all files."""
        return {entry.path for entry in self.files}

    def file(self, path: str) -> FileEntry | None:
        """The entry of one file, or None."""
        return next((entry for entry in self.files if entry.path == path), None)

    def to_dict(self) -> dict[str, Any]:
        raw = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        return {
            **self.extra,
            **raw,
            "format": FORMAT,
            "files": [entry.to_dict() for entry in self.files],
            "labels": list(self.labels),
            "metrics": {name: _number_out(value) for name, value in self.metrics.items()},
            "versions": dict(self.versions),
        }

    def to_bytes(self) -> bytes:
        """The document, with its own digest."""
        raw = self.to_dict()
        return _canonical({**raw, "digest": digest(_canonical(raw))})

    @classmethod
    def from_bytes(cls, data: bytes, where: str = MANIFEST) -> Manifest:
        """Parse a manifest.

        Args:
            data: content of ``manifest.json``.
            where: its path, for messages.

        Raises:
            CheckpointIncompatible: written by a later version of the format.
            CheckpointCorrupt: not a manifest, or damaged.
        """
        try:
            raw = json.loads(data)
            number = raw["format"]
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointCorrupt(
                f"{where} is not a manifest: {type(error).__name__}: {error}.", problems=(f"{MANIFEST}: unreadable",)
            ) from error
        if number != FORMAT:
            raise CheckpointIncompatible(
                f"{where} has format {number!r}; this version reads format {FORMAT}.",
                hint="Install a newer lightning_resilience (pip install -U lightning_resilience).",
            )
        raw.pop("digest", None)
        try:
            # The bytes are compared, not only the digest: a digest whose own key is damaged would not be looked for.
            if data != _canonical({**raw, "digest": digest(_canonical(raw))}):
                raise CheckpointCorrupt(
                    f"{where} does not have the digest it states.", problems=(f"{MANIFEST}: digest differs",)
                )
            return cls._from_dict(raw)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise CheckpointCorrupt(
                f"{where} lacks or misstates a field: {type(error).__name__}: {error}.",
                problems=(f"{MANIFEST}: incomplete",),
            ) from error

    @classmethod
    def _from_dict(cls, raw: Mapping[str, Any]) -> Manifest:
        known = {f.name for f in dataclasses.fields(cls)} - {"extra"} | {"format"}
        return cls(
            run=str(raw["run"]),
            step=int(raw["step"]),
            epoch=int(raw["epoch"]),
            created=str(raw["created"]),
            reason=str(raw["reason"]),
            files=tuple(FileEntry.from_dict(entry) for entry in raw["files"]),
            sequence=int(raw.get("sequence", 0)),
            health=str(raw.get("health", HEALTHY)),
            labels=tuple(raw.get("labels", ())),
            world_size=int(raw.get("world_size", 1)),
            strategy=str(raw.get("strategy", "")),
            metrics={name: float(value) for name, value in raw.get("metrics", {}).items()},
            versions=dict(raw.get("versions", {})),
            extra={k: v for k, v in raw.items() if k not in known},
        )


@dataclass(frozen=True)
class Outline(Manifest):
    """A manifest without its files, and what they add up to."""

    size: int = 0
    own_size: int = 0
    save_id: str = ""

    def outline(self) -> Outline:
        return self

    def to_dict(self) -> dict[str, Any]:
        raise TypeError("an outline is no manifest: it lacks the files")


def outlined(manifests: Mapping[str, Manifest]) -> dict[str, Manifest]:
    """Manifests by name, each without its files."""
    return {name: manifest.outline() for name, manifest in manifests.items()}


def plain_name(name: object) -> str:
    """``name``, unless it would lead out of the folder: nothing in a manifest may name a file elsewhere."""
    if not isinstance(name, str) or "/" in name or "\0" in name or name in ("", ".", ".."):
        raise ValueError(f"files and checkpoints are named by a plain name, not {name!r}")
    return name


def newest_first(manifests: Mapping[str, Manifest]) -> list[str]:
    """Names of checkpoints, the newest first."""
    return sorted(manifests, key=lambda name: manifests[name].order, reverse=True)


def _number_out(value: float) -> float | str:
    return value if math.isfinite(value) else str(float(value))


def _canonical(raw: Mapping[str, Any]) -> bytes:
    text = json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"
