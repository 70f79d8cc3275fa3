"""Objects in S3 and in everything that speaks like it, through botocore, which s3fs brings.

Parts go up and ranges come down on several threads, which no way through s3fs does as fast.  Each failure is told by
what can be done about it; S3's own word for it stays in the message, what may be secret does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from lightning_resilience.errors import ResilienceError, SetupError, TierDenied, TierUnavailable
from lightning_resilience.patience import Patience
from lightning_resilience.transfer import (
    Checked,
    OfTheCaller,
    Read,
    Stat,
    Write,
    callers_errors,
    check_size,
    in_parts,
    part_size,
)
from lightning_resilience.urls import first_words

T = TypeVar("T")

DIGEST = "xxh3-128"
"""Name under which an object's digest is kept beside it."""


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
            said = f" ({first_words(error)})" if code in ("TypeError", "ValueError") else ""
            return SetupError(f"{what}{said}.", hint="Check remote= and storage_options=.")
        return TierUnavailable(f"{what}.")

    def _of(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of the additional arguments that a request takes."""
        return {name: self._extra[name] for name in names if name in self._extra}

    # -- writing ------------------------------------------------------------------------------------------------------

    def put(self, key: str, read: Read, size: int, digest: str) -> None:
        content = Checked(key, read, digest)
        own = {name: value for name, value in self._extra.items() if name not in _EVERYWHERE}
        describe = {**own, "Metadata": {**own.get("Metadata", {}), DIGEST: digest}}
        part, most = part_size(size)
        with callers_errors():
            if size <= part:
                data = content(0, size)
                content.check()
                self._call("put_object", Key=self.prefix + key, Body=data, **describe, **_CHECKED)
            else:
                self._put_parts(key, content, size, part, most, describe)
        check_size(key, self.stat(key), size)

    def _put_parts(
        self, key: str, content: Checked, size: int, part: int, most: int, describe: Mapping[str, Any]
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
        self, full: str, upload: str, content: Checked, size: int, part: int, most: int
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

    def fetch(self, key: str, size: int, write: Write) -> None:
        def read_part(start: int, stop: int, hand: Write) -> None:
            if (end := self._read(key, start, stop, hand)) != stop:
                raise TierUnavailable(f"{self.url}/{key} ends after {end:,} bytes of {size:,}.")

        in_parts(size, write, read_part)

    def _read(self, key: str, start: int, stop: int | None, write: Write) -> int:
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
            except OfTheCaller:
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
