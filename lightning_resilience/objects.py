"""Objects behind a URL: put, get, list and delete, each whole and checked, or an error.

Two implementations of one small protocol.  ``S3Objects`` talks to S3 and everything that speaks like it through
botocore, which s3fs brings: its parts go up and its ranges come down on several threads, which no way through s3fs
does as fast.  ``FsspecObjects`` reaches any other URL that fsspec knows.

Errors are told apart by what can be done about them: ``TierDenied`` (credentials, permissions, no such bucket),
``FileNotFoundError``, and ``TierUnavailable`` for everything that may go away by itself, which ``Patience`` waits for.
No message, name or URL here carries a credential.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

import xxhash

from lightning_resilience.errors import CheckpointCorrupt, ResilienceError, SetupError, TierDenied, TierUnavailable

T = TypeVar("T")

PART = 32 * 2**20
"""Bytes sent or fetched by one request."""
MEMORY = 128 * 2**20
"""Bytes of parts that are under way at once; a part that is sent is held twice for a moment."""
MOST_PARTS = 9000
"""Parts of one object; S3 allows 10,000."""
DIGEST = "xxh3-128"
"""Name under which an object's digest is kept beside it, where the store has room for that."""

Read = Callable[[int, int], bytes]
"""Gives ``length`` bytes from ``start``."""


@dataclass(frozen=True)
class Stat:
    """What a store says of an object: its ``size`` in bytes, and the ``digest`` it was put with, where it kept that."""

    size: int
    digest: str | None = None


class Objects(Protocol):
    """A place for objects.  Keys are relative to ``url``, with slashes."""

    url: str

    def put(self, key: str, read: Read, size: int, digest: str) -> None:
        """Store an object; on return it is whole.

        Args:
            key: its name.
            read: its content, asked for from start to end.
            size: bytes.
            digest: xxh3_128 that the content must turn out to have.

        Raises:
            CheckpointCorrupt: the content has another digest; nothing is stored then.
        """

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        """Content of an object, or a part of it; FileNotFoundError where there is none."""

    def fetch(self, key: str, size: int, write: Callable[[int, bytes], object]) -> None:
        """All of an object, in pieces that come in any order: ``write(start, piece)``, from several threads."""

    def stat(self, key: str) -> Stat | None:
        """What is known of an object; None where there is none.  Never from a cache."""

    def entries(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Key and size of every object whose key starts with ``prefix``.  Never from a cache."""

    def folders(self) -> list[str]:
        """First components of all keys that have more than one."""

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects; those that are gone already are fine."""

    def sweep(self) -> int:
        """Give up uploads that a killed process of this run began and never ended; how many."""


def open_objects(url: str, options: Mapping[str, Any] | None = None) -> Objects:
    """The place behind a URL.

    Args:
        url: ``s3://bucket/folder``, or any that fsspec knows.
        options: ``storage_options``, by the names that fsspec's implementation has for them.

    Raises:
        SetupError: the URL cannot be one, or a package is missing for it.
    """
    options = dict(options or {})
    parts = urlsplit(url)
    if parts.scheme in ("s3", "s3a") and options.keys() <= S3Objects.OPTIONS:
        if not parts.netloc:
            raise SetupError(f"{url!r} names no bucket.", hint="Use s3://bucket/folder.")
        try:
            import botocore.session  # noqa: F401
        except ImportError as error:
            raise SetupError(f"{url!r} needs s3fs: {error}.", hint="pip install s3fs") from error
        return S3Objects(parts.netloc, parts.path.strip("/"), options)
    return FsspecObjects(url, options)


# -- patience ---------------------------------------------------------------------------------------------------------


@dataclass
class Patience:
    """Tries again what may go away by itself, with pauses that grow and vary.

    Args:
        attempts: how often at most.
        first: seconds of the longest first pause; the longest doubles with each attempt.
        longest: seconds that no pause exceeds.
        stop: ends a pause, and with it the patience.
    """

    attempts: int = 6
    first: float = 0.5
    longest: float = 30.0
    stop: threading.Event | None = None

    def __call__(self, call: Callable[[], T]) -> T:
        """What ``call`` returns, once it does.

        Raises:
            TierUnavailable: it failed for the last time, or ``stop`` was set.
        """
        for attempt in range(1, self.attempts + 1):
            try:
                return call()
            except TierUnavailable:
                pause = random.uniform(0, min(self.longest, self.first * 2 ** (attempt - 1)))
                if attempt == self.attempts or self.pause(pause):
                    raise
        raise AssertionError("unreachable")

    def pause(self, seconds: float) -> bool:
        """Wait; whether that was ended by ``stop``."""
        if self.stop is None:
            time.sleep(seconds)
            return False
        return self.stop.wait(seconds)


class _Checked:
    """Reads content in order and makes sure, at the end, that it is what was meant."""

    def __init__(self, key: str, read: Read, digest: str) -> None:
        self._key = key
        self._read = read
        self._wanted = digest
        self._state = xxhash.xxh3_128()

    def __call__(self, start: int, length: int) -> bytes:
        data = self._read(start, length)
        if len(data) != length:
            raise CheckpointCorrupt(f"{self._key} is shorter than it was.", problems=(f"{self._key}: truncated",))
        self._state.update(data)
        return data

    def check(self) -> None:
        if self._state.hexdigest() != self._wanted:
            raise CheckpointCorrupt(
                f"{self._key} has other content than was saved, so it is not sent on.",
                problems=(f"{self._key}: digest differs",),
            )


def _parts(size: int) -> tuple[int, int]:
    """Bytes of a part, and how many may be under way."""
    part = max(PART, -(-size // MOST_PARTS))
    return part, max(1, MEMORY // part)


def _check_size(key: str, found: Stat | None, size: int) -> None:
    if found is None or found.size != size:
        has = "is not there" if found is None else f"has {found.size:,} bytes of {size:,}"
        raise TierUnavailable(f"{key} was sent, and {has}.")


# -- S3 ---------------------------------------------------------------------------------------------------------------


class S3Objects:
    """Objects in an S3 bucket, through botocore.

    Args:
        bucket: its name.
        prefix: what all keys begin with.
        options: by s3fs's names.
    """

    OPTIONS = frozenset(
        {
            *("key", "secret", "token", "profile", "anon", "endpoint_url", "use_ssl", "client_kwargs"),
            *("config_kwargs", "s3_additional_kwargs", "requester_pays"),
        }
    )

    def __init__(self, bucket: str, prefix: str, options: Mapping[str, Any]) -> None:
        self.bucket = bucket
        self.prefix = f"{prefix}/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}".rstrip("/")
        self._options = dict(options)
        self._extra = {**self._options.get("s3_additional_kwargs", {})}
        if self._options.get("requester_pays"):
            self._extra["RequestPayer"] = "requester"
        self._lock = threading.Lock()
        self._made: tuple[int, Any] | None = None

    # -- the client ---------------------------------------------------------------------------------------------------

    def _client(self) -> Any:
        """One for this process: connections do not survive a fork."""
        with self._lock:
            if self._made is None or self._made[0] != os.getpid():
                self._made = (os.getpid(), self._make_client())
            return self._made[1]

    def _make_client(self) -> Any:
        import botocore
        from botocore.config import Config
        from botocore.session import Session

        options = self._options
        settings: dict[str, Any] = {
            "max_pool_connections": 32,
            "retries": {"mode": "standard", "max_attempts": 4},
            "connect_timeout": 10,
            "read_timeout": 60,
            # Each part carries a CRC-32 that the store checks; signing its content too would hash it once more.
            "s3": {"payload_signing_enabled": False},
        }
        settings |= options.get("config_kwargs", {})
        if options.get("anon"):
            settings["signature_version"] = botocore.UNSIGNED
        named = {
            "aws_access_key_id": options.get("key"),
            "aws_secret_access_key": options.get("secret"),
            "aws_session_token": options.get("token"),
            "endpoint_url": options.get("endpoint_url"),
            "use_ssl": options.get("use_ssl"),
        }
        arguments = {name: value for name, value in named.items() if value is not None}
        arguments |= options.get("client_kwargs", {})
        return Session(profile=options.get("profile")).create_client("s3", config=Config(**settings), **arguments)

    def _call(self, operation: str, **arguments: Any) -> Any:
        """One request; with fresh credentials where those in hand are not taken any more."""
        for fresh in (False, True):
            try:
                return getattr(self._client(), operation)(Bucket=self.bucket, **arguments)
            except Exception as error:
                if not fresh and _code(error) in _STALE:
                    with self._lock:
                        self._made = None
                    continue
                raise self._translated(error, operation, arguments.get("Key", "")) from None
        raise AssertionError("unreachable")

    def _translated(self, error: Exception, operation: str, key: str) -> Exception:
        """The same failure by what can be done about it, without what may be secret in it."""
        code = _code(error)
        what = f"{operation} of {self.url}{'/' + key.removeprefix(self.prefix) if key else ''}: {code}"
        if code in ("NoSuchKey", "404", "NotFound"):
            return FileNotFoundError(f"{what}.")
        if code == "NoSuchBucket":
            return TierDenied(f"There is no bucket {self.bucket!r} ({what}).", hint="Check remote= and its endpoint.")
        if code in _DENIED:
            return TierDenied(f"{what}.", hint="Check the credentials, and what they may do in that bucket.")
        if code == "RequestTimeTooSkewed":
            return TierUnavailable(f"{what}: the clock of this machine is wrong.", hint="Set it (NTP).")
        if code in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"):
            return TierDenied(f"{what}.", hint="Give storage_options, or the environment that boto looks into.")
        if code in ("ParamValidationError", "InvalidBucketName", "InvalidRegionError", "ValueError", "NoRegionError"):
            return SetupError(f"{what}.", hint="Check remote= and storage_options=.")
        return TierUnavailable(f"{what}.")

    # -- writing ------------------------------------------------------------------------------------------------------

    def put(self, key: str, read: Read, size: int, digest: str) -> None:
        content = _Checked(key, read, digest)
        describe = {"Metadata": {DIGEST: digest}, **self._extra}
        part, most = _parts(size)
        if size <= part:
            data = content(0, size)
            content.check()
            self._call("put_object", Key=self.prefix + key, Body=data, **describe)
        else:
            self._put_parts(key, content, size, part, most, describe)
        _check_size(key, self.stat(key), size)

    def _put_parts(
        self, key: str, content: _Checked, size: int, part: int, most: int, describe: Mapping[str, Any]
    ) -> None:
        full = self.prefix + key
        upload = self._call("create_multipart_upload", Key=full, **describe)["UploadId"]
        try:
            sent = self._send_parts(full, upload, content, size, part, most)
            content.check()
            self._complete(key, upload, sent, size, describe["Metadata"][DIGEST])
        except BaseException:
            with suppress(ResilienceError, FileNotFoundError):
                self._call("abort_multipart_upload", Key=full, UploadId=upload)
            raise

    def _send_parts(
        self, full: str, upload: str, content: _Checked, size: int, part: int, most: int
    ) -> list[dict[str, Any]]:
        room = threading.Semaphore(most)

        def send(number: int, data: bytes) -> dict[str, Any]:
            try:
                answer = self._call("upload_part", Key=full, UploadId=upload, PartNumber=number, Body=data)
            finally:
                room.release()
            checks = {name: answer[name] for name in _CHECKSUMS if name in answer}
            return {"PartNumber": number, "ETag": answer["ETag"], **checks}

        with ThreadPoolExecutor(most, "resilience-send") as pool:
            under_way: list[Future[dict[str, Any]]] = []
            for number, start in enumerate(range(0, size, part), start=1):
                room.acquire()
                if any(done.done() and done.exception() for done in under_way):
                    room.release()
                    break
                under_way.append(pool.submit(send, number, content(start, min(part, size - start))))
            return [done.result() for done in under_way]

    def _complete(self, key: str, upload: str, sent: list[dict[str, Any]], size: int, digest: str) -> None:
        try:
            self._call(
                "complete_multipart_upload",
                Key=self.prefix + key,
                UploadId=upload,
                MultipartUpload={"Parts": sent},
            )
        except FileNotFoundError:
            raise
        except TierUnavailable:
            # Its answer may have been lost on the way: then the object is there.
            if self.stat(key) != Stat(size, digest):
                raise

    def delete(self, keys: Iterable[str]) -> None:
        for some in _batches(keys, 1000):
            objects = [{"Key": self.prefix + key} for key in some]
            answer = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for failure in answer.get("Errors", ()):
                if failure.get("Code") not in ("NoSuchKey", "404"):
                    raise TierUnavailable(f"{self.url}: an object could not be deleted: {failure.get('Code')}.")

    def sweep(self) -> int:
        answer = self._call("list_multipart_uploads", Prefix=self.prefix)
        uploads = answer.get("Uploads", [])
        for upload in uploads:
            with suppress(FileNotFoundError, TierUnavailable):
                self._call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
        return len(uploads)

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        pieces: list[bytes] = []
        self._read(key, start, stop, lambda _, piece: pieces.append(piece))
        return b"".join(pieces)

    def fetch(self, key: str, size: int, write: Callable[[int, bytes], object]) -> None:
        part, most = _parts(size)
        starts = range(0, size, part)
        with ThreadPoolExecutor(min(most, len(starts) or 1), "resilience-fetch") as pool:
            for done in [pool.submit(self._read, key, at, min(at + part, size), write) for at in starts]:
                done.result()

    def _read(self, key: str, start: int, stop: int | None, write: Callable[[int, bytes], object]) -> None:
        """One range, in pieces; what is missing after an interruption is asked for again."""
        at = start

        def rest() -> None:
            nonlocal at
            wanted = (
                {} if start == 0 and stop is None and at == 0 else {"Range": f"bytes={at}-{stop - 1 if stop else ''}"}
            )
            if stop is not None and at >= stop:
                return
            extra = {name: value for name, value in self._extra.items() if name in _FOR_READING}
            answer = self._call("get_object", Key=self.prefix + key, **wanted, **extra)
            length = answer["ContentLength"]
            body = answer["Body"]
            begin = at
            try:
                while piece := body.read(2**20):
                    write(at, piece)
                    at += len(piece)
            except Exception as error:
                raise self._translated(error, "get_object", self.prefix + key) from None
            finally:
                body.close()
            if at - begin != length:
                raise TierUnavailable(f"{self.url}/{key}: {at - begin:,} bytes came of {length:,}.")

        Patience(attempts=5, first=0.2)(rest)

    def stat(self, key: str) -> Stat | None:
        extra = {name: value for name, value in self._extra.items() if name in _FOR_READING}
        try:
            answer = self._call("head_object", Key=self.prefix + key, **extra)
        except FileNotFoundError:
            return None
        return Stat(answer["ContentLength"], answer.get("Metadata", {}).get(DIGEST))

    def entries(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        for page in self._pages(Prefix=self.prefix + prefix):
            for entry in page.get("Contents", ()):
                yield entry["Key"].removeprefix(self.prefix), entry["Size"]

    def folders(self) -> list[str]:
        pages = self._pages(Prefix=self.prefix, Delimiter="/")
        found = [entry["Prefix"] for page in pages for entry in page.get("CommonPrefixes", ())]
        return [name.removeprefix(self.prefix).rstrip("/") for name in found]

    def _pages(self, **arguments: Any) -> Iterator[Any]:
        token: dict[str, str] = {}
        while True:
            page = self._call("list_objects_v2", **arguments, **token)
            yield page
            if not page.get("IsTruncated"):
                return
            token = {"ContinuationToken": page["NextContinuationToken"]}


_STALE = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidAccessKeyId", "InvalidToken", "TokenRefreshRequired"}
)
_DENIED = _STALE | {"AccessDenied", "AllAccessDisabled", "AccountProblem", "SignatureDoesNotMatch", "403", "401"}
_CHECKSUMS = ("ChecksumCRC32", "ChecksumCRC32C", "ChecksumCRC64NVME", "ChecksumSHA1", "ChecksumSHA256")
_FOR_READING = ("RequestPayer", "SSECustomerAlgorithm", "SSECustomerKey", "SSECustomerKeyMD5", "ExpectedBucketOwner")


def _code(error: Exception) -> str:
    """What kind of failure this is: S3's word for it, or the exception's name."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", "")) or type(error).__name__
    return type(error).__name__


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    batch: list[T] = []
    for item in items:
        batch.append(item)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch


# -- fsspec -----------------------------------------------------------------------------------------------------------


class FsspecObjects:
    """Objects behind any URL that fsspec knows.

    Args:
        url: of the folder.
        options: handed to fsspec.

    Raises:
        SetupError: fsspec does not know the protocol, or a package for it is missing.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        import fsspec

        self.url = _without_secrets(url).rstrip("/")
        uncached = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **{**uncached, **options})
        except (ImportError, ValueError, TypeError) as error:
            raise SetupError(f"{self.url!r} cannot be used: {type(error).__name__}: {error}.") from error
        self._root = str(root).rstrip("/")
        self._is_local = "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except (FileNotFoundError, ResilienceError):
            raise
        except PermissionError as error:
            raise TierDenied(f"{what} of {self.url}: {type(error).__name__}.", hint="Check the credentials.") from None
        except Exception as error:
            raise TierUnavailable(f"{what} of {self.url}: {type(error).__name__}: {_first_words(error)}.") from None

    def put(self, key: str, read: Read, size: int, digest: str) -> None:
        content, path = _Checked(key, read, digest), self._path(key)
        part, _ = _parts(size)

        def write() -> None:
            with suppress(NotImplementedError):
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            if size <= part:
                data = content(0, size)
                content.check()
                self._fs.pipe_file(path, data)
                return
            with self._fs.open(path, "wb", block_size=part) as stream:
                for start in range(0, size, part):
                    stream.write(content(start, min(part, size - start)))
            try:
                content.check()
            except CheckpointCorrupt:
                self._fs.rm_file(path)
                raise

        self._call("put", write)
        if self._is_local:
            self._call("sync", lambda: _sync(path))
        _check_size(key, self.stat(key), size)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data: bytes = self._call("get", lambda: self._fs.cat_file(self._path(key), start=start or None, end=stop))
        return data

    def fetch(self, key: str, size: int, write: Callable[[int, bytes], object]) -> None:
        part, most = _parts(size)

        def piece(start: int) -> None:
            stop = min(start + part, size)
            data = Patience(attempts=5, first=0.2)(lambda: self.get(key, start, stop))
            if len(data) != stop - start:
                raise TierUnavailable(f"{self.url}/{key}: {len(data):,} bytes came of {stop - start:,}.")
            write(start, data)

        starts = range(0, size, part)
        with ThreadPoolExecutor(min(most, len(starts) or 1), "resilience-fetch") as pool:
            for done in [pool.submit(piece, start) for start in starts]:
                done.result()

    def stat(self, key: str) -> Stat | None:
        self._fs.invalidate_cache()
        try:
            found = self._call("stat", lambda: self._fs.info(self._path(key)))
        except FileNotFoundError:
            return None
        return Stat(int(found["size"])) if found.get("type") != "directory" else None

    def entries(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        self._fs.invalidate_cache()
        folder = self._path(prefix.rpartition("/")[0])
        try:
            found = self._call("list", lambda: self._fs.find(folder, detail=True))
        except FileNotFoundError:
            return
        for path, info in sorted(found.items()):
            key = self._key(path)
            if key.startswith(prefix):
                yield key, int(info["size"] or 0)

    def folders(self) -> list[str]:
        self._fs.invalidate_cache()
        try:
            found = self._call("list", lambda: self._fs.ls(self._root, detail=True))
        except FileNotFoundError:
            return []
        return sorted(self._key(entry["name"]) for entry in found if entry["type"] == "directory")

    def _key(self, path: str) -> str:
        """A key from a path as fsspec gives it, with or without the protocol."""
        stripped = str(self._fs._strip_protocol(path))
        return stripped.removeprefix(self._root).strip("/")

    def delete(self, keys: Iterable[str]) -> None:
        folders = set()
        for key in keys:
            folders.add(key.rpartition("/")[0])
            with suppress(FileNotFoundError):
                self._call("delete", lambda key=key: self._fs.rm_file(self._path(key)))  # type: ignore[misc]
        for folder in sorted(filter(None, folders), key=len, reverse=True):
            with suppress(Exception):  # an empty folder is no object; stores without folders have none
                self._fs.rmdir(self._path(folder))

    def sweep(self) -> int:
        return 0


def _sync(path: str) -> None:
    """Have a local file, and its name, survive power loss."""
    for each in (path, os.path.dirname(path), os.path.dirname(os.path.dirname(path))):
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def _without_secrets(url: str) -> str:
    """A URL without user, password and query."""
    return re.sub(r"//[^/@]*@", "//", url.partition("?")[0])


def _first_words(error: Exception) -> str:
    """The beginning of a message, where stores say what is wrong and not yet with which request."""
    return _without_secrets(str(error).splitlines()[0][:120] if str(error) else "")
