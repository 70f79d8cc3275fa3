"""Second copies on other nodes: where each node has a folder of its own, the next ones hold a copy of its files.

::

    rank of node 1                                     rank of node 2 (the next one)
    ──────────────                                     ─────────────────────────────
    a checkpoint is committed: connect, say which ──>  is it in this folder too?  then yes
    send this rank's files of it                  ──>  write, fsync, digest, put into its place
                                                  <──  done

So a node that is lost costs no trip to the cold tier: at a resume its files are found in another node's folder, as any
others that a folder lacks (see ``heal``).  Everything here is done by threads of its own over plain connections
between the nodes; a peer that does not answer is told of once, and training goes on.  Both ends hold the checkpoint
meanwhile, so that retention leaves it alone: over a slow link it may long be redundant before its copy is whole.
"""

from __future__ import annotations

import errno
import hmac
import json
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lightning_resilience import store
from lightning_resilience.errors import ResilienceError
from lightning_resilience.manifest import FileEntry, Manifest, plain_name
from lightning_resilience.ranks import Ranks, attempt, raise_first
from lightning_resilience.tiers import LocalTier

log = logging.getLogger("lightning_resilience")

SILENCE = 60.0
"""Seconds after which a peer that neither sends nor takes anything is given up."""
TICK = 0.5
"""Seconds between two looks at whether to stop."""
BLOCK = 4 * 2**20
"""Bytes received at a time."""
LONGEST_NOTE = 2**24
"""Bytes that the announcement of a checkpoint may have."""
YES, NO = b"\1", b"\0"
_LENGTH = struct.Struct("!I")


@dataclass(frozen=True)
class Neighbour:
    """A rank as others see it: which is the ``leader`` of its folder, and the ``address`` it listens at."""

    leader: int
    address: tuple[str, int] | None


class Peers:
    """Copies of this rank's files in the folders of other nodes, and of others' in this one.

    Creating it is collective.

    Args:
        ranks: the ranks that save together.
        tier: this rank's folder.
        sharing: the ranks that share it.
        copies: on how many other nodes.
    """

    def __init__(self, ranks: Ranks, tier: LocalTier, sharing: Sequence[int], copies: int) -> None:
        self._rank = ranks.rank
        self._token = ranks.session.encode()
        self._tier = tier
        self._queue: queue.SimpleQueue[tuple[str, Manifest] | None] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._has_failed = False
        self.sent = 0
        """Checkpoints of which this rank has files and all their other nodes have them too."""
        listener = attempt(lambda: _listen(ranks.address))
        self._listener = listener if isinstance(listener, socket.socket) else None
        address = self._listener.getsockname()[:2] if self._listener is not None else None
        everyone = ranks.all_gather(Neighbour(sharing[0], address))
        routes = _routes([neighbour.leader for neighbour in everyone], copies)
        self._targets = [everyone[target].address for target in routes[ranks.rank]]
        senders = sum(ranks.rank in targets for targets in routes)
        self._free = threading.Semaphore(max(senders, 1))  # for as many at once as there are to be
        if isinstance(listener, Exception):
            log.warning("event=peers rank=%d outcome=failed reason='cannot listen: %s'", self._rank, listener)
        _start(self._serve, "resilience-peers")
        self._sender = _start(self._send, "resilience-peer-out")

    # -- the training thread ------------------------------------------------------------------------------------------

    def offer(self, name: str, manifest: Manifest) -> None:
        """A checkpoint is committed; of several that wait, the newest goes first and the others not at all."""
        self._queue.put((name, manifest))

    def drain(self, seconds: float) -> None:
        """Let what was offered arrive, for so long at most; nothing is offered any more."""
        self._queue.put(None)
        self._sender.join(seconds)

    def close(self) -> None:
        """Stop at once; others must have drained, or theirs does not arrive here."""
        self._stop.set()
        if self._listener is not None:
            self._listener.close()

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        while (latest := self._latest()) is not None:
            name, manifest = latest
            try:
                self.sent += self._send_to_all(name, manifest)
            except (OSError, ResilienceError) as error:
                if not self._stop.is_set() and not self._has_failed:
                    log.warning(
                        "event=peers rank=%d name=%s outcome=failed reason=%r note='tried again after the next save'",
                        self._rank, name, str(error),
                    )  # fmt: skip
                self._has_failed = True
            else:
                if self._has_failed:
                    log.warning("event=peers rank=%d name=%s outcome=back", self._rank, name)
                self._has_failed = False

    def _latest(self) -> tuple[str, Manifest] | None:
        """The newest checkpoint that was offered; waits for one, and is None at the end."""
        latest = self._queue.get()
        while latest is not None and not self._queue.empty():
            following = self._queue.get()
            if following is None:
                self._queue.put(None)
                break
            latest = following
        return latest

    def _send_to_all(self, name: str, manifest: Manifest) -> bool:
        """Send this rank's files of a checkpoint to all their other nodes; whether these have them now.

        Raises:
            OSError: one of those did not get them; the others did all the same.
        """
        with self._tier.hold(name):
            files = self._mine(name, manifest)
            if not files:
                return False
            answers = [attempt(partial(self._send_to, target, name, manifest, files)) for target in self._targets]
        raise_first(answers)
        return all(answers)

    def _mine(self, name: str, manifest: Manifest) -> list[FileEntry]:
        """What this rank wrote of a checkpoint."""
        here = store.read_manifest(self._tier, name)
        if not here.is_same_save(manifest):
            return []  # the name is a newer save's, which is offered too
        return [entry for entry in here if entry.rank == self._rank and entry.at is None]

    def _send_to(self, address: tuple[str, int] | None, name: str, manifest: Manifest, files: list[FileEntry]) -> bool:
        """Send files to a rank of another node; whether they are there, which they are not where the checkpoint is
        gone from that node."""
        if address is None:
            raise OSError(errno.EHOSTUNREACH, "the next node does not listen")
        note = {"name": name, "save": manifest.save_id, "files": [entry.to_dict() for entry in files]}
        with socket.create_connection(address, SILENCE) as peer:
            peer.sendall(self._token)
            _put(peer, json.dumps(note).encode())
            if _take(peer, 1) != YES:
                return False
            for entry in files:
                with open(self._tier.path(name, entry.path), "rb") as file:
                    peer.sendfile(file)
            if _take(peer, 1) != YES:
                raise OSError(errno.EIO, f"{address[0]} did not get it whole")
            return True

    # -- receiving ----------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer each peer in a thread of its own: one that sends for minutes keeps none of the others waiting."""
        if self._listener is None:
            return
        self._listener.settimeout(TICK)
        while not self._stop.is_set():
            if not self._free.acquire(timeout=TICK):
                continue
            try:
                peer, _ = self._listener.accept()
            except OSError as error:
                self._free.release()
                if isinstance(error, TimeoutError):
                    continue
                return
            _start(partial(self._answer, peer), "resilience-peer-in")

    def _answer(self, peer: socket.socket) -> None:
        try:
            with peer:
                peer.settimeout(SILENCE)
                self._receive(peer)
        except (OSError, ValueError, KeyError, TypeError, ResilienceError) as error:
            log.debug("event=peers rank=%d outcome=dropped reason=%r", self._rank, str(error))
        finally:
            self._free.release()

    def _receive(self, peer: socket.socket) -> None:
        if not hmac.compare_digest(_take(peer, len(self._token)), self._token):
            return
        note: dict[str, Any] = json.loads(_take(peer, _LENGTH.unpack(_take(peer, _LENGTH.size))[0]))
        name, files = plain_name(note["name"]), [FileEntry.from_dict(raw) for raw in note["files"]]
        here = attempt(lambda: store.read_manifest(self._tier, name))
        is_here = (
            isinstance(here, Manifest) and here.save_id == note["save"] and all(map(here.files.__contains__, files))
        )
        if not is_here:
            peer.sendall(NO)
            return
        with self._tier.hold(name):
            peer.sendall(YES)
            for entry in files:
                with self._tier.arriving(name, entry, "another node") as sink:
                    _write(peer, entry.size, sink)
            peer.sendall(YES)


def _listen(address: str) -> socket.socket:
    """A listener at one of this machine's addresses, be it of IPv4 or IPv6, on a port that is free."""
    family, *_, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
    return socket.create_server(where, family=family)


def _start(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def _routes(leaders: Sequence[int], copies: int) -> list[list[int]]:
    """To which ranks each one sends its files: one rank of each of the next nodes, spread over those that it has.

    Args:
        leaders: of each rank, the leader of its folder.
        copies: on how many other nodes.
    """
    nodes: dict[int, list[int]] = {}
    for rank, leader in enumerate(leaders):
        nodes.setdefault(leader, []).append(rank)
    ring = [nodes[leader] for leader in sorted(nodes)]
    routes: list[list[int]] = [[] for _ in leaders]
    for here, node in enumerate(ring):
        following = [ring[(here + step) % len(ring)] for step in range(1, min(copies, len(ring) - 1) + 1)]
        for place, rank in enumerate(node):
            routes[rank] = [other[place % len(other)] for other in following]
    return routes


def _write(peer: socket.socket, size: int, sink: Path) -> None:
    """Write what a peer sends; on return it survives power loss."""
    block = bytearray(min(BLOCK, max(size, 1)))
    with open(sink, "xb", buffering=0) as file:
        while size:
            count = peer.recv_into(block, min(size, len(block)))
            if not count:
                raise ConnectionResetError(errno.ECONNRESET, "the peer is gone")
            file.write(memoryview(block)[:count])
            size -= count
        os.fsync(file.fileno())


def _put(peer: socket.socket, content: bytes) -> None:
    peer.sendall(_LENGTH.pack(len(content)) + content)


def _take(peer: socket.socket, size: int) -> bytes:
    if size > LONGEST_NOTE:
        raise ValueError(f"{size} bytes are announced")
    content = bytearray()
    while len(content) < size:
        some = peer.recv(size - len(content))
        if not some:
            raise ConnectionResetError(errno.ECONNRESET, "the peer is gone")
        content += some
    return bytes(content)
