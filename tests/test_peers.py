"""Second copies on other nodes: a node that is lost costs nothing, and a peer that is broken costs no run."""

from __future__ import annotations

import json
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from forks import run_forks
from lightning_resilience import CheckpointCorrupt, EverySteps, Keep, ResilientCheckpoint, SetupError
from lightning_resilience.peers import _LENGTH, NO, YES, Neighbour, Peers, _routes
from lightning_resilience.store import list_checkpoints, retain
from lightning_resilience.tiers import LocalTier
from on_disk import save
from support import TinyModel, data, make_trainer, settle, strategy

STEPS = 6
TOKEN = b"f00d" * 3


def train(root: Path, how: str, steps: int, peers: int = 1, memory: Any = False) -> tuple[int, list[float]]:
    """One rank a node, each with a disk of its own; from what step it went on, and the losses."""
    os.environ["NODE"] = os.environ["RANK"]
    began: list[int] = []

    class Begins(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            began.append(trainer.global_step)

    callback = ResilientCheckpoint(f"{root}/$NODE/run", schedule=EverySteps(2), peers=peers, memory=memory)
    model = TinyModel()
    trainer = make_trainer(
        root, callback, settle(), Begins(), max_steps=steps, strategy=strategy(how, 2), devices=2, max_epochs=-1
    )
    trainer.fit(model, data(64), ckpt_path="last")
    return began[0], [float(value) for value in torch.nn.utils.parameters_to_vector(
        [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    )]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("how", ["ddp", "fsdp2"])
@pytest.mark.parametrize("lost", [0, 1])
def test_run_goes_on_where_it_was_after_a_node_and_its_disk_are_lost(tmp_path: Path, how: str, lost: int) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    uncut = run_forks(train, whole, how, STEPS + 4, world_size=2)
    run_forks(train, tmp_path, how, STEPS, world_size=2)
    for node in "01":
        listing = list_checkpoints(LocalTier(tmp_path / node / "run")).committed
        newest = max(listing, key=lambda name: listing[name].sequence)
        assert {path.name for path in (tmp_path / node / "run" / newest).iterdir()} == {
            *listing[newest].paths, "manifest.json"
        }  # fmt: skip
    shutil.rmtree(tmp_path / str(lost))
    again = run_forks(train, tmp_path, how, STEPS + 4, world_size=2)
    assert [began for began, _ in again] == [STEPS] * 2
    assert [weights for _, weights in again] == [weights for _, weights in uncut]


@pytest.mark.ranks
def test_without_peers_the_same_loss_leaves_nothing_to_go_on_from(tmp_path: Path) -> None:
    run_forks(train, tmp_path, "fsdp2", STEPS, 0, world_size=2)
    shutil.rmtree(tmp_path / "1")
    with pytest.raises(Exception, match=CheckpointCorrupt.__name__):
        run_forks(train, tmp_path, "fsdp2", STEPS + 4, 0, world_size=2)


# -- one rank, and a peer made by hand --------------------------------------------------------------------------------


class OneOfSome:
    """What ``Peers`` asks of its ranks: this one is rank 0 on node 0, each other one is a node and listens there."""

    rank, session, address = 0, TOKEN.decode(), "127.0.0.1"

    def __init__(self, *others: tuple[str, int] | None) -> None:
        self.others = others
        self.mine: Any = None

    def all_gather(self, mine: Neighbour) -> list[Neighbour]:
        self.mine = mine
        return [mine, *(Neighbour(rank, other) for rank, other in enumerate(self.others, 1))]


@pytest.fixture
def peers(tmp_path: Path) -> Any:
    tier = LocalTier(tmp_path)
    ranks = OneOfSome(None)
    one = Peers(ranks, tier, (0,), copies=1)  # type: ignore[arg-type]
    yield tier, ranks.mine.address, one
    one.close()


def announce(address: tuple[str, int], token: bytes, note: dict[str, Any]) -> socket.socket:
    peer = socket.create_connection(address, 20)
    text = json.dumps(note).encode()
    peer.sendall(token + _LENGTH.pack(len(text)) + text)
    return peer


def note_of(tier: LocalTier, name: str, *files: str) -> dict[str, Any]:
    manifest = list_checkpoints(tier).committed[name]
    entries = [entry.to_dict() for entry in manifest if entry.path in files]
    return {"name": name, "save": manifest.save_id, "files": entries}


def test_file_that_a_folder_lacks_gets_into_its_place_and_only_if_it_is_whole(peers: Any) -> None:
    tier, address, _ = peers
    name = save(tier)
    file = next(iter(list_checkpoints(tier).committed[name].paths))
    whole = tier.read(name, file)
    tier.path(name, file).unlink()
    with announce(address, TOKEN, note_of(tier, name, file)) as peer:
        assert peer.recv(1) == YES
        peer.sendall(bytes(len(whole)))
        assert peer.recv(1) == b""  # it is told by what does not come
    assert not tier.path(name, file).exists()
    with announce(address, TOKEN, note_of(tier, name, file)) as peer:
        assert peer.recv(1) == YES
        peer.sendall(whole)
        assert peer.recv(1) == YES
    assert tier.read(name, file) == whole
    assert [path.name for path in tier.path(name).iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("change", [{"save": "another"}, {"name": "gone.ckpt"}, {"files": [
    {"path": "not-in-it", "size": 1, "xxh3_128": "0" * 32, "rank": 0}
]}])  # fmt: skip
def test_what_is_not_in_this_folder_is_declined(peers: Any, change: dict[str, Any]) -> None:
    tier, address, _ = peers
    name = save(tier)
    with announce(address, TOKEN, note_of(tier, name) | change) as peer:
        assert peer.recv(1) == NO


@pytest.mark.parametrize("note", [{"name": "../../x.ckpt", "save": "", "files": []}, {"name": 3}, {}])
def test_strangers_and_nonsense_get_no_answer_and_the_next_one_does(peers: Any, note: dict[str, Any]) -> None:
    tier, address, _ = peers
    name = save(tier)
    for token, said in ((b"x" * len(TOKEN), note_of(tier, name)), (TOKEN, note)):
        with announce(address, token, said) as peer, suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    with announce(address, TOKEN, note_of(tier, name)) as peer:
        assert peer.recv(1) == YES


def test_one_that_sends_slowly_keeps_no_other_sender_waiting_and_there_are_no_more_at_once_than_senders(
    tmp_path: Path,
) -> None:
    tier, ranks = LocalTier(tmp_path), OneOfSome(None, None)
    name = save(tier)
    one = Peers(ranks, tier, (0,), copies=2)  # type: ignore[arg-type]
    file = "__1_0.distcp"
    whole, note = tier.read(name, file), note_of(tier, name, file)
    with announce(ranks.mine.address, TOKEN, note) as slow, announce(ranks.mine.address, TOKEN, note) as other:
        assert slow.recv(1) == YES
        slow.sendall(whole[:10])
        other.settimeout(10)
        assert other.recv(1) == YES
        with announce(ranks.mine.address, TOKEN, note) as third:
            third.settimeout(0.2)
            with pytest.raises(TimeoutError):
                third.recv(1)
            other.sendall(whole)
            assert other.recv(1) == YES
            third.settimeout(10)
            assert third.recv(1) == YES
        slow.sendall(whole[10:])
        assert slow.recv(1) == YES
    one.close()


def test_peer_that_does_not_answer_is_told_of_once_and_so_is_its_return(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = LocalTier(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks = OneOfSome(listener.getsockname()[:2])
        one = Peers(ranks, tier, (0,), copies=1)  # type: ignore[arg-type]
        names = [save(tier, step=step) for step in (1, 2, 3)]
        manifests = [list_checkpoints(tier).committed[name] for name in names]
        for number, manifest in enumerate(manifests):
            one.offer(f"step={manifest.step}.ckpt", manifest)
            peer, _ = listener.accept()
            with peer:
                if number == 2:
                    peer.sendall(NO)
                    while peer.recv(4096):  # until it has understood
                        pass
        one.drain(20)
        one.close()
    assert one.sent == 0  # it is not there, if it is no failure either
    told = [record.getMessage() for record in caplog.records if "event=peers" in record.getMessage()]
    assert ["outcome=failed" in line for line in told] == [True, False]
    assert "outcome=back" in told[1]


def take(listener: socket.socket) -> tuple[socket.socket, dict[str, Any]]:
    """The next connection, and what it announces."""
    listener.settimeout(20)
    peer, _ = listener.accept()
    peer.settimeout(20)
    assert receive(peer, len(TOKEN)) == TOKEN
    return peer, json.loads(receive(peer, _LENGTH.unpack(receive(peer, _LENGTH.size))[0]))


def receive(peer: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        some = peer.recv(size - len(content))
        assert some
        content += some
    return content


def test_what_is_on_its_way_here_stays_until_it_is_whole(peers: Any) -> None:
    tier, address, _ = peers
    old, new = save(tier, step=1), save(tier, step=2)
    file = "__1_0.distcp"
    whole, note = tier.read(old, file), note_of(tier, old, file)
    tier.path(old, file).unlink()
    with announce(address, TOKEN, note) as peer:
        assert peer.recv(1) == YES
        peer.sendall(whole[:10])
        assert retain(tier, Keep(last=1)) == []
        peer.sendall(whole[10:])
        assert peer.recv(1) == YES
        assert peer.recv(1) == b""
    assert tier.read(old, file) == whole
    assert [verdict.name for verdict in retain(tier, Keep(last=1))] == [old]
    assert tier.names() == [new]


def test_what_is_being_sent_stays_until_all_have_it(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Peers(OneOfSome(listener.getsockname()[:2]), tier, (0,), copies=1)  # type: ignore[arg-type]
        old, new = save(tier, step=1), save(tier, step=2)
        one.offer(old, list_checkpoints(tier).committed[old])
        peer, note = take(listener)
        with peer:
            assert retain(tier, Keep(last=1)) == []
            peer.sendall(YES)
            (file,) = note["files"]
            assert receive(peer, file["size"]) == tier.read(old, file["path"])
            assert retain(tier, Keep(last=1)) == []
            peer.sendall(YES)
        one.drain(20)
        one.close()
    assert one.sent == 1
    assert [verdict.name for verdict in retain(tier, Keep(last=1))] == [old]
    assert tier.names() == [new]


def test_node_that_is_gone_keeps_the_copy_from_no_other(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Peers(OneOfSome(None, listener.getsockname()[:2]), tier, (0,), copies=2)  # type: ignore[arg-type]
        name = save(tier)
        one.offer(name, list_checkpoints(tier).committed[name])
        peer, note = take(listener)
        with peer:
            peer.sendall(YES)
            (file,) = note["files"]
            assert receive(peer, file["size"]) == tier.read(name, file["path"])
            peer.sendall(YES)
        one.drain(20)
        one.close()
    assert one.sent == 0  # on one of two


def test_checkpoint_without_files_of_this_rank_is_not_counted_as_sent(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Peers(OneOfSome(listener.getsockname()[:2]), tier, (0,), copies=1)  # type: ignore[arg-type]
        name, another = save(tier), save(tier, step=7)
        one.offer(name, list_checkpoints(tier).committed[another])  # the name is another save's by now
        one.drain(20)
        one.close()
        listener.settimeout(0)
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert one.sent == 0


def test_nodes_that_speak_ipv6_listen_there(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("there is no IPv6 here")
    tier, ranks = LocalTier(tmp_path), OneOfSome(None)
    ranks.address = "::1"
    one = Peers(ranks, tier, (0,), copies=1)  # type: ignore[arg-type]
    name = save(tier)
    with announce(ranks.mine.address, TOKEN, note_of(tier, name)) as peer:
        assert peer.recv(1) == YES
    one.close()


def test_each_node_sends_to_the_next_ones_and_never_to_itself() -> None:
    even, uneven = (0, 0, 2, 2, 4, 4), (0, 0, 2, 3, 3, 3)
    assert _routes(even, 1) == [[2], [3], [4], [5], [0], [1]]
    assert _routes(even, 2) == [[2, 4], [3, 5], [4, 0], [5, 1], [0, 2], [1, 3]]
    assert _routes(even, 9) == _routes(even, 2)
    assert _routes(uneven, 1) == [[2], [2], [3], [0], [1], [0]]


@pytest.mark.parametrize("peers", [-1, 1.5, "1", True])
def test_number_of_peers_is_checked(peers: Any) -> None:
    with pytest.raises(SetupError, match="peers"):
        ResilientCheckpoint(peers=peers)


def test_peers_on_a_shared_folder_are_warned_of(tmp_path: Path) -> None:
    callback = ResilientCheckpoint(tmp_path / "run", schedule=EverySteps(2), peers=1)
    with pytest.warns(UserWarning, match="peers=1 copies nothing"):
        make_trainer(tmp_path, callback, max_steps=2).fit(TinyModel(), data())
