"""Objects behind any URL that fsspec knows; a folder on this machine besides as durable as a tier promises."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from lightning_resilience import durable
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
from lightning_resilience.urls import first_words, shown

T = TypeVar("T")

UNFINISHED = ".put-"
"""Begins the names of the files of a folder that are not whole yet."""
ABANDONED = 3600
"""Seconds without a write after which nobody is at such a file any more."""


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
            raise SetupError(f"{self.url!r} cannot be used: {type(error).__name__}: {first_words(error)}.") from None
        except PermissionError as error:
            raise TierDenied(f"{self.url}: {type(error).__name__}.", hint="Check the credentials.") from None
        except Exception as error:
            raise TierUnavailable(f"{self.url}: {type(error).__name__}: {first_words(error)}.") from None
        return opened

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}" if key else self._root

    def _call(self, what: str, call: Callable[[], T]) -> T:
        try:
            answer = call()
        except FileNotFoundError:
            self._has_answered = True
            raise
        except (ResilienceError, OfTheCaller):
            raise
        except PermissionError as error:
            raise TierDenied(f"{what} of {self.url}: {type(error).__name__}.", hint="Check the credentials.") from None
        except Exception as error:
            text = f"{what} of {self.url}: {type(error).__name__}: {first_words(error)}."
            # Many make their client at the first request, and find then what it does not take.
            if not self._has_answered and type(error) in (TypeError, ValueError):
                raise SetupError(text, hint="Check remote= and storage_options=.") from None
            raise TierUnavailable(text) from None
        self._has_answered = True
        return answer

    def put(self, key: str, read: Read, size: int, digest: str) -> None:
        content, path = Checked(key, read, digest), self._path(key)
        # What has its name in a folder is whole: nothing else there keeps a reader from half a file.
        target = path if self.folder is None else self._path(f"{UNFINISHED}{uuid.uuid4().hex}")
        part, _ = part_size(size)

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
            with callers_errors():
                self._call("put", write)
            if self.folder is not None:
                self._call("put", lambda: _give_its_name(target, path))
                self._call("sync", lambda: _sync(path, self._root))
        finally:
            if self.folder is not None:
                with suppress(OSError):
                    os.unlink(target)
        check_size(key, self.stat(key), size)

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

    def fetch(self, key: str, size: int, write: Write) -> None:
        def read_part(start: int, stop: int, hand: Write) -> None:
            data = Patience(attempts=5, first=0.2)(lambda: self.get(key, start, stop))
            if len(data) != stop - start:
                raise TierUnavailable(f"{self.url}/{key}: {len(data):,} bytes came of {stop - start:,}.")
            hand(start, data)

        in_parts(size, write, read_part)

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
    durable.sync(source)
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
        durable.sync(path)
        if path in (last, os.path.dirname(path)) or not path.startswith(last):
            return
        path = os.path.dirname(path)
