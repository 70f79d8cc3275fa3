"""URLs of places, and what of them and of messages is never shown."""

from __future__ import annotations

import pytest

from lightning_resilience.errors import SetupError
from lightning_resilience.urls import check_url, first_words, shown


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("s3://user:sesame@bucket/run", "s3://bucket/run"),
        ("sftp://user@host:22/run", "sftp://host:22/run"),
        ("ftp://user:ses/ame@host/run", "ftp://host/run"),
        ("ftp://host/user@home", "ftp://host/user@home"),
        ("/tmp/user@home", "/tmp/user@home"),
    ],
)
def test_a_url_is_shown_without_user_and_password(url: str, expected: str) -> None:
    assert shown(url) == expected


@pytest.mark.parametrize("url", ["s3://bucket", "gs://bucket/run", "file:///run", "memory://run", "run", "/run"])
def test_what_names_a_place_passes(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("://run", "no protocol"),
        ("s3://", "names no bucket"),
        ("gs:///", "names no bucket or folder"),
        ("file://run", "not an absolute path"),
        ("local://", "not an absolute path"),
    ],
)
def test_what_names_no_place_is_a_setup_error(url: str, named: str) -> None:
    with pytest.raises(SetupError, match=named):
        check_url(url)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("", ""),
        ("no such host\nrequest: sesame", "no such host"),
        ("cannot reach https://user:sesame@host/run", "cannot reach https://host/run"),
        ("x" * 200, "x" * 120),
    ],
)
def test_of_a_message_the_beginning_is_shown_without_user_and_password(message: str, expected: str) -> None:
    assert first_words(OSError(message)) == expected
