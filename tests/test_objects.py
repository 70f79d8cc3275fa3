"""Objects on a real S3 server, in memory and in a folder: whole and checked, or an error that says why."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import sys
import threading
import time
import traceback
import tracemalloc
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
import fsspec
import pytest
from botocore.exceptions import ClientError
from botocore.retries.standard import ExponentialBackoff
from fsspec.implementations.memory import MemoryFileSystem
from xxhash import xxh3_128_hexdigest as digest

from lightning_resilience import transfer
from lightning_resilience.errors import CheckpointCorrupt, SetupError, TierDenied, TierUnavailable
from lightning_resilience.fsspec_objects import FsspecObjects
from lightning_resilience.objects import Objects, open_objects
from lightning_resilience.patience import Patience
from lightning_resilience.s3 import S3Objects
from lightning_resilience.transfer import Stat
from s3_fault_proxy import Rule
from s3_fixtures import Bucket, Faults
from s3_server import S3Server

MIB = 2**20
PART = 5 * MIB  # S3 takes no smaller parts, but for the last
CONTENT = random.Random(0).randbytes(2 * PART + 12_345)
SMALL = CONTENT[: 2 * MIB]
THROUGH_S3FS = {"default_fill_cache": False}
"""An option that s3fs knows and ``S3Objects`` does not."""

small_or_in_parts = pytest.mark.parametrize("size", [1000, len(CONTENT)], ids=["small", "in parts"])


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that a test can afford; and nothing here may make the whole machine write its buffers."""
    monkeypatch.setattr(transfer, "PART", PART)
    monkeypatch.setattr(transfer, "MEMORY", 2 * PART)
    monkeypatch.setattr(os, "sync", lambda: pytest.fail("os.sync was called"))


@pytest.fixture(scope="module", autouse=True)
def quick_clients() -> Iterator[None]:
    """Have botocore read the description of S3 once, and not for each of a hundred clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", functools.cache(botocore.session.create_loader))
        yield


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again at once."""
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda self, context: 0.0)
    monkeypatch.setattr(Patience, "pause", lambda self, seconds: False)


@dataclass(frozen=True)
class Place:
    """Where objects go; to be opened as often as a test likes."""

    kind: str
    url: str
    options: dict[str, Any]

    def open(self) -> Objects:
        return open_objects(self.url, self.options)


@pytest.fixture(params=[*(pytest.param(kind, marks=pytest.mark.s3) for kind in ("s3", "s3fs")), "memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    kind = request.param
    if kind == "memory":
        url = f"memory://{uuid.uuid4()}/run"
        yield Place(kind, url, {})
        fsspec.filesystem("memory").rm(url.rpartition("/")[0], recursive=True)
    elif kind == "file":
        (tmp_path / "bucket").mkdir()
        yield Place(kind, f"file://{tmp_path}/bucket/run", {})
    else:
        bucket: Bucket = request.getfixturevalue("bucket")
        yield Place(kind, bucket.url, bucket.storage_options | (THROUGH_S3FS if kind == "s3fs" else {}))


@pytest.fixture
def there(place: Place) -> Objects:
    return place.open()


def put(there: Objects, key: str, content: bytes, **stated: Any) -> None:
    stated = {"size": len(content), "digest": digest(content)} | stated
    there.put(key, lambda start, length: content[start : start + length], **stated)


def fetched(there: Objects, key: str, size: int) -> bytes:
    """What ``fetch`` writes, which must be each byte once."""
    pieces: dict[int, bytes] = {}

    def write(start: int, piece: bytes) -> None:
        assert start not in pieces
        pieces[start] = bytes(piece)

    there.fetch(key, size, write)
    whole = b""
    for start in sorted(pieces):
        assert start == len(whole)
        whole += pieces[start]
    return whole


def keys(there: Objects, prefix: str = "") -> list[str]:
    return sorted(key for key, _ in there.entries(prefix))


# -- the contract, wherever objects go --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, len(CONTENT)])
def test_what_was_put_comes_back(place: Place, there: Objects, size: int) -> None:
    content = CONTENT[:size]
    put(there, "a.ckpt/shard", content)
    assert there.stat("a.ckpt/shard") == Stat(size, digest(content) if place.kind == "s3" else None)
    assert list(there.entries()) == [("a.ckpt/shard", size)]
    assert there.get("a.ckpt/shard") == content
    assert fetched(there, "a.ckpt/shard", size) == content


def test_a_range_comes_as_a_slice_would(there: Objects) -> None:
    put(there, "a", CONTENT)
    for start, stop in [(0, 10), (7, 8), (PART - 1, PART + 1), (PART, 2 * PART), (len(CONTENT) - 3, None)]:
        assert there.get("a", start, stop) == CONTENT[start:stop]


def test_a_second_put_replaces_the_first(there: Objects) -> None:
    for content in (CONTENT, b"short", b"other", SMALL):
        put(there, "a", content)
        assert there.get("a") == content
    assert list(there.entries()) == [("a", len(SMALL))]


@small_or_in_parts
@pytest.mark.parametrize("how", ["changed", "shorter"])
def test_content_that_is_not_what_was_meant_is_refused(place: Place, request, size: int, how: str) -> None:
    there = place.open()
    content = CONTENT[:size]
    stated = {"size": size + 1} if how == "shorter" else {"digest": digest(b"what was meant")}
    with pytest.raises(CheckpointCorrupt, match=r"a\.ckpt/shard") as raised:
        put(there, "a.ckpt/shard", content, **stated)
    assert raised.value.problems
    assert there.stat("a.ckpt/shard") is None
    assert keys(there) == []
    if place.kind.startswith("s3"):
        assert request.getfixturevalue("bucket").uploads() == []


@small_or_in_parts
def test_an_error_in_reading_the_content_is_not_blamed_on_the_store(place: Place, request, size: int) -> None:
    there = place.open()

    def read(start: int, length: int) -> bytes:
        if start + length >= size:
            raise PermissionError("the disk that the content is on")
        return CONTENT[start : start + length]

    with pytest.raises(PermissionError, match="the disk that the content is on"):
        there.put("a", read, size, digest(CONTENT[:size]))
    assert keys(there) == []
    if place.kind.startswith("s3"):
        assert request.getfixturevalue("bucket").uploads() == []


@pytest.mark.usefixtures("no_pauses")
def test_an_error_in_writing_what_was_fetched_is_not_blamed_on_the_store(there: Objects) -> None:
    put(there, "a", SMALL)
    tries = []

    def write(start: int, piece: bytes) -> None:
        tries.append(start)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left") as raised:
        there.fetch("a", len(SMALL), write)
    assert not isinstance(raised.value, TierUnavailable)
    assert tries == [0]


@pytest.mark.usefixtures("no_pauses")
def test_an_object_that_became_shorter_is_noticed(there: Objects) -> None:
    put(there, "a", SMALL)
    with pytest.raises(TierUnavailable):
        fetched(there, "a", len(SMALL) + 1)


def test_what_is_not_there_is_not_there(there: Objects) -> None:
    assert there.stat("a") is None
    assert list(there.entries()) == list(there.entries("a.ckpt/")) == []
    assert there.folders() == []
    there.delete(["a", "a.ckpt/b"])
    with pytest.raises(FileNotFoundError):
        there.get("a")
    with pytest.raises(FileNotFoundError):
        fetched(there, "a", 10)
    put(there, "a.ckpt/b", b"1")
    assert there.stat("a.ckpt") is None


def test_deleting_takes_what_is_named_and_nothing_else(there: Objects) -> None:
    names = ["a", "a.ckpt/b", "a.ckpt/bb", "ab.ckpt/b", "c.ckpt/b"]
    for name in names:
        put(there, name, b"1")
    there.delete(["a.ckpt/b", "c.ckpt/b", "gone"])
    there.delete(iter(["a.ckpt/b"]))
    there.delete([])
    assert keys(there) == ["a", "a.ckpt/bb", "ab.ckpt/b"]
    assert there.stat("c.ckpt/b") is None


@pytest.mark.parametrize("place", ["memory", "file"], indirect=True)  # this S3 server lists it a while longer
def test_an_emptied_folder_is_gone(there: Objects) -> None:
    put(there, "a.ckpt/b/c", b"1")
    put(there, "b.ckpt/c", b"1")
    there.delete(["a.ckpt/b/c", "b.ckpt/c"])
    assert there.folders() == []


def test_a_listing_has_keys_by_their_beginning_without_bucket_and_protocol(there: Objects) -> None:
    sizes = {"top": 1, "a.ckpt/__0_0.distcp": 3, "a.ckpt/sub/x": 0, "a.ckpt2/x": 2, "run/run/run": 5}
    sizes |= {"step=1 loss=0,5.ckpt/ü+%~&.pt": 4}
    for name, size in sizes.items():
        put(there, name, CONTENT[:size])
    assert dict(there.entries()) == sizes
    for prefix in ("a.ckpt/", "a.ckpt", "a.ckpt/__0", "t", "run/", "step=1 loss=0,5.ckpt/ü+", "nowhere"):
        assert dict(there.entries(prefix)) == {name: size for name, size in sizes.items() if name.startswith(prefix)}
    assert sorted(there.folders()) == ["a.ckpt", "a.ckpt2", "run", "step=1 loss=0,5.ckpt"]
    for name, size in sizes.items():
        assert there.get(name) == CONTENT[:size]


def test_what_another_client_does_is_seen_at_once(place: Place) -> None:
    here, there = place.open(), place.open()

    def seen() -> tuple[Any, ...]:
        stat = here.stat("a.ckpt/b")
        return stat and stat.size, keys(here), keys(here, "a.ckpt/")

    assert seen() == (None, [], [])
    put(there, "a.ckpt/b", b"1")
    assert seen() == (1, ["a.ckpt/b"], ["a.ckpt/b"])
    assert here.folders() == ["a.ckpt"]
    put(there, "a.ckpt/b", b"22")
    assert seen() == (2, ["a.ckpt/b"], ["a.ckpt/b"])
    assert here.get("a.ckpt/b") == b"22"
    put(there, "a.ckpt/c", b"3")
    assert keys(here) == ["a.ckpt/b", "a.ckpt/c"]
    there.delete(["a.ckpt/b", "a.ckpt/c"])
    assert seen() == (None, [], [])


def test_a_place_does_not_reach_beyond_its_folder(place: Place) -> None:
    there = place.open()
    beside = open_objects(f"{place.url}-2", place.options)
    put(there, "a/b", b"1")
    put(beside, "a/b", b"22")
    assert list(there.entries()) == [("a/b", 1)]
    there.delete(["a/b"])
    assert list(beside.entries()) == [("a/b", 2)]


@pytest.mark.parametrize("url", ["memory://{}", "file://{}", "{}"])
def test_a_file_in_a_folder_and_its_name_are_synced_before_it_counts_as_put(
    tmp_path: Path, monkeypatch, url: str
) -> None:
    there = open_objects(url.format(tmp_path / "run"))
    synced: set[str] = set()
    fsync = os.fsync

    def spy(fd: int) -> None:
        path = os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path)
        if path.startswith("run/.put-"):  # before it has its name
            path = "content"
        elif path.endswith("shard"):
            assert "content" in synced
        synced.add(path)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", spy)
    put(there, "a.ckpt/sub/shard", CONTENT)
    expected = {"content", ".", "run", "run/a.ckpt", "run/a.ckpt/sub", "run/a.ckpt/sub/shard"}
    assert synced == (set() if url.startswith("memory") else expected)


# -- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "options", "kind", "shown"),
    [
        ("s3://bucket/a/run/", {}, S3Objects, "s3://bucket/a/run"),
        ("s3a://bucket", {"key": "k", "secret": "s", "token": "t"}, S3Objects, "s3://bucket"),
        ("s3://bucket/lr=0.1 #2?", {}, S3Objects, "s3://bucket/lr=0.1 #2?"),
        ("s3://bucket/run", {"anon": True, **THROUGH_S3FS}, FsspecObjects, "s3://bucket/run"),
        ("memory://run/", None, FsspecObjects, "memory://run"),
        ("/tmp/run", None, FsspecObjects, "/tmp/run"),
    ],
)
def test_a_url_and_its_options_say_which_way_to_go(url: str, options: Any, kind: type, shown: str) -> None:
    there = open_objects(url, options)
    assert type(there) is kind
    assert there.url == shown


@pytest.mark.parametrize(
    ("url", "options", "named"),
    [
        ("s3:///run", {}, "names no bucket"),
        ("s3://", {}, "names no bucket"),
        ("memory://", {}, "names no bucket or folder"),
        ("gs:///", {}, "names no bucket or folder"),
        ("://run", {}, "no protocol"),
        ("file://", {}, "not an absolute path"),
        ("file://run/7", {}, "three slashes"),
        ("local://run/7", {}, "three slashes"),
        ("s3://bucket/run", {"s3_additional_kwargs": "sesame"}, "s3_additional_kwargs"),
        ("s3://bucket/run", {"client_kwargs": ["sesame"]}, "client_kwargs"),
        ("s3://bucket/run", {"config_kwargs": "sesame"}, "config_kwargs"),
        ("nosuch://bucket/run", {}, "nosuch"),
        ("s3://b!/run", {"anon": True}, "ParamValidationError"),
        ("s3://bucket/run", {"endpoint_url": "no url"}, "ValueError"),
        ("s3://bucket/run", {"client_kwargs": {"nonsense": 1}}, "TypeError"),
        ("s3://bucket/run", {"config_kwargs": {"nonsense": 1}}, "TypeError"),
    ],
)
def test_what_cannot_be_a_place_is_a_setup_error(url: str, options: dict, named: str) -> None:
    with pytest.raises(SetupError, match=named) as caught:
        open_objects(url, options).stat("a")
    assert "sesame" not in str(caught.value)


def test_without_s3fs_it_is_said_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(SetupError, match="pip install s3fs"):
        open_objects("s3://bucket/run")


@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("where", ["s3://bucket/run", "ftp://nobody:sesame@127.0.0.1:1/run"])
def test_a_store_that_does_not_answer_is_unavailable(where: str) -> None:
    options = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:1"} if where.startswith("s3") else {}
    with pytest.raises(TierUnavailable):
        open_objects(where, options).stat("a")


def test_a_file_system_that_knows_nothing_of_caches_will_do() -> None:
    class Plain(MemoryFileSystem):
        protocol = "plain"

        def __init__(self) -> None:
            super().__init__()

    fsspec.register_implementation("plain", Plain, clobber=True)
    there = open_objects("plain://run")
    put(there, "a", b"1")
    assert there.get("a") == b"1"
    there.delete(["a"])


# -- options that go with requests ------------------------------------------------------------------------------------


@pytest.mark.s3
def test_who_pays_is_said_in_every_request(bucket: Bucket) -> None:
    there = open_objects(bucket.url, bucket.storage_options | {"requester_pays": True})
    silent: set[str] = set()

    def look(model: Any, params: dict[str, Any], **_: Any) -> None:
        if params["headers"].get("x-amz-request-payer") != "requester":
            silent.add(model.name)

    there._client().meta.events.register("before-call.s3", look)
    for call in ANY_CALL.values():
        with suppress(FileNotFoundError):
            call(there)
    with pytest.raises(CheckpointCorrupt):
        put(there, "new", CONTENT, digest=digest(b""))
    assert silent == set()


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
@small_or_in_parts
def test_a_key_of_the_customer_is_for_every_part(bucket: Bucket, size: int) -> None:
    key = {"SSECustomerAlgorithm": "AES256", "SSECustomerKey": "k" * 32}
    there = open_objects(bucket.url, bucket.storage_options | {"s3_additional_kwargs": key})
    put(there, "a", CONTENT[:size])
    assert there.get("a") == fetched(there, "a", size) == CONTENT[:size]
    with pytest.raises(TierUnavailable, match="InvalidArgument"):
        open_objects(bucket.url, bucket.storage_options).get("a")


@pytest.mark.s3
@small_or_in_parts
def test_what_a_user_has_to_say_of_each_object_stands_beside_the_digest(bucket: Bucket, size: int) -> None:
    extra = {"Metadata": {"team": "vision"}}
    there = open_objects(bucket.url, bucket.storage_options | {"s3_additional_kwargs": extra})
    put(there, "a", CONTENT[:size])
    assert there.stat("a") == Stat(size, digest(CONTENT[:size]))
    assert bucket.client.head_object(Bucket=bucket.name, Key="run/a")["Metadata"]["team"] == "vision"


# -- many objects, much memory, several processes ---------------------------------------------------------------------


@pytest.mark.s3
def test_a_listing_goes_on_after_a_thousand_keys_and_so_does_a_deletion(bucket: Bucket) -> None:
    there = open_objects(bucket.url, bucket.storage_options)
    names = [f"{number % 2}.ckpt/{number:04}" for number in range(1500)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: bucket.client.put_object(Bucket=bucket.name, Key=f"run/{name}", Body=b"1"), names))
    assert keys(there) == sorted(names)
    assert there.folders() == ["0.ckpt", "1.ckpt"]
    there.delete(iter(names[:-1]))
    assert keys(there) == names[-1:]


@pytest.mark.s3
def test_an_upload_holds_no_more_than_the_memory_it_may(bucket: Bucket) -> None:
    there = open_objects(bucket.url, bucket.storage_options)
    size, held, most = 8 * PART, 0, 0
    lock = threading.Lock()

    def read(start: int, length: int) -> bytes:
        nonlocal held, most
        with lock:
            held += length
            most = max(most, held)
        return bytes(length)

    def acknowledged(**_: Any) -> None:
        nonlocal held
        with lock:
            held -= PART

    there._client().meta.events.register("after-call.s3.UploadPart", acknowledged)
    meant = digest(bytes(size))
    tracemalloc.start()
    try:
        there.put("a", read, size, meant)
        traced = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert held == 0
    assert PART < most <= transfer.MEMORY + PART
    assert traced < 2 * transfer.MEMORY + 2 * PART


def in_a_fork(call: Callable[[], object]) -> int:
    """Run ``call`` in a forked process; its exit status, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # "multi-threaded, use of fork() may lead to deadlocks"
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            call()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.s3
def test_a_forked_process_has_a_client_of_its_own(bucket: Bucket) -> None:
    there = open_objects(bucket.url, bucket.storage_options)
    put(there, "from-parent", b"parent")
    client = there._client()

    def child() -> None:
        assert there._client() is not client
        put(there, "from-child", CONTENT)
        assert there.get("from-parent") == b"parent"

    assert in_a_fork(child) == 0
    assert there._client() is client
    assert there.get("from-child") == CONTENT


@pytest.mark.s3
def test_what_a_killed_process_began_is_swept_and_nothing_of_other_runs(bucket: Bucket) -> None:
    def read(start: int, length: int) -> bytes:
        if start == PART:
            os.kill(os.getpid(), signal.SIGKILL)
        return CONTENT[start : start + length]

    def child() -> None:
        open_objects(bucket.url, bucket.storage_options).put("a.ckpt/b", read, len(CONTENT), digest(CONTENT))

    assert in_a_fork(child) == -signal.SIGKILL
    others = ["other/run/a", "run-2/a", "run/b/a.ckpt/b", "runaway"]
    for key in others:
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=key)
    assert bucket.uploads() == sorted([*others, "run/a.ckpt/b"])
    there = open_objects(bucket.url, bucket.storage_options)
    assert keys(there) == []
    assert there.sweep(lambda key: key.startswith("a.ckpt/")) == 1
    assert bucket.uploads() == others
    assert there.sweep(lambda key: key.startswith("a.ckpt/")) == 0


@pytest.mark.s3
def test_all_uploads_are_swept_however_many_come_at_once(bucket: Bucket) -> None:
    there = open_objects(bucket.url, bucket.storage_options)

    def two_at_once(params: dict[str, Any], **_: Any) -> None:
        params["MaxUploads"] = 2

    there._client().meta.events.register("provide-client-params.s3.ListMultipartUploads", two_at_once)
    for number in range(9):
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key=f"run/{number}")
    assert there.sweep(lambda key: key in "34578") == 5
    assert bucket.uploads() == ["run/0", "run/1", "run/2", "run/6"]
    assert there.sweep(bool) == 4
    assert bucket.uploads() == []


@pytest.mark.parametrize("url", ["memory://nowhere", "file:///nowhere"])
def test_places_without_uploads_have_nothing_to_sweep(url: str) -> None:
    assert open_objects(url).sweep(bool) == 0


def test_file_that_a_kill_kept_from_being_whole_has_no_name_and_goes_when_it_is_old(tmp_path: Path) -> None:
    def child() -> None:
        def read(start: int, length: int) -> bytes:
            if start == PART:
                os.kill(os.getpid(), signal.SIGKILL)
            return CONTENT[start : start + length]

        open_objects(f"file://{tmp_path}/run").put("a.ckpt/b", read, len(CONTENT), digest(CONTENT))

    there = open_objects(f"file://{tmp_path}/run")
    put(there, "a.ckpt/b", b"older")
    assert in_a_fork(child) == -signal.SIGKILL
    assert there.get("a.ckpt/b") == b"older"
    assert keys(there) == ["a.ckpt/b"]
    for folder in ("empty.ckpt", "mine"):
        (tmp_path / "run" / folder).mkdir()
    assert there.sweep(lambda key: key.endswith(".ckpt/")) == 0
    old = time.time() - 7200
    for path in (tmp_path / "run").iterdir():
        os.utime(path, (old, old))
    assert there.sweep(lambda key: key.endswith(".ckpt/")) == 1
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["a.ckpt", "mine"]
    assert there.get("a.ckpt/b") == b"older"


def test_put_that_fails_leaves_nothing_in_a_folder(tmp_path: Path) -> None:
    there = open_objects(f"file://{tmp_path}/run")
    for size in (1000, len(CONTENT)):
        with pytest.raises(CheckpointCorrupt):
            put(there, "a.ckpt/b", CONTENT[:size], digest="0")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


# -- faults on the way ------------------------------------------------------------------------------------------------


@pytest.fixture
def old(bucket: Bucket) -> None:
    """An object that is there from before."""
    bucket.client.put_object(Bucket=bucket.name, Key="run/old", Body=SMALL)


def shaky(bucket: Bucket, faults: Faults, **config: Any) -> Objects:
    """The bucket behind the proxy, by a client that takes half a second of silence for a failure."""
    config = {"read_timeout": 0.5, "retries": {"mode": "standard", "max_attempts": 4}} | config
    return open_objects(bucket.url, faults.storage_options | {"config_kwargs": config})


REQUESTS: dict[str, tuple[str, str, Callable[[Objects], object]]] = {
    "put": ("PUT", "/new", lambda there: put(there, "new", SMALL)),
    "begin": ("POST", "uploads", lambda there: put(there, "new", CONTENT)),
    "part": ("PUT", "partNumber=2", lambda there: put(there, "new", CONTENT)),
    "complete": ("POST", "uploadId", lambda there: put(there, "new", CONTENT)),
    "check": ("HEAD", "/new", lambda there: put(there, "new", SMALL)),
    "get": ("GET", "/old", lambda there: there.get("old")),
    "fetch": ("GET", "/old", lambda there: fetched(there, "old", len(SMALL))),
    "stat": ("HEAD", "/old", lambda there: there.stat("old")),
    "list": ("GET", "list-type", keys),
    "folders": ("GET", "list-type", lambda there: there.folders()),
    "delete": ("POST", "delete", lambda there: there.delete(["old"])),
    "sweep": ("GET", "uploads", lambda there: there.sweep(bool)),
}
"""What a client asks for: HTTP method, a piece of the path, and the call that leads to it."""


@pytest.mark.s3
@pytest.mark.usefixtures("old", "no_pauses")
@pytest.mark.parametrize("what", REQUESTS)
def test_a_server_that_is_busy_three_times_is_asked_a_fourth(bucket: Bucket, faults: Faults, what: str) -> None:
    method, path, call = REQUESTS[what]
    rule = faults.add(Rule("status", method, path, times=3))
    call(shaky(bucket, faults))
    assert rule.hits == 3


@pytest.mark.s3
@pytest.mark.usefixtures("old", "no_pauses")
@pytest.mark.parametrize("what", REQUESTS)
def test_a_server_that_stays_busy_is_unavailable_and_nothing_half_is_left(
    bucket: Bucket, faults: Faults, what: str
) -> None:
    there = shaky(bucket, faults)
    method, path, call = REQUESTS[what]
    faults.add(Rule("status", method, path))
    with pytest.raises(TierUnavailable, match="503" if method == "HEAD" else "SlowDown"):
        call(there)
    faults.clear()
    assert bucket.uploads() == []
    assert keys(there) == (["new", "old"] if what == "check" else ["old"])


SENDING = [
    *itertools.product(("put", "part"), ("reset_before", "reset_request", "ack_lost", "hang")),
    *itertools.product(("begin", "complete", "check"), ("reset_before", "ack_lost")),
]


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(("what", "kind"), SENDING)
def test_an_interrupted_put_is_whole_in_the_end(bucket: Bucket, faults: Faults, what: str, kind: Any) -> None:
    there = shaky(bucket, faults)
    method, path, call = REQUESTS[what]
    times = 1 if kind == "hang" else 2
    rule = faults.add(Rule(kind, method, path, times=times, after_bytes=MIB, seconds=5))
    call(there)
    assert rule.hits == times
    assert there.get("new") == (SMALL if what in ("put", "check") else CONTENT)
    strays = 2 if (what, kind) == ("begin", "ack_lost") else 0
    assert len(bucket.uploads()) == there.sweep(bool) == strays
    assert bucket.uploads() == []


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("what", ["put", "begin", "part", "list", "delete", "sweep"])
def test_a_server_that_knows_no_such_request_is_no_object_that_is_not_there(
    bucket: Bucket, faults: Faults, what: str
) -> None:
    """As when the endpoint is that of another server, or has a path too many."""
    method, path, call = REQUESTS[what]
    faults.add(Rule("status", method, path, status=404, code="NotFound"))
    with pytest.raises((TierDenied, TierUnavailable)):
        call(shaky(bucket, faults))


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
def test_an_upload_whose_every_acknowledgement_is_lost_is_found_to_be_there(bucket: Bucket, faults: Faults) -> None:
    there = shaky(bucket, faults)
    rule = faults.add(Rule("ack_lost", "POST", "uploadId"))
    put(there, "new", CONTENT)
    assert rule.hits > 1
    assert there.get("new") == CONTENT


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
def test_an_upload_that_failed_is_not_mistaken_for_an_older_one_of_that_name(bucket: Bucket, faults: Faults) -> None:
    there = shaky(bucket, faults)
    put(there, "new", CONTENT[::-1])
    faults.add(Rule("reset_before", "POST", "uploadId"))
    with pytest.raises(TierUnavailable):
        put(there, "new", CONTENT)
    assert there.get("new") == CONTENT[::-1]
    assert bucket.uploads() == []


@pytest.mark.s3
@pytest.mark.usefixtures("old", "no_pauses")
@pytest.mark.parametrize("kind", ["status", "hang", "reset_before", "ack_lost", "reset_response", "truncate_response"])
@pytest.mark.parametrize("how", ["get", "range", "fetch"])
def test_an_interrupted_get_goes_on_where_it_was(bucket: Bucket, faults: Faults, kind: Any, how: str) -> None:
    times = 1 if kind == "hang" else 2
    rule = faults.add(Rule(kind, "GET", "/old", times=times, after_bytes=MIB + 1000, seconds=5))
    there = shaky(bucket, faults)
    if how == "get":
        assert there.get("old") == SMALL
    elif how == "range":
        assert there.get("old", 1000, len(SMALL) - 1000) == SMALL[1000:-1000]
    else:
        assert fetched(there, "old", len(SMALL)) == SMALL
    assert rule.hits == times


@pytest.mark.s3
@pytest.mark.usefixtures("old", "no_pauses")
@pytest.mark.parametrize("what", ["put", "part", "get", "fetch", "list"])
def test_a_server_that_never_answers_is_unavailable(bucket: Bucket, faults: Faults, what: str) -> None:
    there = shaky(bucket, faults, read_timeout=0.1, retries={"mode": "standard", "total_max_attempts": 1})
    method, path, call = REQUESTS[what]
    faults.add(Rule("hang", method, path, seconds=10))
    began = time.monotonic()
    with pytest.raises(TierUnavailable, match="Timeout"):
        call(there)
    assert time.monotonic() - began < 10


@pytest.mark.s3
@pytest.mark.usefixtures("old", "no_pauses")
def test_when_one_piece_fails_the_others_are_not_asked_for(bucket: Bucket, faults: Faults, monkeypatch) -> None:
    monkeypatch.setattr(transfer, "PART", len(SMALL) // 30)
    monkeypatch.setattr(transfer, "MEMORY", len(SMALL) // 15)
    faults.add(Rule("status", "GET", "/old", status=403, code="AccessDenied"))
    with pytest.raises(TierDenied, match="AccessDenied"):
        fetched(shaky(bucket, faults), "old", len(SMALL))
    assert len(faults.requests) < 10


@pytest.mark.s3
@pytest.mark.usefixtures("old", "no_pauses")
def test_a_flipped_bit_in_an_object_of_one_part_is_noticed_and_asked_for_again(bucket: Bucket, faults: Faults) -> None:
    rule = faults.add(Rule("corrupt", "GET", "/old", times=1, after_bytes=MIB + 5))
    assert shaky(bucket, faults).get("old") == SMALL
    assert rule.hits == 1


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize("read", [lambda there: there.get("a"), lambda there: fetched(there, "a", len(CONTENT))])
def test_a_flipped_bit_in_an_object_of_several_parts_is_for_the_digests_of_the_layer_above(
    bucket: Bucket, faults: Faults, read: Callable[[Objects], bytes]
) -> None:
    """S3 gives no checksum to check a part or a range by: what comes has the right size, and one wrong bit."""
    there = shaky(bucket, faults)
    put(there, "a", CONTENT)
    faults.add(Rule("corrupt", "GET", "/a", times=1, after_bytes=5000))
    content = read(there)
    assert len(content) == len(CONTENT)
    assert (int.from_bytes(content, "big") ^ int.from_bytes(CONTENT, "big")).bit_count() == 1


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_dies_in_a_put_is_unavailable_and_the_next_put_works(s3_server: S3Server, bucket: Bucket) -> None:
    there = open_objects(bucket.url, bucket.storage_options)
    put(there, "before", CONTENT)

    def read(start: int, length: int) -> bytes:
        if start == PART:
            s3_server.kill()
        return CONTENT[start : start + length]

    try:
        with pytest.raises(TierUnavailable):
            there.put("a", read, len(CONTENT), digest(CONTENT))
        with pytest.raises(TierUnavailable):
            there.stat("before")
    finally:
        s3_server.start()
    assert list(there.entries()) == [("before", len(CONTENT))]
    assert there.sweep(bool) == 1
    put(there, "a", CONTENT)
    assert there.get("a") == there.get("before") == CONTENT


# -- who may not ------------------------------------------------------------------------------------------------------

ANY_CALL: dict[str, Callable[[Objects], object]] = {
    "put": lambda there: put(there, "new", b"1"),
    "put parts": lambda there: put(there, "new", CONTENT),
    "get": lambda there: there.get("old"),
    "fetch": lambda there: fetched(there, "old", 10),
    "list": keys,
    "folders": lambda there: there.folders(),
    "delete": lambda there: there.delete(["old"]),
    "sweep": lambda there: there.sweep(bool),
}


@pytest.mark.s3
@pytest.mark.parametrize("call", ANY_CALL)
def test_a_bucket_that_is_not_there_is_denied_by_name(bucket: Bucket, call: str) -> None:
    there = open_objects("s3://no-such-bucket/run", bucket.storage_options)
    with pytest.raises(TierDenied, match="no-such-bucket"):
        ANY_CALL[call](there)


def check_keeps(secret: str, error: BaseException) -> None:
    """An error, and what is printed of it, does not tell a secret."""
    texts = (str(error), repr(error), repr(vars(error)), "".join(traceback.format_exception(error)))
    assert not [text for text in texts if secret in text]


SECRETS = {"secret": "open/sesame+wrong", "token": "wrong/token+sesame"}


@pytest.mark.s3
@pytest.mark.parametrize("call", [*ANY_CALL, "stat"])
@pytest.mark.parametrize("wrong", SECRETS)
def test_wrong_credentials_are_denied_and_not_repeated(bucket: Bucket, call: str, wrong: str) -> None:
    there = open_objects(bucket.url, bucket.storage_options | {wrong: SECRETS[wrong]})
    with pytest.raises(TierDenied) as raised:
        (ANY_CALL | {"stat": lambda there: there.stat("old")})[call](there)
    assert bucket.name in str(raised.value)
    for secret in (*SECRETS.values(), bucket.storage_options["secret"]):
        check_keeps(secret, raised.value)


@pytest.mark.s3
@pytest.mark.usefixtures("no_pauses")
@pytest.mark.parametrize(
    ("kind", "other"),
    [("status", {}), ("reset_before", {}), ("status", THROUGH_S3FS)],  # s3fs tries for 26 s after a reset
)
def test_no_error_repeats_a_secret(bucket: Bucket, faults: Faults, kind: Any, other: dict[str, Any]) -> None:
    there = open_objects(bucket.url, faults.storage_options | SECRETS | other)
    faults.add(Rule(kind, status=403, code="AccessDenied"))
    with pytest.raises(TierDenied if kind == "status" else TierUnavailable) as raised:
        put(there, "new", b"1")
    for secret in SECRETS.values():
        check_keeps(secret, raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://someone:sesame@bucket/run",
        "s3://someone:sesame@/run",
        "nosuch://someone:sesame@host/run",
        "ftp://someone:sesame@127.0.0.1:1/run",
    ],
)
@pytest.mark.usefixtures("no_pauses")
def test_a_secret_in_a_url_is_not_repeated(url: str) -> None:
    options = {"endpoint_url": "http://127.0.0.1:1"} if url.startswith("s3") else {}
    with pytest.raises((SetupError, TierUnavailable)) as raised:
        open_objects(url, options).stat("a")
    check_keeps("sesame", raised.value)


class Expiring:
    """A client whose credentials end after some calls."""

    def __init__(self, client: Any, calls: int, code: str = "ExpiredToken") -> None:
        self._client = client
        self._left = calls
        self._code = code

    def __getattr__(self, operation: str) -> Any:
        def call(**arguments: Any) -> Any:
            if self._left == 0:
                raise ClientError({"Error": {"Code": self._code, "Message": "over"}}, operation)
            self._left -= 1
            return getattr(self._client, operation)(**arguments)

        return call


@pytest.fixture
def rotating(bucket: Bucket, monkeypatch) -> Callable[..., Objects]:
    """Objects whose first clients are good for so many calls, and whose last is good for ever."""

    def make(*calls: int, code: str = "ExpiredToken") -> Objects:
        there = open_objects(bucket.url, bucket.storage_options)
        clients = [Expiring(bucket.client, count, code) for count in calls]
        monkeypatch.setattr(there, "_make_client", lambda: clients.pop(0) if clients else bucket.client)
        return there

    return make


@pytest.mark.s3
@pytest.mark.parametrize("calls", [0, 1, 2, 3])
def test_credentials_that_expire_are_asked_for_anew(rotating: Callable[..., Objects], calls: int) -> None:
    put(rotating(), "old", SMALL)
    there = rotating(calls)
    put(there, "new", CONTENT)
    assert fetched(there, "new", len(CONTENT)) == CONTENT
    assert keys(rotating(0)) == ["new", "old"]
    rotating(0).delete(["new"])
    assert rotating(0).stat("new") is None


@pytest.mark.s3
def test_credentials_that_expire_are_asked_for_anew_where_a_head_says_no_more_than_400(
    rotating: Callable[..., Objects],
) -> None:
    """An answer to HEAD has no body, so that S3 has nowhere to write ExpiredToken."""
    put(rotating(), "old", SMALL)
    assert rotating(0, code="400").stat("old") == Stat(len(SMALL), digest(SMALL))


@pytest.mark.s3
def test_credentials_that_are_expired_again_at_once_are_denied(rotating: Callable[..., Objects]) -> None:
    with pytest.raises(TierDenied, match="ExpiredToken"):
        rotating(0, 0, 0).get("a")


@pytest.mark.s3
@pytest.mark.parametrize(("code", "kind"), [("AccessDenied", TierDenied), ("InternalError", TierUnavailable)])
def test_an_object_that_may_not_be_deleted_is_an_error(bucket: Bucket, monkeypatch, code: str, kind: type) -> None:
    there = open_objects(bucket.url, bucket.storage_options)

    def refuse(parsed: dict[str, Any], **_: Any) -> None:
        parsed["Errors"] = [{"Key": "run/a", "Code": code}, {"Key": "run/b", "Code": "NoSuchKey"}]

    there._client().meta.events.register("after-call.s3.DeleteObjects", refuse)
    with pytest.raises(kind, match=code):
        there.delete(["a", "b"])
