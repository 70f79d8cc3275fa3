"""What is saved, where to, and what has become of it, as everybody around the engine sees it."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from lightning_resilience import store
from lightning_resilience.errors import SaveFailed
from lightning_resilience.flat import FlatState, State
from lightning_resilience.manifest import Manifest, outlined
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.remote import RemoteTier
from lightning_resilience.retention import Keep, Ranking
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")

OVERDUE = 60.0
"""Seconds after its deadline at which a save that has not even failed is spoken of."""


Keys: TypeAlias = Callable[[FlatState], Collection[str]]
"""Gives some of the keys of a flat state."""


def no_keys(_: FlatState) -> Collection[str]:
    """No keys."""
    return ()


@dataclass(frozen=True)
class Snapshot:
    """What a save copies: references to the live state, and what is already serialised.

    Args:
        state: nested tensors and objects, as DCP takes them; this rank's part.
        identical: gives the keys of plain tensors that all ranks hold bit for bit, of the flat state.
        meta: content of ``meta.pt``, of which rank 0's is written; or why there is none, which drops the save.
        rank_state: content of this rank's own file; or why there is none.
        trained: gives the keys of the parameters, which must be finite in a checkpoint to resume from.
        still: gives the keys of tensors that nothing but an optimizer's step changes.
    """

    state: State
    identical: Keys
    meta: bytes | Exception
    rank_state: bytes | Exception
    trained: Keys = no_keys
    still: Keys = no_keys


@dataclass(frozen=True)
class Facts:
    """What the manifest says of a save beside its files; rank 0's are written.  With a ``suspicion`` a run does not
    resume from it; ``off_since`` is the step since which the loss is off its course."""

    step: int
    epoch: int
    reason: str
    strategy: str
    suspicion: str = ""
    labels: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    off_since: int | None = None


@dataclass(frozen=True, eq=False)
class Folder:
    """A tier as this rank sees it: which ranks share it, and the rule of what it keeps."""

    tier: LocalTier | RemoteTier
    sharing: tuple[int, ...]
    leaders: tuple[int, ...]
    keep: Keep | None = None
    ranking: Ranking | None = None
    link: str | None = None
    remote_keep: Keep | None = None
    _told: list[str] = field(default_factory=list)

    @property
    def leader(self) -> int:
        """The rank that acts for all that share it."""
        return self.sharing[0]

    def lead_to(self, name: str) -> None:
        """Let the link, where there is one, point to a checkpoint.  For leaders; a link is worth no failed save."""
        if self.link is not None:
            try:
                self.tier.point(self.link, name)
            except FileExistsError:
                if not self._told:
                    self._told.append(self.link)
                    log.warning(
                        "event=link folder=%s link=%s outcome=none reason='it is there, and no link of ours: move it"
                        " away to have one that leads to the newest checkpoint'",
                        self.tier.where(),
                        self.link,
                    )
            except OSError as error:
                log.warning("event=link folder=%s error=%r", self.tier.where(), error)


@dataclass
class Save:
    """One save under way: futures for its stages, and how long they took in seconds: for how long the training thread
    ``waited``, and devices ``held`` training back; ``stage`` of copying, also behind it, and ``persist`` of writing,
    which goes on beside that."""

    step: int
    attempt: int
    sequence: int
    folder: Folder
    facts: Facts
    staged: Future[None] = field(default_factory=Future)
    committed: Future[Committed] = field(default_factory=Future)
    began: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    held: float = 0.0
    stage: float = 0.0
    persist: float = 0.0
    seconds: float = 0.0
    """How long it took from its beginning to the commit."""

    @property
    def stall(self) -> float:
        """For how long it kept training still, in seconds."""
        return self.waited + self.held

    def wait(self, seconds: float | None = None) -> Committed:
        """Block until it is committed.

        Raises:
            SaveFailed: it was dropped, or is not done after ``seconds``.
        """
        if not wait_for([self.committed], seconds).done:
            raise SaveFailed(f"The save of step {self.step} is not done after {seconds:.0f} s.", step=self.step)
        return self.committed.result()


@dataclass(frozen=True)
class Committed:
    """A checkpoint that exists: its ``path`` (a text with its URL where there is no folder) and ``manifest``, on ranks
    other than 0 without the files."""

    path: Path | str
    manifest: Manifest

    @property
    def name(self) -> str:
        """Last component of the path."""
        return os.path.basename(self.path)


def log_save(save: Save) -> None:
    """One line for a save that was committed."""
    committed = save.committed.result()
    log.info(
        "event=save step=%d name=%s bytes=%d stall=%.3f persist=%.3f reason=%r",
        save.step,
        committed.name,
        committed.manifest.size,
        save.stall,
        save.persist,
        committed.manifest.reason,
    )


def manifests_in(folder: Folder, ranks: Ranks) -> dict[str, Manifest]:
    """The committed checkpoints of a folder as its leader lists them, on all ranks; without their files but on rank 0,
    as after a save.  Collective."""
    found = attempt(lambda: store.list_checkpoints(folder.tier).committed) if ranks.rank == folder.leader else None
    answers = ranks.all_gather(outlined(found) if isinstance(found, dict) else found)
    raise_first([answer for answer in answers if answer is not None])
    listing: Any = found if ranks.rank == 0 else answers[folder.leader]
    assert isinstance(listing, dict)
    return listing
