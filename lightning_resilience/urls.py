"""URLs of places: whether one names a place at all, and how it may be shown.

No message, name or URL that a user sees carries a credential.
"""

from __future__ import annotations

import re

from lightning_resilience.errors import SetupError

LOCAL = ("file", "local")
"""Protocols of folders on this machine."""


def is_url(text: str) -> bool:
    """Whether a path is one of an object store."""
    return "://" in text and not text.startswith("file://")


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


def first_words(error: Exception) -> str:
    """The beginning of a message, where stores say what is wrong and not yet with which request."""
    return _hidden(str(error).splitlines()[0][:120] if str(error) else "")
