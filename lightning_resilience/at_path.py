"""What lies at a path or URL that was typed: the checkpoints of a run, or one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning_resilience import store
from lightning_resilience.errors import CheckpointCorrupt, CheckpointIncompatible, CheckpointNotFound, ResilienceError
from lightning_resilience.housekeeping import open_url
from lightning_resilience.ledger import LEDGER
from lightning_resilience.manifest import EXTENSION, MANIFEST, PARTIAL, REMOVED, Manifest
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import LocalTier, Tier, local_path
from lightning_resilience.urls import is_url

Storage = Mapping[str, Any] | None
"""Options for URLs, as fsspec takes them."""


@dataclass
class Found:
    """What lies at a path: committed checkpoints, folders with a problem, and what is only mentioned."""

    tier: Tier
    committed: dict[str, Manifest] = field(default_factory=dict)
    broken: dict[str, ResilienceError] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    stock: list[str] = field(default_factory=list)

    def mentioned(self) -> dict[str, Any]:
        """The part of a document that says what is no checkpoint of ours, and no problem."""
        return {"leftovers": self.leftovers, "stock": self.stock}


def find(place: str, storage: Storage) -> Found:
    """Look at a run folder or URL, or at one checkpoint, which is then all that is found.

    Raises:
        CheckpointNotFound: nothing is there, or a file.
        CheckpointUncommitted: it is what a save or a removal left unfinished.
    """
    if is_url(place):
        return find_remote(place, storage)
    path = local_path(place).absolute()
    if _names_a_checkpoint(path):
        try:
            tier, name, manifest = store.open_checkpoint(path)
        except (CheckpointCorrupt, CheckpointIncompatible) as error:
            return Found(LocalTier(path.parent), broken={path.name: error})
        return Found(tier, committed={name: manifest})
    if not path.is_dir():
        raise not_a_folder(path)
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


def find_remote(url: str, storage: Storage) -> Found:
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


def refuse_strange(found: Found, elsewhere: Collection[str] = ()) -> None:
    """Make sure that a folder without checkpoints is one that a run may be about to fill.

    Args:
        found: what lies in it.
        elsewhere: checkpoints of that run in another place.

    Raises:
        CheckpointNotFound: it holds other things only.
    """
    tier = found.tier
    if any((found.committed, found.broken, found.leftovers, found.stock, elsewhere)) or not isinstance(tier, LocalTier):
        return
    with os.scandir(tier.root) as entries:
        names = {entry.name for entry in entries}
    if names and LEDGER not in names:
        raise CheckpointNotFound(
            f"There are no checkpoints in {str(tier.root)!r}, nor anything else of a run.",
            hint="Give the dirpath= of the run.",
        )


def _names_a_checkpoint(path: Path) -> bool:
    folder = path.name.endswith(EXTENSION) or PARTIAL in path.name or REMOVED in path.name
    return (folder and not path.is_file()) or (path / MANIFEST).exists()


def not_a_folder(path: Path) -> CheckpointNotFound:
    if path.exists():
        return CheckpointNotFound(f"{str(path)!r} is a file, such as stock Lightning writes: it has no manifest.")
    return CheckpointNotFound(f"There is no folder {str(path)!r}.", hint="Give the dirpath= of the run.")


def one_checkpoint(place: str, storage: Storage) -> tuple[LocalTier | RemoteTier, str, Manifest]:
    """The checkpoint at a path or URL.

    Raises:
        CheckpointNotFound, CheckpointUncommitted, CheckpointCorrupt: it is none; says what is there.
    """
    if is_url(place):
        remote, name = open_url(place, storage)
        if name is None:
            raise CheckpointNotFound(f"{place!r} is not a checkpoint.", hint=store.available(remote))
        return remote, name, store.read_manifest(remote, name)
    path = local_path(place).absolute()
    if path.is_file():
        raise not_a_folder(path)
    if path.is_dir() and not _names_a_checkpoint(path):
        raise CheckpointNotFound(f"{str(path)!r} is not a checkpoint.", hint=store.available(LocalTier(path)))
    return store.open_checkpoint(path)
