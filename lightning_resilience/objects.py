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
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

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

LOCAL = ("file", "local")
"""Protocols of folders on this machine."""
UNFINISHED = ".put-"
"""Begins the names of the files of a folder that are not whole yet."""
ABANDONED = 3600
"""Seconds without a write after which nobody is at such a file any more."""

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

    def sweep(self, ours: Callable[[str], bool]) -> int:
        """Give up uploads that a killed process began and never ended; how many.

        Args:
            ours: whether a key is one that this package gives; what is others' is left alone.
        """


def open_objects(url: str, options: Mapping[str, Any] | None = None) -> Objects:
    """The place behind a URL.

    Args:
        url: ``s3://bucket/folder``, or any that fsspec knows.
        options: ``storage_options``, by the names that fsspec's implementation has for them.

    Raises:
        SetupError: the URL cannot be one, or a package is missing for it.
    """
    options = dict(options or {})
    check_url(url)
    for name in ("client_kwargs", "config_kwargs", "s3_additional_kwargs"):
        if name in options and not isinstance(options[name], Mapping):
            raise SetupError(f"storage_options[{name!r}] of type {type(options[name]).__name__}: a dict is wanted.")
    scheme, _, rest = url.partition("://")
    if scheme in ("s3", "s3a") and "@" in rest.partition("/")[0]:
        raise SetupError(f"{shown(url)!r}: credentials are not taken from a URL.", hint="Give storage_options=.")
    if scheme in ("s3", "s3a") and options.keys() <= S3Objects.OPTIONS:
        bucket, _, prefix = rest.partition("/")
        if not bucket:
            raise SetupError(f"{shown(url)!r} names no bucket.", hint="Use s3://bucket/folder.")
        try:
            import botocore.session  # noqa: F401
        except ImportError as error:
            raise SetupError(f"{shown(url)!r} needs s3fs: {error}.", hint="pip install s3fs") from error
        return S3Objects(bucket, prefix.strip("/"), options)
    return FsspecObjects(url, options)


def check_url(url: str) -> None:
    """Raise SetupError where a URL names no place, or one that depends on the working directory."""
    scheme, mark, rest = url.partition("://")
    if not mark:
        return
    if not scheme:
        raise SetupError(f"{shown(url)!r} has no protocol.", hint="Use 's3://bucket/folder' or 'file:///path'.")
    if scheme in LOCAL and not rest.startswith("/"):
        raise SetupError(f"{url!r} is not an absolute path.", hint=f"Use {scheme}:///path, with three slashes.")
    if scheme not in LOCAL and not rest.strip("/"):
        what = "bucket" if scheme in ("s3", "s3a") else "bucket or folder"
        raise SetupError(f"{shown(url)!r} names no {what}.", hint=f"Use {scheme}://bucket/folder.")


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


class _OfTheCaller(Exception):  # it carries an error rather than being one
    """What a caller's own ``read`` or ``write`` raised: not a failure of the store, and not to be tried again."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(str(error))
        self.error = error


class _Checked:
    """Reads content in order and makes sure, at the end, that it is what was meant."""

    def __init__(self, key: str, read: Read, digest: str) -> None:
        self._key = key
        self._read = read
        self._wanted = digest
        self._state = xxhash.xxh3_128()

    def __call__(self, start: int, length: int) -> bytes:
        try:
            data = self._read(start, length)
        except Exception as error:
            raise _OfTheCaller(error) from error
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


def _handing(write: Callable[[int, bytes], object]) -> Callable[[int, bytes], None]:
    """``write``, whose errors stay its own."""

    def hand(start: int, piece: bytes) -> None:
        try:
            write(start, piece)
        except Exception as error:
            raise _OfTheCaller(error) from error

    return hand


@contextmanager
def _callers_errors() -> Iterator[None]:
    """Let the caller see what its own code raised."""
    try:
        yield
    except _OfTheCaller as wrapped:
        raise wrapped.error from None


def _all(pool: ThreadPoolExecutor, calls: Iterable[Callable[[], T]]) -> list[T]:
    """What each call returns; once one fails, those that have not begun are left out."""
    futures = [pool.submit(call) for call in calls]
    try:
        return [future.result() for future in futures]
    except BaseException:
        for future in futures:
            future.cancel()
        raise


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
        self._everywhere = self._of(_EVERYWHERE)
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
            client = None
            try:
                client = self._client()
                return getattr(client, operation)(Bucket=self.bucket, **self._everywhere, **arguments)
            except Exception as error:
                # The answer to HEAD has no body, so it does not say what is wrong.
                unsaid = operation == "head_object" and _code(error) == "400"
                if not fresh and (unsaid or _code(error) in _STALE):
                    with self._lock:
                        if self._made is not None and self._made[1] is client:  # not another thread's new one
                            self._made = None
                    continue
                raise self._translated(error, operation, arguments.get("Key", "")) from None
        raise AssertionError("unreachable")

    def _translated(self, error: Exception, operation: str, key: str) -> Exception:
        """The same failure by what can be done about it, without what may be secret in it."""
        code = _code(error)
        what = f"{operation} of {self.url}{'/' + key.removeprefix(self.prefix) if key else ''}: {code}"
        if code in ("NoSuchKey", "404", "NotFound") and operation in ("get_object", "head_object"):
            return FileNotFoundError(f"{what}.")
        if code == "NoSuchBucket":
            return TierDenied(f"There is no bucket {self.bucket!r} ({what}).", hint="Check remote= and its endpoint.")
        if code in _DENIED:
            return TierDenied(f"{what}.", hint="Check the credentials, and what they may do in that bucket.")
        if code == "RequestTimeTooSkewed":
            return TierUnavailable(f"{what}: the clock of this machine is wrong.", hint="Set it (NTP).")
        if code in ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError"):
            return TierDenied(f"{what}.", hint="Give storage_options, or the environment that boto looks into.")
        if code in (
            "TypeError",
            "ParamValidationError",
            "InvalidBucketName",
            "InvalidRegionError",
            "ValueError",
            "NoRegionError",
        ):
            said = f" ({_first_words(error)})" if code in ("TypeError", "ValueError") else ""
            return SetupError(f"{what}{said}.", hint="Check remote= and storage_options=.")
        return TierUnavailable(f"{what}.")

    def _of(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of the additional arguments that a request takes."""
        return {name: self._extra[name] for name in names if name in self._extra}

    # -- writing ------------------------------------------------------------------------------------------------------

    def put(self, key: str, read: Read, size: int, digest: str) -> None:
        content = _Checked(key, read, digest)
        own = {name: value for name, value in self._extra.items() if name not in _EVERYWHERE}
        describe = {**own, "Metadata": {**own.get("Metadata", {}), DIGEST: digest}}
        part, most = _parts(size)
        with _callers_errors():
            if size <= part:
                data = content(0, size)
                content.check()
                self._call("put_object", Key=self.prefix + key, Body=data, **describe, **_CHECKED)
            else:
                self._put_parts(key, content, size, part, most, describe)
        _check_size(key, self.stat(key), size)

    def _put_parts(
        self, key: str, content: _Checked, size: int, part: int, most: int, describe: Mapping[str, Any]
    ) -> None:
        full = self.prefix + key
        upload = self._call("create_multipart_upload", Key=full, **describe, **_CHECKED)["UploadId"]
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
                own = {**self._of(_CUSTOMERS_KEY), **_CHECKED}
                answer = self._call("upload_part", Key=full, UploadId=upload, PartNumber=number, Body=data, **own)
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
                **self._of(_CUSTOMERS_KEY),
            )
        except TierUnavailable:
            # Its answer may have been lost on the way: then the object is there.
            if self.stat(key) != Stat(size, digest):
                raise

    def delete(self, keys: Iterable[str]) -> None:
        for some in _batches(keys, 1000):
            objects = [{"Key": self.prefix + key} for key in some]
            answer = self._call("delete_objects", Delete={"Objects": objects, "Quiet": True})
            for failure in answer.get("Errors", ()):
                code = failure.get("Code")
                if code in _DENIED:
                    raise TierDenied(
                        f"{self.url}: an object may not be deleted: {code}.", hint="Allow s3:DeleteObject."
                    )
                if code not in ("NoSuchKey", "404"):
                    raise TierUnavailable(f"{self.url}: an object could not be deleted: {code}.")

    def sweep(self, ours: Callable[[str], bool]) -> int:
        seen: set[str] = set()
        given_up = 0
        start: dict[str, str] = {}
        while True:  # until the first page has nothing new: not every store says truly where the next begins
            page = self._call("list_multipart_uploads", Prefix=self.prefix, **start)
            uploads = [one for one in page.get("Uploads", []) if one["UploadId"] not in seen]
            if not uploads and not start:
                return given_up
            for upload in uploads:
                seen.add(upload["UploadId"])
                if not ours(upload["Key"].removeprefix(self.prefix)):
                    continue
                given_up += 1
                with suppress(FileNotFoundError, TierUnavailable):
                    self._call("abort_multipart_upload", Key=upload["Key"], UploadId=upload["UploadId"])
            markers = ("KeyMarker", "UploadIdMarker")  # SeaweedFS orders by the second alone
            start = {name: page[f"Next{name}"] for name in markers if page.get(f"Next{name}")} if uploads else {}

    # -- reading ------------------------------------------------------------------------------------------------------

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        pieces: dict[int, bytes] = {}
        self._read(key, start, stop, pieces.__setitem__)
        return b"".join(pieces[at] for at in sorted(pieces))

    def fetch(self, key: str, size: int, write: Callable[[int, bytes], object]) -> None:
        part, most = _parts(size)
        hand, starts = _handing(write), range(0, size, part)

        def piece(start: int) -> None:
            stop = min(start + part, size)
            if (end := self._read(key, start, stop, hand)) != stop:
                raise TierUnavailable(f"{self.url}/{key} ends after {end:,} bytes of {size:,}.")

        with _callers_errors(), ThreadPoolExecutor(min(most, len(starts) or 1), "resilience-fetch") as pool:
            _all(pool, [partial(piece, start) for start in starts])

    def _read(self, key: str, start: int, stop: int | None, write: Callable[[int, bytes], object]) -> int:
        """One range, in pieces; what is missing after an interruption is asked for again; where it ended."""
        at = start

        def rest() -> None:
            nonlocal at
            if stop is not None and at >= stop:
                return
            everything = at == 0 and stop is None
            wanted = {} if everything else {"Range": f"bytes={at}-{stop - 1 if stop else ''}"}
            answer = self._call("get_object", Key=self.prefix + key, **wanted, **self._of(_CUSTOMERS_KEY))
            begin, length, body = at, answer["ContentLength"], answer["Body"]
            try:
                while piece := _next_piece(body):
                    write(at, piece)
                    at += len(piece)
            except _OfTheCaller:
                raise
            except Exception as error:
                if type(error).__name__ == "FlexibleChecksumError":
                    at = begin  # somewhere in it a bit is wrong
                raise self._translated(error, "get_object", self.prefix + key) from None
            finally:
                body.close()
            if at - begin != length:
                raise TierUnavailable(f"{self.url}/{key}: {at - begin:,} bytes came of {length:,}.")

        Patience(attempts=5, first=0.2)(rest)
        return at

    def stat(self, key: str) -> Stat | None:
        try:
            answer = self._call("head_object", Key=self.prefix + key, **self._of(_CUSTOMERS_KEY))
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
_CHECKED = {"ChecksumAlgorithm": "CRC32"}
"""Said with each request that has content, whatever the client's defaults: the store checks what it gets."""
_EVERYWHERE = ("RequestPayer", "ExpectedBucketOwner")
_CUSTOMERS_KEY = ("SSECustomerAlgorithm", "SSECustomerKey", "SSECustomerKeyMD5")


def _next_piece(body: Any) -> bytes:
    piece: bytes = body.read(2**20)
    return piece


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
        self.url = shown(url.partition("?")[0]).rstrip("/")
        self._fs, root = self._open(url, options)
        self._root = str(root).rstrip("/")
        self._has_answered = False
        names = self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        self.folder = self._root or "/" if "file" in names else None
        """Where it is on this machine, if it is a folder there."""

    def _open(self, url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
        import fsspec

        uncached = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            try:
                opened: tuple[Any, str] = fsspec.core.url_to_fs(url, **{**uncached, **options})
            except TypeError:  # some file systems know no such option
                opened = fsspec.core.url_to_fs(url, **options)
        except (ImportError, ValueError, TypeError) as error:
            raise SetupError(f"{self.url!r} cannot be used: {type(error).__name__}: {_first_words(error)}.") from None
        except PermissionError as error:
            raise TierDenied(f"{self.url}: {type(error).__name__}.", hint="Check the credentials.") from None
        except Exception as error:
            raise TierUnavailable(f"{self.url}: {type(error).__name__}: {_first_words(error)}.") from None
        return opened

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except FileNotFoundError:
            self._has_answered = True
            raise
        except (ResilienceError, _OfTheCaller):
            raise
        except PermissionError as error:
            raise TierDenied(f"{what} of {self.url}: {type(error).__name__}.", hint="Check the credentials.") from None
        except Exception as error:
            text = f"{what} of {self.url}: {type(error).__name__}: {_first_words(error)}."
            # Many make their client at the first request, and find then what it does not take.
            if not self._has_answered and type(error) in (TypeError, ValueError):
                raise SetupError(text, hint="Check remote= and storage_options=.") from None
            raise TierUnavailable(text) from None
        self._has_answered = True
        return answer

    def put(self, key: str, read: Read, size: int, digest: str) -> None:
        content, path = _Checked(key, read, digest), self._path(key)
        # What has its name in a folder is whole: nothing else there keeps a reader from half a file.
        target = path if self.folder is None else self._path(f"{UNFINISHED}{uuid.uuid4().hex}")
        part, _ = _parts(size)

        def write() -> None:
            with suppress(NotImplementedError):
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
            if size <= part:
                data = content(0, size)
                content.check()
                self._fs.pipe_file(target, data)
                return
            stream = self._fs.open(target, "wb", block_size=part)
            try:
                for start in range(0, size, part):
                    stream.write(content(start, min(part, size - start)))
                content.check()
            except BaseException:
                self._throw_away(stream, target)
                raise
            stream.close()

        try:
            with _callers_errors():
                self._call("put", write)
            if self.folder is not None:
                self._call("put", lambda: _give_its_name(target, path))
                self._call("sync", lambda: _sync(path, self._root))
        finally:
            if self.folder is not None:
                with suppress(OSError):
                    os.unlink(target)
        _check_size(key, self.stat(key), size)

    def _throw_away(self, stream: Any, path: str) -> None:
        """Give up a file that is half written: closing it would make it an object."""
        with suppress(Exception):
            stream.discard()
        with suppress(Exception):
            if hasattr(stream, "discard"):
                stream.closed = True
            else:
                stream.close()
        with suppress(Exception):
            self._fs.rm_file(path)

    def get(self, key: str, start: int = 0, stop: int | None = None) -> bytes:
        data: bytes = self._call("get", lambda: self._fs.cat_file(self._path(key), start=start or None, end=stop))
        return data

    def fetch(self, key: str, size: int, write: Callable[[int, bytes], object]) -> None:
        part, most = _parts(size)
        hand, starts = _handing(write), range(0, size, part)

        def piece(start: int) -> None:
            stop = min(start + part, size)
            data = Patience(attempts=5, first=0.2)(lambda: self.get(key, start, stop))
            if len(data) != stop - start:
                raise TierUnavailable(f"{self.url}/{key}: {len(data):,} bytes came of {stop - start:,}.")
            hand(start, data)

        with _callers_errors(), ThreadPoolExecutor(min(most, len(starts) or 1), "resilience-fetch") as pool:
            _all(pool, [partial(piece, start) for start in starts])

    def stat(self, key: str) -> Stat | None:
        self._fs.invalidate_cache()
        try:
            found = self._call("stat", lambda: self._fs.info(self._path(key)))
        except FileNotFoundError:
            return None
        return Stat(int(found["size"])) if found.get("type") == "file" else None

    def entries(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        self._fs.invalidate_cache()
        folder = self._path(prefix.rpartition("/")[0])
        try:
            found = self._call("list", lambda: self._fs.find(folder, detail=True))
        except FileNotFoundError:
            return
        for path, info in sorted(found.items()):
            key = self._key(path)
            is_whole = self.folder is None or not key.startswith(UNFINISHED)
            if key.startswith(prefix) and is_whole and info.get("type") == "file" and not path.endswith("/"):
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
        folders: set[str] = set()
        for key in keys:
            with suppress(FileNotFoundError):
                self._call("delete", partial(self._fs.rm_file, self._path(key)))
            *above, _ = key.split("/")
            folders |= {"/".join(above[:count]) for count in range(1, len(above) + 1)}
        for folder in sorted(folders, key=len, reverse=True):
            with suppress(Exception):  # an empty folder is no object; stores without folders have none
                self._fs.rmdir(self._path(folder))

    def sweep(self, ours: Callable[[str], bool]) -> int:
        """In a folder: files that never got their name, and folders for such that nothing came into."""
        if self.folder is None:
            return 0
        count, root = 0, Path(self.folder)
        for path in root.glob(f"{UNFINISHED}*"):
            with suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()
                    count += 1
        for path in root.glob("*/"):
            with suppress(OSError):
                if ours(f"{path.name}/") and time.time() - path.stat().st_mtime > ABANDONED:
                    path.rmdir()  # fails where there is anything in it
        return count


def _give_its_name(source: str, path: str) -> None:
    """Move a local file, which is durable, to its name in one step, whatever folder a sweep removes meanwhile."""
    fd = os.open(source, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    for _ in range(10):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with suppress(FileNotFoundError):
            os.replace(source, path)
            return
    raise TierUnavailable(f"{path} cannot be put: its folder is removed again and again.")


def _sync(path: str, root: str) -> None:
    """Have a local file, and the names that lead to it from the folder above ``root``, survive power loss."""
    last = os.path.dirname(os.path.abspath(root))
    while True:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        if path in (last, os.path.dirname(path)) or not path.startswith(last):
            return
        path = os.path.dirname(path)


def shown(url: str) -> str:
    """A URL as it may be shown: without user and password."""
    scheme, mark, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    while "@" in path and "@" not in host and ":" in host:  # a slash in the password
        more, slash, path = path.partition("/")
        host = f"{host}/{more}"
    return f"{scheme}{mark}{host.rpartition('@')[2]}{slash}{path}" if mark else url


def _hidden(text: str) -> str:
    return re.sub(r"//[^/\s]*@", "//", text)


def _first_words(error: Exception) -> str:
    """The beginning of a message, where stores say what is wrong and not yet with which request."""
    return _hidden(str(error).splitlines()[0][:120] if str(error) else "")
