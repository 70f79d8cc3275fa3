"""Where checkpoints are looked for, and where the files of the one that was found are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from lightning_resilience import store
from lightning_resilience.manifest import FileEntry, Manifest
from lightning_resilience.memory import MemoryTier
from lightning_resilience.ranks import Ranks
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import LocalTier


@dataclass(frozen=True, eq=False)
class Place:
    """Where checkpoints are looked for: a local folder, which ranks share it, the cold tier behind it, and the memory
    of this node before it.

    Args:
        tier: the folder.
        sharing: ranks that share it.
        cold: what is behind it.
        memory: what is before it; None for all ranks or for none.
        passing: whether the folder is only there for what is fetched, as long as that is read.
    """

    tier: LocalTier
    sharing: tuple[int, ...]
    cold: RemoteTier | None = None
    memory: MemoryTier | None = None
    passing: bool = False

    @property
    def leader(self) -> int:
        """The rank that acts for all that share the folder."""
        return self.sharing[0]

    @classmethod
    def shared(cls, ranks: Ranks, tier: LocalTier, cold: RemoteTier | None = None) -> Place:
        """A folder that all ranks are taken to share."""
        return cls(tier, tuple(range(ranks.world_size)), cold)


@dataclass(frozen=True)
class Origin:
    """From which tiers a checkpoint is read; as text, for the log."""

    in_memory: tuple[int, int] = (0, 0)
    """Of how many of the ranks that wrote it the shards are read in memory, and how many there are."""
    from_folder: bool = True
    """Whether any file is read in a folder that was not fetched for it."""
    fetched: int = 0
    """Bytes that had to be fetched from the cold tier."""

    def __str__(self) -> str:
        here, all_of = self.in_memory
        from_where = {"memory": here, "hot": self.from_folder, "cold": self.fetched}
        numbers = f" fetched={self.fetched}" if self.fetched else ""
        numbers += f" memory={here}/{all_of}" if here else ""
        return f"tier={','.join(tier for tier, some in from_where.items() if some)}{numbers}"


@dataclass(frozen=True)
class Source:
    """A checkpoint that every rank can read: verified if it has a manifest, or to be verified while it is read; without
    one it is stock Lightning's."""

    tier: LocalTier
    name: str
    manifest: Manifest | None = None
    copies: tuple[str, ...] = ()
    """What its copies in the cold tier are called."""
    in_memory: Mapping[str, Path] = field(default_factory=dict)
    """Where the files are that this node's memory has whole."""
    unchecked: Mapping[Path, FileEntry] = field(default_factory=dict)
    """Files that this rank digests while it reads them; it is not known before whether they are whole."""
    is_checked: bool = True
    """Whether every byte was checked, by any rank; the same on all ranks."""
    origin: Origin = Origin()

    @property
    def path(self) -> Path:
        return self.tier.path(self.name)

    def locate(self, file: str) -> Path:
        """Path of one of its files, to read it."""
        return self.in_memory.get(file) or self.home(file)

    def home(self, file: str) -> Path:
        """Path of one of its files in the folder."""
        entry = self.manifest.file(file) if self.manifest is not None else None
        return self.tier.path(store.holder(self.name, entry) if entry is not None else self.name, file)


Needs = Callable[[Source], set[str]]
"""Names of the files of a checkpoint that this rank reads when it loads it, told from the small ones that are there."""
