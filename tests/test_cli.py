"""The console command, on real folders: what it prints, what it exits with, what it never does."""

from __future__ import annotations

import argparse
import io
import json
import math
import os
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from lightning_resilience import cli, commands, console, typed
from lightning_resilience._version import __version__
from lightning_resilience.ledger import LEDGER
from lightning_resilience.manifest import MANIFEST, WEIGHTS_ONLY, digest
from lightning_resilience.retention import Keep, Ranking, stated
from lightning_resilience.tiers import LocalTier
from on_disk import FILES, begin, flip, save, stock_folder, tree

NOW = datetime(2026, 11, 29, 18, 30, tzinfo=timezone.utc)
COMMANDS = ("ls", "show", "verify")


@pytest.fixture
def tier(tmp_path: Path) -> LocalTier:
    return LocalTier(tmp_path / "run")


@pytest.fixture
def call(capsys):
    """``call("ls", path)`` runs the command; returns its exit code, stdout and stderr."""

    def run(*argv: object) -> tuple[int, str, str]:
        code = cli.main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def document(call):
    """As ``call``, with ``--json``: exit code and the one document on stdout."""

    def run(*argv: object) -> tuple[int, dict[str, Any]]:
        code, out, _ = call(*argv, "--json")
        return code, json.loads(out)

    return run


def process(*argv: object, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lightning_resilience", *map(str, argv)],
        **{"capture_output": True, "text": True, "timeout": 120, **options},
    )


def rename_format(tier: LocalTier, name: str) -> None:
    path = tier.path(name, MANIFEST)
    path.write_bytes(path.read_bytes().replace(b'"format":1', b'"format":9'))


# -- ls ---------------------------------------------------------------------------------------------------------------


def test_ls_prints_a_row_a_checkpoint_newest_first(tier: LocalTier, call) -> None:
    save(tier, step=100, metrics={"val_loss": 0.31, "acc": math.nan}, labels=("pinned",))
    save(tier, step=200, health="suspect", reason="end of training")
    code, out, err = call("ls", tier.root)
    head, newer, older = out.splitlines()
    assert (code, err) == (0, "")
    assert head.split() == ["NAME", "STEP", "EPOCH", "AGE", "SIZE", "RANKS", "HEALTH", "LABELS", "METRICS", "REASON"]
    assert newer.startswith("step=200.ckpt   200")
    assert "suspect" in newer
    assert newer.endswith("end of training")
    assert older.startswith("step=100.ckpt   100")
    for part in ("healthy", "2.0 KiB", "pinned", "acc=nan, val_loss=0.31", "every 100 steps"):
        assert part in older


def test_ls_shows_each_metric_once_and_the_monitored_one_first(tier: LocalTier, call, document) -> None:
    logged = {"acc": 0.5, "lr_step": 0.1, "train_loss": 1.0, "train_loss_epoch": 1.0, "train_loss_step": 2.0}
    rules = stated(Keep(top_k=1), None, Ranking("val_loss"))
    save(tier, step=1, metrics={**logged, "val_loss": 0.25}, extra={"retention": rules})
    _, out, _ = call("ls", tier.root)
    assert "  val_loss=0.25, acc=0.5, lr_step=0.1, train_loss=1  " in out
    _, found = document("ls", tier.root)
    assert found["monitor"] == "val_loss"
    assert found["checkpoints"][0]["metrics"].keys() == {*logged, "val_loss"}


@pytest.mark.parametrize(
    ("monitor", "shown"), [("loss_epoch", "  loss_epoch=3  "), ("elsewhere", "  loss=1  "), ("loss", "  loss=1  ")]
)
def test_ls_takes_the_monitored_one_of_several_names_of_a_metric(tier: LocalTier, call, monitor, shown) -> None:
    logged = {"loss": 1.0, "loss_step": 2.0, "loss_epoch": 3.0}
    save(tier, metrics=logged, extra={"retention": stated(Keep(top_k=1), None, Ranking(monitor))})
    assert shown in call("ls", tier.root)[1]


@pytest.mark.parametrize("columns", [70, 80, 110])
def test_ls_fits_the_terminal_and_leaves_out_what_matters_least(
    tier: LocalTier, monkeypatch, capsys, columns: int
) -> None:
    for step in (1200, 2400):
        save(
            tier,
            f"epoch=0-step={step}.ckpt",
            step=step,
            metrics={"val_loss": 0.3123, "train_loss": 0.5, "train_loss_step": 0.5, "train_loss_epoch": 0.5},
            reason="1801.3 s since the last save, the loss calm",
            extra={"retention": stated(Keep(top_k=1, milestones=100), None, Ranking("val_loss"))},
        )
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert cli.main(["ls", str(tier.root)]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert max(map(len, (head, *rows))) <= columns
    assert "KEPT" in head
    assert "val_loss" in rows[0]
    assert ("RANKS" in head, "REASON" in head) == (False, False)
    assert ("newest; milestone 2400" in rows[0]) == (columns > 70)


def test_ls_leaves_out_columns_that_nobody_filled(tier: LocalTier, call) -> None:
    save(tier)
    _, out, _ = call("ls", tier.root)
    assert out.splitlines()[0].split() == ["NAME", "STEP", "EPOCH", "AGE", "SIZE", "RANKS", "HEALTH", "REASON"]


def test_ls_of_an_empty_folder_says_so_and_is_fine(tmp_path: Path, call) -> None:
    assert call("ls", tmp_path) == (0, f"No checkpoints in {tmp_path}.\n", "")


@pytest.mark.parametrize("command", ["ls", "verify", "prune"])
def test_folder_with_nothing_of_a_run_in_it_is_a_problem(tmp_path: Path, call, command: str) -> None:
    (tmp_path / "passwd").write_text("root")
    code, out, err = call(command, tmp_path)
    assert (code, out) == (1, "")
    assert f"There are no checkpoints in '{tmp_path}', nor anything else of a run." in err
    (tmp_path / LEDGER).write_text("")
    assert call(command, tmp_path) == (0, f"No checkpoints in {tmp_path}.\n", "")


def test_ls_of_a_folder_that_lost_its_checkpoints_shows_those_of_the_cold_tier(tier: LocalTier, tmp_path, call) -> None:
    save(tier)
    (tmp_path / "burnt").mkdir()
    (tmp_path / "burnt" / "hparams.yaml").touch()
    code, out, _ = call("ls", tmp_path / "burnt", "--remote", f"file://{tier.root}")
    assert (code, "step=100.ckpt" in out) == (0, True)


def test_ls_of_a_folder_that_is_missing_is_a_problem(tmp_path: Path, call) -> None:
    code, out, err = call("ls", tmp_path / "nowhere")
    assert (code, out) == (1, "")
    assert f"There is no folder '{tmp_path}/nowhere'." in err
    assert "dirpath=" in err


def test_ls_lists_what_is_unusable_with_its_cause_and_fails(tier: LocalTier, call, document) -> None:
    save(tier, step=1)
    flip(tier.path(save(tier, step=2), MANIFEST), 40)
    tier.path(save(tier, step=3), MANIFEST).unlink()
    rename_format(tier, save(tier, step=4))
    code, out, _ = call("ls", tier.root)
    assert code == 1
    _, unusable = out.split("not usable:\n")
    two, three, four = unusable.splitlines()
    assert two.startswith("  step=2.ckpt: ")
    assert "its save did not finish" in three
    assert "format 9" in four
    assert "pip install" in four
    code, found = document("ls", tier.root)
    assert (code, found["ok"]) == (1, False)
    assert [(item["name"], item["error"]) for item in found["unusable"]] == [
        ("step=2.ckpt", "CheckpointCorrupt"),
        ("step=3.ckpt", "CheckpointUncommitted"),
        ("step=4.ckpt", "CheckpointIncompatible"),
    ]
    assert [ckpt["name"] for ckpt in found["checkpoints"]] == ["step=1.ckpt"]


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_leftovers_and_stock_checkpoints_are_mentioned_and_no_problem(
    tier: LocalTier, call, document, command: str
) -> None:
    save(tier, step=1)
    begin(tier, "step=2.ckpt.partial-77")
    save(tier, "step=0.ckpt.removed-77")
    stock_folder(tier.root, "sharded.ckpt")
    (tier.root / "single.ckpt").write_bytes(b"stock")
    code, out, _ = call(command, tier.root)
    assert code == 0
    assert out.splitlines()[-4:] == [
        "left by a removal under way or killed: step=0.ckpt.removed-77",
        "left by a save under way or killed: step=2.ckpt.partial-77",
        "written by stock Lightning, no manifest: sharded.ckpt",
        "written by stock Lightning, no manifest: single.ckpt",
    ]
    code, found = document(command, tier.root)
    assert (code, found["ok"]) == (0, True)
    assert found["leftovers"] == ["step=0.ckpt.removed-77", "step=2.ckpt.partial-77"]
    assert found["stock"] == ["sharded.ckpt", "single.ckpt"]
    assert [ckpt["name"] for ckpt in found["checkpoints"]] == ["step=1.ckpt"]


@pytest.mark.parametrize("command", ["ls", "verify"])
def test_the_path_of_one_checkpoint_means_that_one_alone(tier: LocalTier, document, command: str) -> None:
    name = save(tier, step=1)
    save(tier, step=2)
    flip(tier.path(save(tier, step=3), MANIFEST))
    tier.point("last.ckpt", name)
    for path in (tier.path(name), f"{tier.path(name)}/", f"file://{tier.path(name)}", tier.path("last.ckpt")):
        code, found = document(command, path)
        assert (code, [ckpt["name"] for ckpt in found["checkpoints"]]) == (0, [name])
        assert (found["root"], found["leftovers"], found["stock"]) == (str(tier.root), [], [])


def test_ls_as_json_holds_the_manifest_in_valid_json(tier: LocalTier, document) -> None:
    save(tier, step=7, metrics={"a": math.inf, "b": 0.5}, reason="größer …")
    code, found = document("ls", tier.root)
    assert code == 0
    (ckpt,) = found["checkpoints"]
    size = sum(map(len, FILES.values()))
    expected = {"name": "step=7.ckpt", "step": 7, "epoch": 0, "reason": "größer …", "metrics": {"a": "inf", "b": 0.5},
                "files": 3, "size": size, "world_size": 2, "health": "healthy", "labels": [],
                "created": "2026-11-29T16:00:00Z"}  # fmt: skip
    assert {key: ckpt[key] for key in expected} == expected


def test_ls_of_a_thousand_checkpoints_lists_them_all(tier: LocalTier, document, monkeypatch) -> None:
    """Reads one small file a checkpoint, and none of the others."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    for step in range(1000):
        save(tier, step=step, files={"a.pt": b"a"})
    monkeypatch.setattr(LocalTier, "digest", None)
    monkeypatch.setattr(LocalTier, "size", None)
    code, found = document("ls", tier.root)
    assert (code, [ckpt["step"] for ckpt in found["checkpoints"]]) == (0, list(range(999, -1, -1)))


# -- show -------------------------------------------------------------------------------------------------------------


def test_show_prints_the_fields_and_each_file_with_size_digest_and_rank(tier: LocalTier, call) -> None:
    name = save(tier, step=1200, epoch=3, metrics={"val_loss": 0.31}, strategy="FSDPStrategy", labels=(WEIGHTS_ONLY,))
    code, out, err = call("show", tier.path(name))
    assert (code, err) == (0, "")
    fields, files = out.split("\n\n")
    shown = dict(line.split(maxsplit=1) for line in fields.splitlines())
    assert shown["path"] == str(tier.path(name))
    assert (shown["step"], shown["epoch"], shown["ranks"]) == ("1200", "3", "2")
    assert (shown["strategy"], shown["labels"], shown["metrics"]) == ("FSDPStrategy", "weights-only", "val_loss=0.31")
    assert shown["holds"] == "tensors in 2 shard files, 2.0 KiB (weights only); trainer state"
    assert "versions" not in shown
    rows = [line.split() for line in files.splitlines()]
    assert rows[0] == ["FILE", "SIZE", "BYTES", "RANK", "XXH3_128"]
    assert rows[1] == ["__0_0.distcp", "850", "B", "850", "0", digest(FILES["__0_0.distcp"])]
    assert [row[0] for row in rows[1:]] == list(FILES)


def test_show_marks_a_file_that_is_not_there_at_its_size(tier: LocalTier, call, document) -> None:
    name = save(tier)
    tier.path(name, "meta.pt").unlink()
    code, out, _ = call("show", tier.path(name))
    assert code == 1
    assert out.splitlines()[-1] == "problem: meta.pt is missing"
    code, found = document("show", tier.path(name))
    assert (code, found["problems"]) == (1, [{"file": "meta.pt", "problem": "meta.pt is missing"}])


def test_show_as_json_is_the_manifest_and_more(tier: LocalTier, document) -> None:
    name = save(tier, extra={"lineage": "a"})
    code, found = document("show", tier.path(name))
    assert code == 0
    raw = json.loads(tier.read(name, MANIFEST))
    del raw["digest"]
    assert raw.items() <= found.items()
    assert (found["name"], found["path"], found["problems"]) == (name, str(tier.path(name)), [])


def test_show_of_an_empty_checkpoint_does_not_crash(tier: LocalTier, call) -> None:
    code, out, _ = call("show", tier.path(save(tier, files={})))
    assert (code, "size      0 B" in out) == (0, True)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_checkpoint_lists_what_is_there(tier: LocalTier, call, command: str) -> None:
    save(tier, step=1)
    save(tier, step=2)
    code, out, err = call(command, tier.path("step=9.ckpt"))
    assert (code, out) == (1, "")
    assert err.splitlines() == [
        f"lightning-resilience: There is no checkpoint '{tier.path('step=9.ckpt')}'.",
        f"'{tier.root}' has: step=2.ckpt, step=1.ckpt.",
    ]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ["step=2.ckpt.partial-1", "step=2.ckpt.removed-1", "bare.ckpt"])
def test_an_uncommitted_checkpoint_is_refused_when_asked_for(tier: LocalTier, call, command: str, name: str) -> None:
    save(tier, step=1)
    save(tier, "step=2.ckpt.partial-1")
    tier.begin("bare.ckpt")
    code, out, err = call(command, tier.path(name))
    assert (code, out) == (1, "")
    assert "step=1.ckpt" in err


def test_show_of_a_run_folder_says_what_is_in_it(tier: LocalTier, call) -> None:
    save(tier, step=1)
    code, _, err = call("show", tier.root)
    assert code == 1
    assert "is not a checkpoint" in err
    assert "has: step=1.ckpt." in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_single_file_of_stock_lightning_is_called_one(tmp_path: Path, call, command: str) -> None:
    (tmp_path / "a.ckpt").write_bytes(b"stock")
    code, _, err = call(command, tmp_path / "a.ckpt")
    assert (code, "stock Lightning" in err) == (1, True)


# -- verify -----------------------------------------------------------------------------------------------------------


def test_verify_of_whole_checkpoints_says_what_it_read(tier: LocalTier, call) -> None:
    save(tier, step=1)
    save(tier, step=2)
    assert call("verify", tier.root) == (
        0,
        "ok       step=2.ckpt: 3 files, 2.0 KiB\nok       step=1.ckpt: 3 files, 2.0 KiB\n"
        "2 checkpoints verified, 4.0 KiB.\n",
        "",
    )


def test_verify_names_every_damaged_file_and_what_is_wrong_with_it(tier: LocalTier, call, document) -> None:
    save(tier, step=1)
    hurt = save(tier, step=2)
    flip(tier.path(hurt, "__0_0.distcp"), 99)
    tier.path(hurt, "meta.pt").unlink()
    tier.path(save(tier, step=3), MANIFEST).unlink()
    flip(tier.path(save(tier, step=4), MANIFEST), 50)
    code, out, _ = call("verify", tier.root)
    assert code == 1
    lines = out.splitlines()
    assert lines[:4] == [
        "PROBLEM  step=2.ckpt",
        "         __0_0.distcp has other content than was saved (digest differs)",
        "         meta.pt is missing",
        "ok       step=1.ckpt: 3 files, 2.0 KiB",
    ]
    assert lines[4] == "PROBLEM  step=3.ckpt"
    assert "has no manifest.json" in lines[5]
    assert lines[6] == "PROBLEM  step=4.ckpt"
    assert lines[-1] == "3 of 4 checkpoints have a problem."
    code, found = document("verify", tier.root)
    assert (code, found["ok"]) == (1, False)
    assert {ckpt["name"]: [item["file"] for item in ckpt["problems"]] for ckpt in found["checkpoints"]} == {
        "step=2.ckpt": ["__0_0.distcp", "meta.pt"],
        "step=1.ckpt": [],
        "step=3.ckpt": [MANIFEST],
        "step=4.ckpt": [MANIFEST],
    }


def test_verify_of_one_checkpoint_sees_a_single_flipped_bit_anywhere_in_it(tier: LocalTier, call) -> None:
    name = save(tier, files={"a.distcp": b"payload"})
    for path in tier.path(name).iterdir():
        for position in range(path.stat().st_size):
            flip(path, position)
            code, out, err = call("verify", tier.path(name))
            assert (code, path.name in out + err) == (1, True)
            flip(path, position)
    assert call("verify", tier.path(name))[0] == 0


def test_verify_of_an_empty_folder_says_so(tmp_path: Path, call) -> None:
    assert call("verify", tmp_path) == (0, f"No checkpoints in {tmp_path}.\n", "")


def test_a_checkpoint_that_retention_takes_during_a_verify_is_no_problem(
    tier: LocalTier, document, monkeypatch
) -> None:
    save(tier, step=1)
    save(tier, step=2)
    real = LocalTier.digest

    def digest_while_removing(self: LocalTier, name: str, file: str) -> str:
        if name == "step=1.ckpt" and tier.path(name).exists():
            tier.remove(name)
        return real(self, name, file)

    monkeypatch.setattr(LocalTier, "digest", digest_while_removing)
    monkeypatch.setattr(commands, "READERS", 1)
    code, found = document("verify", tier.root)
    assert (code, [ckpt["name"] for ckpt in found["checkpoints"]]) == (0, ["step=2.ckpt"])


def test_an_interrupt_stops_a_verify_without_a_traceback(tier: LocalTier, call, monkeypatch) -> None:
    save(tier)

    def interrupted(*args: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands.store, "content_problem", interrupted)
    code, out, err = call("verify", tier.root)
    assert (code, out, err) == (130, "", "lightning-resilience: interrupted\n")


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_changes_anything(tier: LocalTier, call, command: str) -> None:
    name = save(tier, step=1)
    begin(tier, "step=2.ckpt.partial-1")
    save(tier, "step=3.ckpt.partial-1")
    flip(tier.path(save(tier, step=4), "meta.pt"))
    before = tree(tier.root)
    call(command, tier.path(name) if command == "show" else tier.root)
    assert tree(tier.root) == before


# -- progress ---------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_progress_is_a_bar_on_a_terminal_and_is_taken_away_at_the_end(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    clock, stream = Clock(), Terminal()
    meter = console.Meter(4096, stream, "verified", clock)
    clock.now = 2.0
    meter.advance(1024, "a-checkpoint-with-a-long-name.ckpt")
    shown = stream.getvalue()
    assert shown == "\r\x1b[K[######------------------]  25%  1.0 KiB of 4.0 KiB, 512 B…"
    meter.close()
    assert stream.getvalue() == shown + "\r\x1b[K"


def test_progress_is_a_plain_line_now_and_then_elsewhere() -> None:
    clock, stream = Clock(), io.StringIO()
    meter = console.Meter(4096, stream, "verified", clock)
    for second in range(1, 26):
        clock.now = float(second)
        meter.advance(100, "a.ckpt")
    meter.close()
    assert stream.getvalue().splitlines() == [
        "verified 24%  1000 B of 4.0 KiB, 100 B/s  a.ckpt",
        "verified 49%  2.0 KiB of 4.0 KiB, 100 B/s  a.ckpt",
    ]


def test_progress_as_a_share_begins_when_work_has_taken_a_second(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    clock, stream = Clock(), Terminal()
    meter = console.Share(10.0, stream, "simulated", clock)
    clock.now = 0.9
    meter.advance(4, "oracle")
    assert stream.getvalue() == ""
    clock.now = 1.1
    meter.advance(1, "oracle")
    assert stream.getvalue() == "\r\x1b[K[############------------]  50%  oracle"


def test_progress_of_nothing_does_not_divide_by_it() -> None:
    clock, stream = Clock(), Terminal()
    meter = console.Meter(0, stream, "verified", clock)
    clock.now = 1.0
    meter.advance(0, "empty.ckpt")
    assert "100%" in stream.getvalue()


# -- text -------------------------------------------------------------------------------------------------------------

ROW = {"NAME": "epoch=0-step=1200.ckpt", "SIZE": "1.2 GiB", "METRICS": "val_loss=0.3123, acc=0.5", "REASON": "r" * 40}


@pytest.mark.parametrize("width", [None, 100, 80, 60, 40, 10])
def test_a_table_fits_the_terminal_and_keeps_names_whole(width: int | None) -> None:
    lines = list(console.table([ROW, {**ROW, "NAME": "a.ckpt"}], width, right=("SIZE",)))
    assert len(lines) == 3
    assert lines[1].startswith(ROW["NAME"])
    if width is None:
        assert all(value in lines[1] for value in ROW.values())
    else:
        assert max(map(len, lines)) <= max(width, len(ROW["NAME"]))
    if width in (60, 80):
        assert "…" in lines[1]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5.0 GiB"), (2**52, "4096.0 TiB")],
)
def test_sizes_are_for_people(size: int, text: str) -> None:
    assert console.human_size(size) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("10", 10),
        ("500B", 500),
        ("2k", 2000),
        ("10GB", 10**10),
        ("10 gb", 10**10),
        ("1.5T", 1_500_000_000_000),
        ("3M", 3_000_000),
        ("1KiB", 1024),
        ("10Gi", 10 * 2**30),
        ("0.5MiB", 2**19),
    ],
)
def test_sizes_are_typed_with_units(text: str, size: int) -> None:
    assert typed.size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-5", "0", "0.1", "10 parsecs", "1e9", "1_000", "inf", "5iB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size in bytes"):
        typed.size(text)


@pytest.mark.parametrize(
    ("ago", "text"),
    [
        (timedelta(seconds=0), "0 s"),
        (timedelta(seconds=119), "119 s"),
        (timedelta(minutes=2), "2 min"),
        (timedelta(minutes=119), "119 min"),
        (timedelta(hours=47), "47 h"),
        (timedelta(days=400), "400 d"),
        (timedelta(hours=-1), "2026-11-29T19:30:00Z"),  # written by a clock ahead of ours
    ],
)
def test_ages_are_for_people(ago: timedelta, text: str) -> None:
    assert console.age(f"{NOW - ago:%Y-%m-%dT%H:%M:%SZ}", NOW) == text


def test_a_time_that_cannot_be_read_is_shown_as_it_is() -> None:
    assert console.age("yesterday", NOW) == "yesterday"


@pytest.mark.parametrize("command", COMMANDS)
def test_control_characters_in_a_manifest_do_not_reach_the_terminal(tier: LocalTier, call, command: str) -> None:
    name = save(tier, "evil\x1b[2J.ckpt", reason="two\nlines\x1b[2J", metrics={"a\rb": 1.0})
    flip(tier.path(name, "meta.pt"))
    _, out, err = call(command, tier.path(name))
    assert "two lines" in out or command == "verify"
    assert "\x1b" not in out + err
    assert "\r" not in out + err


def test_what_the_terminal_cannot_encode_is_escaped_not_fatal(tier: LocalTier) -> None:
    save(tier, reason="größer …")
    done = process("ls", tier.root, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"gr\xf6\xdfer" in done.stdout


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_imports_torch_or_lightning(tier: LocalTier, command: str) -> None:
    name = save(tier)
    path = tier.path(name) if command == "show" else tier.root
    code = (
        "import sys; from lightning_resilience.cli import main; code = main(sys.argv[1:]); "
        "print(code, sorted({'torch', 'lightning', 'numpy', 'fsspec'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, command, str(path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stderr == "0 []\n"
    assert name in done.stdout


@pytest.mark.parametrize("command", [("ls",), ("verify",), ("ls", "--json"), ("--help",)])
def test_a_reader_that_closes_early_causes_no_traceback(tier: LocalTier, monkeypatch, command: tuple[str, ...]) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: None)
        for step in range(300):  # more text than the pipe and the buffers hold back
            save(tier, step=step, files={"a.pt": b"a"}, reason="r" * 300)
    read, write = os.pipe()
    os.close(read)
    try:
        done = process(*command, tier.root, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "argv",
    [(), ("frobnicate",), ("ls",), ("ls", "a", "b"), ("ls", "--frob", "a"), ("show",), ("verify",)],
)
def test_wrong_usage_exits_with_2_and_says_how(argv: tuple[str, ...], capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    out, err = capsys.readouterr()
    assert (caught.value.code, out) == (2, "")
    assert err.startswith("usage: lightning-resilience")


def test_version_and_help_are_fine(capsys) -> None:
    for argv in (["--version"], ["--help"], *([command, "--help"] for command in COMMANDS)):
        with pytest.raises(SystemExit) as caught:
            cli.main(argv)
        assert caught.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"lightning-resilience {__version__}\nusage: lightning-resilience")
    assert err == ""
    assert "exit codes: 0 fine" in out
    for command in COMMANDS:
        assert f"lightning-resilience {command} runs/7" in out


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("path", ["nowhere", "nowhere.ckpt"])
def test_an_error_as_json_is_one_document_too(tmp_path: Path, monkeypatch, call, command: str, path: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = call(command, path, "--json")
    found = json.loads(out)
    assert (code, found["ok"], found["error"]) == (1, False, "CheckpointNotFound")
    assert path in found["message"]
    assert path in err


def test_a_folder_that_may_not_be_read_is_an_error_with_its_cause(tmp_path: Path, call, monkeypatch) -> None:
    def refuse(path: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    code, out, err = call("ls", tmp_path)
    assert (code, out) == (1, "")
    assert "Permission denied" in err
    assert str(tmp_path) in err


def test_the_console_script_is_this_main(tier: LocalTier) -> None:
    from importlib.metadata import entry_points

    (script,) = entry_points(group="console_scripts", name="lightning-resilience")
    assert script.load() is cli.main
    flip(tier.path(save(tier), "meta.pt"))
    assert process("verify", tier.root).returncode == 1
