"""What is typed for an option of the command line, as a value; what makes no sense there is said in words."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from typing import Any


def duration(text: str) -> float:
    """Seconds of a duration: a number, with ``s``, ``min``, ``h`` or ``d`` behind it or not."""
    number, factor = text.strip(), 1.0
    for unit, seconds in (("min", 60.0), ("s", 1.0), ("h", 3600.0), ("d", 86400.0)):
        if number.endswith(unit):
            number, factor = number.removesuffix(unit), seconds
            break
    try:
        value = float(number) * factor
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration, such as 90, 90s, 30min, 8h or 7d")
    return value


def number(least: int, *others: int) -> Callable[[str], int]:
    """A whole number of ``least`` or more, or one of the others."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or (value < least and value not in others):
            choices = "".join(f", or {other}" for other in others)
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more{choices}")
        return value

    return read


def size(text: str) -> int:
    """Bytes: a number, with a unit of thousands (``k``, ``kB``, ``MB``, …) or of 1024s (``Ki``, ``KiB``, …) behind it
    or not."""
    found = _SIZE.fullmatch(text.strip())
    value = 0
    if found is not None:
        number, letter, binary = found.groups()
        value = int(float(number) * (1024 if binary else 1000) ** (_PREFIXES.index(letter.lower()) if letter else 0))
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes, such as 500000000, 500MB, 1.5T or 10GiB")
    return value


_PREFIXES = " kmgtp"
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgtp])(i?)b?|b)?", re.IGNORECASE)


def url(text: str) -> str:
    if "://" not in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a URL, such as s3://bucket/run7 or file:///path")
    return text


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; what is wrong with it is said without repeating it, because it may hold credentials."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError("a JSON object is wanted")
    return found
