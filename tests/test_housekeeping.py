"""The commands that change something: copies to and from a cold tier, removals, pins."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import cli, housekeeping, store
from lightning_resilience.errors import CheckpointNotFound, TierUnavailable
from lightning_resilience.fsspec_objects import FsspecObjects
from lightning_resilience.manifest import MANIFEST, PINNED, SUSPECT
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


@pytest.fixture
def recorded(hot: LocalTier) -> LocalTier:
    """Six checkpoints of a run that keeps the best two by ``acc``, and one for each 100 steps in the cold tier."""
    rules = stated(Keep(last=1, top_k=2, milestones=[10]), Keep(last=-1), Ranking("acc", "max"))
    for step, acc in ((10, 0.1), (20, 0.9), (30, 0.2), (40, 0.8), (50, 0.3), (60, 0.4)):
        save(hot, step=step, extra={"retention": rules}, metrics={"acc": acc, "loss": 1 - acc})
    return hot


def steps_left(tier: LocalTier | RemoteTier) -> list[int]:
    return sorted(manifest.step for manifest in store.list_checkpoints(tier).committed.values())


@pytest.mark.parametrize(
    ("argv", "left"),
    [
        ((), [10, 20, 40, 60]),
        (("--last", 2, "--milestones", 50), [20, 40, 50, 60]),  # what the run calls best stays
        (("--top-k", 1), [10, 20, 60]),
        (("--mode", "min"), [10, 30, 60]),
        (("--monitor", "loss", "--mode", "max"), [10, 30, 60]),
        (("--monitor", "loss", "--mode", "min"), [10, 20, 40, 60]),
        (("--max-bytes", 2 * sum(map(len, FILES.values()))), [20, 60]),
    ],
)
def test_prune_goes_by_the_rule_that_the_run_recorded_with_options_in_the_place_of_its_parts(
    recorded: LocalTier, call: Any, argv: tuple[Any, ...], left: list[int]
) -> None:
    code, document, err = call("prune", recorded.root, *argv)
    assert (code, err) == (0, "")
    assert steps_left(recorded) == left
    assert document["rule"]["recorded_by"] == "step=60.ckpt"
    assert document["rule"]["given"] == [option for option in argv if str(option).startswith("--")]


def test_prune_by_another_metric_is_told_which_of_its_scores_are_best(
    recorded: LocalTier, call: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        call("prune", recorded.root, "--monitor", "loss")
    assert "--mode min or --mode max" in capsys.readouterr().err
    assert steps_left(recorded) == [10, 20, 30, 40, 50, 60]


def test_prune_removes_nothing_that_ls_says_is_kept(recorded: LocalTier, call: Any) -> None:
    kept = {ckpt["name"]: ckpt["kept"] for ckpt in call("ls", recorded.root)[1]["checkpoints"]}
    pruned = {ckpt["name"]: ckpt["reasons"] for ckpt in call("prune", recorded.root)[1]["checkpoints"]}
    assert pruned == kept


def test_prune_of_a_cold_tier_goes_by_its_own_rule_or_else_the_folders(
    recorded: LocalTier, url: str, call: Any
) -> None:
    call("push", recorded.root, url)
    call("prune", url)
    assert steps_left(RemoteTier(url)) == [10, 20, 30, 40, 50, 60]
    newest = store.read_manifest(recorded, "step=60.ckpt")
    rules = {key: value for key, value in newest.extra["retention"].items() if key != "cold"}
    store.restate(RemoteTier(url), "step=60.ckpt", replace(newest, extra={"retention": rules}))
    call("prune", url)
    assert steps_left(RemoteTier(url)) == [10, 20, 40, 60]


def test_prune_judges_each_run_for_itself(recorded: LocalTier, call: Any) -> None:
    """As training does: a run that begins anew in the folder makes nothing of the one before it redundant."""
    rules = store.read_manifest(recorded, "step=60.ckpt").extra
    for step, acc in ((70, 0.95), (80, 0.96), (90, 0.97), (99, 0.5)):
        save(recorded, step=step, run="another", extra=rules, metrics={"acc": acc})
    call("prune", recorded.root)
    assert steps_left(recorded) == [10, 20, 40, 60, 70, 80, 90, 99]
    assert [ckpt["kept"] for ckpt in call("ls", recorded.root)[1]["checkpoints"]][3] == ["milestone 10"]


def test_newest_checkpoint_without_a_rule_leaves_it_to_the_one_before_it(recorded: LocalTier, call: Any) -> None:
    save(recorded, step=70)
    assert call("prune", recorded.root)[1]["rule"]["recorded_by"] == "step=60.ckpt"
    assert steps_left(recorded) == [10, 20, 40, 70]


def test_prune_says_which_rule_it_applies(recorded: LocalTier, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["prune", str(recorded.root), "--last", "2", "--milestones", "50000", "--dry-run"])
    stays, origin, *_ = capsys.readouterr().out.splitlines()
    assert stays == (
        "What stays: the newest 2, the 2 best by acc (max), one for each multiple of 50,000 steps,"
        " the newest labelled milestone"
    )
    assert origin == "  (as step=60.ckpt records it, but for --last, --milestones)"


def test_prune_without_a_recorded_rule_says_so(hot: LocalTier, call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (1, 2):
        save(hot, step=step)
    with pytest.raises(SystemExit) as stop:
        call("prune", hot.root)
    assert stop.value.code == 2
    assert "say what is to stay, such as --last 3" in capsys.readouterr().err
    cli.main(["prune", str(hot.root), "--last", "1"])
    assert "(by --last; no checkpoint there records a rule that this version knows)" in capsys.readouterr().out
    assert steps_left(hot) == [2]


@pytest.mark.parametrize(
    ("metrics", "said"), [({"loss": 1.0, "acc": 0.5}, "there are acc, loss"), ({}, "they have none")]
)
def test_prune_by_a_metric_that_nothing_has_is_wrong_usage_and_lists_those_there_are(
    hot: LocalTier, call: Any, capsys: pytest.CaptureFixture[str], metrics: dict[str, float], said: str
) -> None:
    for step in (1, 2):
        save(hot, step=step, metrics=metrics)
    with pytest.raises(SystemExit) as stop:
        call("prune", hot.root, "--last", 1, "--top-k", 1, "--monitor", "val_los")
    assert stop.value.code == 2
    assert f"--monitor val_los: no checkpoint has that metric; {said}" in capsys.readouterr().err
    assert steps_left(hot) == [1, 2]


def test_checkpoint_that_cannot_be_removed_is_said_once_in_words(
    hot: LocalTier, call: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2, 3, 4):
        save(hot, step=step)
    rename = os.rename

    def read_only(source: Any, target: Any) -> None:
        if "step=3" not in str(source):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(source), None, str(target))
        rename(source, target)

    monkeypatch.setattr(os, "rename", read_only)
    code, document, err = call("prune", hot.root, "--last", 1)
    assert code == 1
    assert err.splitlines() == [
        f"lightning-resilience: step={step}.ckpt was not removed: Read-only file system" for step in (2, 1)
    ]
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert [(ckpt["name"], ckpt["removed"]) for ckpt in document["checkpoints"]] == [
        ("step=4.ckpt", False),
        ("step=3.ckpt", True),
        ("step=2.ckpt", False),
        ("step=1.ckpt", False),
    ]
    assert document["checkpoints"][2]["left"] == "Read-only file system"


def test_checkpoint_that_a_process_holds_is_not_pruned(hot: LocalTier, call: Any) -> None:
    for step in (1, 2):
        save(hot, step=step)
    with hot.hold("step=1.ckpt"):
        code, _, err = call("prune", hot.root, "--last", 1)
    assert (code, steps_left(hot)) == (1, [1, 2])
    assert "step=1.ckpt was not removed: a process is using it" in err


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ("prune {hot} --top-k 1", "no --monitor to rank them by"),
        ("prune {hot} --mode max", "no --monitor to rank them by"),
        ("prune {hot} --last 0", "'0' is not a whole number of 1 or more, or -1"),
        ("prune {hot} --milestones 0", "--milestones"),
        ("prune {hot} --max-bytes -5", "--max-bytes"),
        ("prune {hot} --marked -1", "--marked"),
        ("prune {hot} --top-k -2 --monitor loss", "--top-k"),
        ("ls {hot} --remote /not/a/url", "'/not/a/url' is not a URL"),
        ("push {hot} plain", "'plain' is not a URL"),
        ("pull plain {hot}", "'plain' is not a URL"),
        ("pull memory://x/step=100.ckpt {hot} --step 6", "step=100.ckpt is one already"),
    ],
)
def test_wrong_usage_ends_with_2_and_changes_nothing(
    hot: LocalTier, call: Any, capsys: pytest.CaptureFixture[str], argv: str, said: str
) -> None:
    save(hot)
    before = tree(hot.root)
    with pytest.raises(SystemExit) as stop:
        call(*argv.format(hot=hot.root).split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert tree(hot.root) == before


def test_a_save_is_told_from_another_of_its_name(hot: LocalTier, url: str, call: Any, capsys: Any) -> None:
    """As a run leaves them that saves ``best.ckpt`` again and again: in the cold tier the newer has a version."""
    cold = RemoteTier(url)
    rules = stated(Keep(last=1), Keep(last=2), None)

    def saved(step: int, name: str | None) -> None:
        if hot.exists("best.ckpt"):
            hot.remove("best.ckpt")
        save(hot, "best.ckpt", step=step, extra={"retention": rules}, files={"meta.pt": b"%d" % step})
        manifest = store.read_manifest(hot, "best.ckpt")
        if name is not None:
            for entry in manifest:
                cold.send(name, entry, hot.path("best.ckpt", entry.path))
            cold.seal(name, manifest)

    def rows() -> list[tuple[str, int, str, str | None]]:
        found = call("ls", hot.root, "--remote", url)[1]["checkpoints"]
        return [(ckpt["name"], ckpt["step"], "+".join(ckpt["tiers"]), ckpt["copy"]) for ckpt in found]

    saved(1, "best.ckpt")
    saved(2, None)
    assert rows() == [("best.ckpt", 2, "hot", None), ("best.ckpt", 1, "cold", None)]
    code, document, _ = call("push", hot.root, url)
    assert (code, document["error"]) == (1, "SetupError")
    saved(2, "best-v1.ckpt")
    assert rows() == [("best.ckpt", 2, "hot+cold", "best-v1.ckpt"), ("best.ckpt", 1, "cold", None)]
    assert [ckpt["kept"] for ckpt in call("ls", hot.root, "--remote", url)[1]["checkpoints"]] == [
        ["newest"],
        ["2nd newest"],
    ]
    code, document, _ = call("push", hot.root, url)
    assert (code, document["checkpoints"][0]["copied"]) == (0, 0)
    cli.main(["ls", str(hot.root), "--remote", url])
    assert "hot+cold as best-v1.ckpt" in capsys.readouterr().out


def test_damaged_checkpoint_does_not_hold_up_a_push_of_others_and_leaves_nothing(
    hot: LocalTier, url: str, tmp_path: Path, call: Any
) -> None:
    for step in (100, 200, 300):
        save(hot, step=step)
    flip(hot.path("step=200.ckpt", "meta.pt"))
    code, document, err = call("push", hot.root, url)
    assert (code, document["error"]) == (1, "CheckpointCorrupt")
    assert names(document) == ["step=100.ckpt", "step=300.ckpt"]
    assert [one["name"] for one in document["left_out"]] == ["step=200.ckpt"]
    assert "step=200.ckpt is left out" in err
    assert sorted(path.name for path in (tmp_path / "cold").iterdir()) == ["step=100.ckpt", "step=300.ckpt"]


def test_what_is_on_its_way_to_a_cold_tier_is_mentioned_and_no_problem(hot: LocalTier, url: str, call: Any) -> None:
    save(hot)
    call("push", hot.root, url)
    cold = RemoteTier(url)
    cold.claim("step=200.ckpt")
    for arguments in ((url,), (hot.root, "--remote", url)):
        code, document, _ = call("ls", *arguments)
        assert (code, names(document)) == (0, ["step=100.ckpt"])
        assert [Path(name).name for name in document["leftovers"]] == ["step=200.ckpt"]
    cold.objects.delete(["step=100.ckpt/manifest.json"])
    assert call("ls", url)[0] == 1  # nobody is at that one


def test_files_are_pushed_while_a_run_begins_there(
    hot: LocalTier, url: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(hot)
    seal = RemoteTier.seal

    def swept(self: RemoteTier, *args: Any) -> None:
        start = RemoteTier(url)
        start.sweep_uploads()
        start.sweep(store.list_checkpoints(start).uncommitted)
        seal(self, *args)

    monkeypatch.setattr(RemoteTier, "seal", swept)
    assert call("push", hot.root, url)[0] == 0
    assert call("verify", url)[0] == 0


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


def test_several_checkpoints_are_pinned_at_once_or_none_of_them(hot: LocalTier, call: Any, capsys: Any) -> None:
    paths = [hot.path(save(hot, step=step)) for step in (1, 2, 3)]
    code, document, err = call("pin", paths[0], hot.path("step=9.ckpt"), paths[1])
    assert (code, document["error"]) == (1, "CheckpointNotFound")
    assert "has: step=3.ckpt, step=2.ckpt, step=1.ckpt" in err
    assert not any(ckpt["labels"] for ckpt in call("ls", hot.root)[1]["checkpoints"])
    call("pin", paths[0])
    assert [ckpt["changed"] for ckpt in call("pin", *paths[:2])[1]["checkpoints"]] == [False, True]
    assert [ckpt["labels"] for ckpt in call("ls", hot.root)[1]["checkpoints"]] == [[], [PINNED], [PINNED]]
    assert cli.main(["unpin", *map(str, paths)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "step=1.ckpt is not pinned.",
        "step=2.ckpt is not pinned.",
        "step=3.ckpt is not pinned already.",
    ]


def test_store_that_does_not_answer_is_an_error_with_its_cause(
    hot: LocalTier, url: str, call: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> None:
        raise TierUnavailable("the bucket is down")

    save(hot)
    monkeypatch.setattr(FsspecObjects, "put", down)
    monkeypatch.setattr("lightning_resilience.patience.Patience.pause", lambda self, seconds: False)
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


def test_checkpoint_that_goes_while_it_is_pinned_does_not_come_back_empty(hot: LocalTier, url: str, call: Any) -> None:
    name = save(hot, step=100)
    assert call("push", hot.root, url)[0] == 0
    tier = RemoteTier(url)
    manifest = store.read_manifest(tier, name)
    tier.remove(name)
    with pytest.raises(CheckpointNotFound, match="removed just now"):
        housekeeping.label(tier, name, manifest, pinned=True)
    assert not tier.exists(name)
