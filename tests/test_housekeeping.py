"""The commands that change something: copies to and from a cold tier, removals, pins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import cli, store
from lightning_resilience.errors import TierUnavailable
from lightning_resilience.manifest import MANIFEST, PINNED, SUSPECT
from lightning_resilience.objects import FsspecObjects
from lightning_resilience.remote import UNSEALED, RemoteTier
from lightning_resilience.retention import Keep, Ranking, stated
from lightning_resilience.tiers import LocalTier
from on_disk import FILES, flip, save, tree


@pytest.fixture
def hot(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "hot")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"local://{tmp_path}/cold"


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """``call("pull", …)`` runs a command: exit code, document, stderr."""

    def run(*argv: object) -> tuple[int, dict[str, Any], str]:
        code = cli.main([*map(str, argv), "--json"])
        out, err = capsys.readouterr()
        return code, json.loads(out), err

    return run


def names(document: dict[str, Any]) -> list[str]:
    return [ckpt["name"] for ckpt in document["checkpoints"]]


def test_push_and_pull_give_back_every_byte(hot: LocalTier, url: str, tmp_path: Path, call: Any) -> None:
    for step in (100, 200):
        save(hot, step=step)
    code, document, _ = call("push", hot.root, url)
    assert (code, names(document)) == (0, ["step=100.ckpt", "step=200.ckpt"])
    assert tree(tmp_path / "cold") == tree(hot.root)
    code, document, _ = call("pull", url, tmp_path / "back")
    assert (code, names(document)) == (0, ["step=200.ckpt"])
    assert tree(tmp_path / "back" / "step=200.ckpt") == tree(hot.path("step=200.ckpt"))
    assert call("pull", url, tmp_path / "back", "--step", 100)[0] == 0
    assert tree(tmp_path / "back") == tree(hot.root)


def test_what_is_there_is_not_copied_again(hot: LocalTier, url: str, tmp_path: Path, call: Any) -> None:
    save(hot)
    size = sum(map(len, FILES.values()))
    for expected in (size, 0):
        assert call("push", hot.root, url)[1]["checkpoints"][0]["copied"] == expected
    for expected in (size, 0):
        assert call("pull", url, tmp_path / "back")[1]["checkpoints"][0]["copied"] == expected


def test_newest_that_is_healthy_is_pulled(hot: LocalTier, url: str, tmp_path: Path, call: Any) -> None:
    save(hot, step=100)
    save(hot, step=200, health=SUSPECT)
    call("push", hot.root, url)
    assert names(call("pull", url, tmp_path / "back")[1]) == ["step=100.ckpt"]
    assert names(call("pull", f"{url}/step=200.ckpt", tmp_path / "back")[1]) == ["step=200.ckpt"]
    code, document, _ = call("pull", url, tmp_path / "back", "--step", 300)
    assert (code, document["error"]) == (1, "CheckpointNotFound")
    assert "200, 100" in document["hint"]


def test_damage_on_either_side_stops_a_copy_and_leaves_nothing(
    hot: LocalTier, url: str, tmp_path: Path, call: Any
) -> None:
    save(hot)
    call("push", hot.root, url)
    flip(tmp_path / "cold" / "step=100.ckpt" / "meta.pt")
    code, document, _ = call("pull", url, tmp_path / "back")
    assert (code, document["error"]) == (1, "CheckpointCorrupt")
    assert not any((tmp_path / "back").iterdir())
    flip(hot.path("step=100.ckpt", "meta.pt"))
    code, document, _ = call("push", hot.root, f"local://{tmp_path}/other")
    assert (code, document["error"]) == (1, "CheckpointCorrupt")
    assert store.list_checkpoints(RemoteTier(f"local://{tmp_path}/other")).committed == {}


@pytest.mark.parametrize("command", ["push", "pull"])
def test_another_checkpoint_of_that_name_is_left_alone(
    hot: LocalTier, url: str, tmp_path: Path, call: Any, command: str
) -> None:
    save(hot)
    call("push", hot.root, url)
    other = LocalTier(tmp_path / "other")
    save(other, sequence=7)
    arguments = (other.root, url) if command == "push" else (url, other.root)
    before = tree(other.root), tree(tmp_path / "cold")
    code, document, _ = call(command, *arguments)
    assert (code, document["error"]) == (1, "SetupError")
    assert "is another checkpoint: save" in document["message"]
    assert (tree(other.root), tree(tmp_path / "cold")) == before


def test_ls_says_where_each_checkpoint_is(hot: LocalTier, url: str, call: Any, capsys: Any) -> None:
    save(hot, step=100)
    call("push", hot.root, url)
    hot.remove("step=100.ckpt")
    save(hot, step=200)
    call("push", hot.root, url)
    save(hot, step=300)
    document = call("ls", hot.root, "--remote", url)[1]
    assert {ckpt["name"]: ckpt["tiers"] for ckpt in document["checkpoints"]} == {
        "step=300.ckpt": ["hot"],
        "step=200.ckpt": ["hot", "cold"],
        "step=100.ckpt": ["cold"],
    }
    cli.main(["ls", str(hot.root), "--remote", url])
    assert "hot+cold" in capsys.readouterr().out
    assert names(call("ls", url)[1]) == ["step=200.ckpt", "step=100.ckpt"]


def test_cold_tier_is_shown_and_verified_by_its_url(hot: LocalTier, url: str, tmp_path: Path, call: Any) -> None:
    save(hot)
    call("push", hot.root, url)
    assert call("show", f"{url}/step=100.ckpt")[1]["step"] == 100
    assert call("verify", url)[0] == 0
    flip(tmp_path / "cold" / "step=100.ckpt" / "__0_0.distcp")
    code, document, _ = call("verify", url)
    assert code == 1
    assert "digest differs" in document["checkpoints"][0]["problems"][0]["problem"]
    code, document, _ = call("show", url)
    assert (code, document["error"]) == (1, "CheckpointNotFound")


@pytest.mark.parametrize("where", ["hot", "cold"])
def test_prune_says_why_and_does_it_unless_it_is_a_dry_run(hot: LocalTier, url: str, call: Any, where: str) -> None:
    for step, loss in ((100, 0.1), (200, 0.5), (300, 0.3), (400, 0.4)):
        save(hot, step=step, metrics={"loss": loss})
    call("push", hot.root, url)
    root = hot.root if where == "hot" else url
    rule = ("--last", 1, "--top-k", 1, "--monitor", "loss", "--milestones", 300)
    for dry in (["--dry-run"], []):
        document = call("prune", root, *rule, *dry)[1]
        assert {ckpt["name"]: ckpt["reasons"] for ckpt in document["checkpoints"] if ckpt["keep"]} == {
            "step=400.ckpt": ["newest"],
            "step=300.ckpt": ["milestone 300"],
            "step=100.ckpt": ["best loss"],
        }
        left = names(call("ls", root)[1])
        assert ("step=200.ckpt" in left) == bool(dry)
    assert left == ["step=400.ckpt", "step=300.ckpt", "step=100.ckpt"]


def test_prune_that_cannot_rank_says_so(hot: LocalTier, call: Any) -> None:
    save(hot)
    assert call("prune", hot.root, "--top-k", 1)[1]["error"] == "SetupError"


@pytest.mark.parametrize("where", ["hot", "cold"])
def test_pinned_checkpoint_outlives_every_rule_until_it_is_unpinned(
    hot: LocalTier, url: str, call: Any, where: str
) -> None:
    for step in (100, 200):
        save(hot, step=step)
    call("push", hot.root, url)
    root = str(hot.root) if where == "hot" else url
    for changed in (True, False):
        assert call("pin", f"{root}/step=100.ckpt")[1]["changed"] is changed
    assert call("ls", root)[1]["checkpoints"][1]["labels"] == [PINNED]
    assert call("verify", root)[0] == 0
    call("prune", root, "--last", 1)
    assert len(names(call("ls", root)[1])) == 2
    call("unpin", f"{root}/step=100.ckpt")
    call("prune", root, "--last", 1)
    assert names(call("ls", root)[1]) == ["step=200.ckpt"]


def test_store_that_does_not_answer_is_an_error_with_its_cause(
    hot: LocalTier, url: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> None:
        raise TierUnavailable("the bucket is down")

    save(hot)
    monkeypatch.setattr(FsspecObjects, "put", down)
    monkeypatch.setattr("lightning_resilience.objects.Patience.pause", lambda self, seconds: False)
    code, document, err = call("push", hot.root, url)
    assert (code, document["error"]) == (1, "TierUnavailable")
    assert "the bucket is down" in err


def test_manifest_comes_last_in_a_push(hot: LocalTier, url: str, call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save(hot)
    put, order = FsspecObjects.put, []

    def noting(self: FsspecObjects, key: str, *args: Any) -> None:
        order.append(key)
        put(self, key, *args)

    monkeypatch.setattr(FsspecObjects, "put", noting)
    call("push", hot.root, url)
    assert order[-1] == f"step=100.ckpt/{MANIFEST}"
    assert order[1] == f"step=100.ckpt/{UNSEALED}"
    assert len(order) == len(FILES) + 3  # the probe, the marker, the files, the manifest


def test_ls_says_why_each_checkpoint_is_kept_by_the_rules_of_its_run(tmp_path: Path, call: Any, capsys: Any) -> None:
    tier = LocalTier(tmp_path / "hot")
    rules = stated(Keep(last=1, milestones=200), Keep(last=2), Ranking("loss"))
    for step in (200, 300, 400):
        save(tier, step=step, extra={"retention": rules}, metrics={"loss": 1.0})
    kept = {ckpt["name"]: ckpt["kept"] for ckpt in call("ls", tier.root)[1]["checkpoints"]}
    assert kept == {
        "step=400.ckpt": ["newest", "milestone 400"],
        "step=300.ckpt": ["not among the newest 1 nor a milestone"],
        "step=200.ckpt": ["milestone 200"],
    }
    cli.main(["ls", str(tier.root)])
    assert "newest; milestone 400" in capsys.readouterr().out


@pytest.mark.parametrize("said", [{}, {"hot": 3}, {"hot": {"last": 0}}, {"hot": {"forever": True}}, 7])
def test_rules_that_nobody_understands_are_passed_over(tmp_path: Path, call: Any, said: Any) -> None:
    tier = LocalTier(tmp_path / "hot")
    save(tier, extra={"retention": said})
    assert call("ls", tier.root)[1]["checkpoints"][0]["kept"] == []
