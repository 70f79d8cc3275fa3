"""Objects behind a URL: put, get, list and delete, each whole and checked, or an error.

One small protocol and, by URL, who does it: ``S3Objects`` talks to S3, ``FsspecObjects`` reaches any other URL that
fsspec knows.

Errors are told apart by what can be done about them: ``TierDenied`` (credentials, permissions, no such bucket),
``FileNotFoundError``, and ``TierUnavailable`` for everything that may go away by itself, which ``Patience`` waits for.
No message, name or URL here carries a credential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Protocol

from lightning_resilience.errors import SetupError
from lightning_resilience.fsspec_objects import FsspecObjects
from lightning_resilience.s3 import S3Objects
from lightning_resilience.transfer import Read, Stat, Write
from lightning_resilience.urls import check_url, shown


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

    def fetch(self, key: str, size: int, write: Write) -> None:
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
