"""The on-disk format: what is kept, what is refused, what is noticed."""

from __future__ import annotations

import json
import math
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from lightning_resilience.errors import CheckpointCorrupt, CheckpointIncompatible, ResilienceError
from lightning_resilience.manifest import FileEntry, Manifest, digest, rank_file, shard_file
from on_disk import manifest

SHARD = FileEntry("__0_0.distcp", 123, digest(b"content"), rank=0)
OLD_SHARD = FileEntry("__1_0.distcp", 45, digest(b"other"), rank=1, at="step=50.ckpt")
FULL = manifest(
    1200,
    epoch=3,
    reason="30.2 s since the last save; größte Überraschung …",
    files=(SHARD, OLD_SHARD),
    labels=("pinned", "milestone"),
    world_size=2,
    strategy="FSDPStrategy",
    metrics={"val_loss": 0.31, "acc": 1.0},
    versions={"torch": "2.13.0"},
)


def document(**changes: Any) -> bytes:
    """The bytes of ``FULL`` with some fields changed, added, or (with ``...``) left out, under a right digest."""
    raw = {**json.loads(FULL.to_bytes()), **changes}
    raw = {name: value for name, value in raw.items() if value is not ... and name != "digest"}
    return canonical({**raw, "digest": digest(canonical(raw))})


def canonical(raw: dict[str, Any]) -> bytes:
    """The form the specification describes, written down a second time."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"


def entry(**changes: Any) -> dict[str, Any]:
    return {"path": "a.pt", "size": 1, "xxh3_128": "00", "rank": 0, **changes}


def test_what_is_written_is_read_back() -> None:
    assert Manifest.from_bytes(FULL.to_bytes()) == FULL


def test_the_bytes_are_the_ones_the_specification_describes() -> None:
    assert FULL.to_bytes() == document()
    assert Manifest.from_bytes(FULL.to_bytes()).to_bytes() == FULL.to_bytes()


def test_keys_of_a_later_version_are_kept_on_rewrite() -> None:
    data = document(lineage=["a", "b"], files=[entry(codec="zstd", at="old.ckpt")])
    found = Manifest.from_bytes(data)
    assert found.extra == {"lineage": ["a", "b"]}
    assert found.files[0].extra == {"codec": "zstd"}
    assert found.to_bytes() == data
    pinned = Manifest.from_bytes(replace(found, labels=("pinned",)).to_bytes())
    assert (pinned.extra, pinned.files, pinned.labels) == (found.extra, found.files, ("pinned",))


@pytest.mark.parametrize("number", [0, 2, "1", None, 1.5])
def test_another_format_is_refused_and_says_what_to_do(number: object) -> None:
    with pytest.raises(CheckpointIncompatible, match=re.escape(f"has format {number!r}")) as caught:
        Manifest.from_bytes(document(format=number), "runs/7/a.ckpt/manifest.json")
    assert "runs/7/a.ckpt/manifest.json" in str(caught.value)
    assert "pip install" in caught.value.hint


def test_every_flipped_bit_is_noticed() -> None:
    data = FULL.to_bytes()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(ResilienceError):
                Manifest.from_bytes(bytes(damaged))


def test_every_lost_and_every_added_byte_is_noticed() -> None:
    data = FULL.to_bytes()
    for position in range(len(data)):
        for damaged in (
            data[:position],
            data[:position] + data[position + 1 :],
            data[:position] + b" " + data[position:],
        ):
            with pytest.raises(CheckpointCorrupt):
                Manifest.from_bytes(damaged)


def test_random_damage_never_escapes_as_another_kind_of_error() -> None:
    rng = random.Random(0)
    data = FULL.to_bytes()
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(rng.randrange(1, 6)):
            damaged[rng.randrange(len(damaged))] = rng.choice(b'0123456789eE+-."{}[]:,\\undf \n\xff\x00')
        if damaged != data:
            with pytest.raises(ResilienceError):
                Manifest.from_bytes(bytes(damaged))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b'"format"',
        b"{}",
        b"\x00" * 600,
        b"[" * 100_000,
        b'{"format":1}',
        b'{"format":1,"x":1e999}',
        b'{"format":1,"x":"\\ud800"}',
        json.dumps(json.loads(FULL.to_bytes()), indent=1).encode(),
    ],
)
def test_what_is_no_manifest_is_corrupt_and_says_where(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"a\.ckpt/manifest\.json") as caught:
        Manifest.from_bytes(data, "a.ckpt/manifest.json")
    assert caught.value.problems[0].startswith("manifest.json: ")


@pytest.mark.parametrize("missing", ["run", "step", "epoch", "created", "reason", "files"])
def test_a_missing_field_is_corrupt_and_named(missing: str) -> None:
    with pytest.raises(CheckpointCorrupt, match=missing):
        Manifest.from_bytes(document(**{missing: ...}))


def test_a_manifest_without_its_digest_is_refused() -> None:
    raw = json.loads(FULL.to_bytes())
    del raw["digest"]
    with pytest.raises(CheckpointCorrupt, match="digest"):
        Manifest.from_bytes(canonical(raw))


@pytest.mark.parametrize(
    "changes",
    [
        {"step": "many"},
        {"step": None},
        {"files": 3},
        {"files": ["a.pt"]},
        {"files": [{"path": "a.pt"}]},
        {"metrics": [1]},
        {"metrics": {"loss": "low"}},
        {"metrics": {"loss": 10**400}},
        {"versions": 3},
    ],
)
def test_a_misstated_field_is_corrupt(changes: dict[str, Any]) -> None:
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_bytes(document(**changes))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/b", "..", ".", "", "a\0b", 7, None])
def test_a_file_outside_the_folder_is_refused(name: object) -> None:
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_bytes(document(files=[entry(path=name)]))


@pytest.mark.parametrize("name", ["../other", "/tmp/x.ckpt", "a/b", "..", ".", "", 7])
def test_a_reference_outside_the_run_folder_is_refused(name: object) -> None:
    with pytest.raises(CheckpointCorrupt):
        Manifest.from_bytes(document(files=[entry(at=name)]))


@pytest.mark.parametrize(("value", "written"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_metric_that_is_not_finite_survives(value: float, written: str) -> None:
    data = replace(FULL, metrics={"loss": value}).to_bytes()
    assert json.loads(data)["metrics"] == {"loss": written}
    found = Manifest.from_bytes(data).metrics["loss"]
    assert math.isnan(found) if math.isnan(value) else found == value
    assert Manifest.from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("value", [0.1 + 0.2, 1e-300, -0.0, 5e-324, 1.7976931348623157e308, 3])
def test_a_finite_metric_survives_to_the_last_bit(value: float) -> None:
    found = Manifest.from_bytes(replace(FULL, metrics={"loss": value}).to_bytes()).metrics["loss"]
    assert (found, math.copysign(1, found)) == (value, math.copysign(1, value))


def test_fields_that_may_be_left_out_have_defaults() -> None:
    optional = ("sequence", "health", "labels", "world_size", "strategy", "metrics", "versions")
    found = Manifest.from_bytes(document(**dict.fromkeys(optional, ...)))
    assert found == manifest(1200, epoch=3, reason=FULL.reason, files=FULL.files, sequence=0)


def test_size_and_lookup_speak_of_all_files() -> None:
    assert FULL.size == 168
    assert list(FULL) == [SHARD, OLD_SHARD]
    assert FULL.file("__1_0.distcp") is OLD_SHARD
    assert FULL.file("nothing") is None


def test_the_later_save_is_newer_even_at_a_smaller_step() -> None:
    assert manifest(200, sequence=8).order > manifest(900, sequence=7).order
    assert manifest(900, sequence=7).order > manifest(200, sequence=7).order


def test_file_names_sort_by_rank_and_follow_dcp() -> None:
    assert (rank_file(3), shard_file(3)) == ("rank_00003.pt", "__3_0.distcp")


def test_the_digest_is_xxh3_128_as_others_compute_it() -> None:
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"  # from the xxHash specification's test vectors
