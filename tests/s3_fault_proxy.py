"""A proxy that stands between an S3 client and its server, and breaks what rules say.

::

    with FaultProxy(server.port) as proxy:  # proxy.url is the client's endpoint_url
        proxy.add(Rule("status", method="PUT", times=3))  # 503 SlowDown, three times
        proxy.add(Rule("reset_request", after_bytes=2**20, path="partNumber="))

The Host header goes through as it came, so that signatures stay valid.  A connection serves one request.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

CHUNK = 2**18

Kind = Literal[
    "latency",  # wait ``seconds`` before the server sees the request
    "status",  # answer with ``status`` and ``code``; the server never sees the request
    "hang",  # read the request, answer nothing for ``seconds``, then reset
    "reset_before",  # reset the connection; the server never sees the request
    "reset_request",  # reset it in the request's body, after ``after_bytes``
    "ack_lost",  # let the server do it, and reset instead of passing the answer on
    "reset_response",  # reset it in the answer's body, after ``after_bytes``
    "truncate_response",  # end it there without a reset
    "corrupt",  # flip a bit of the answer's body, at ``after_bytes``
]


@dataclass
class Rule:
    """What to break, and for which requests.

    Args:
        kind: what happens.
        method: regular expression for the whole of the HTTP method.
        path: regular expression for a piece of the path and query.
        probability: of each request that fits.
        times: how often at most; None for ever.
        skip: how many that fit pass first.
        seconds: how long, for ``latency`` and ``hang``.
        after_bytes: where in a body.
        status: of the answer, for ``status``.
        code: S3's word for it.
    """

    kind: Kind
    method: str = ".*"
    path: str = ""
    probability: float = 1.0
    times: int | None = None
    skip: int = 0
    seconds: float = 0.0
    after_bytes: int = 0
    status: int = 503
    code: str = "SlowDown"
    hits: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"{self.kind!r} is not one of {', '.join(get_args(Kind))}")

    def takes(self, method: str, target: str, luck: float) -> bool:
        """Whether it applies to this request; counts that."""
        if not re.fullmatch(self.method, method) or not re.search(self.path, target):
            return False
        if self.skip:
            self.skip -= 1
            return False
        if self.hits == self.times or luck >= self.probability:
            return False
        self.hits += 1
        return True


class FaultProxy:
    """The proxy, on a thread of its own; a context manager.

    Args:
        server_port: of the server, on loopback.
        seed: of what rules with a probability do.

    Attributes:
        bandwidth: bytes a second that all connections together may pass in each direction; None for no limit.
        requests: method and path of everything that was asked.
    """

    def __init__(self, server_port: int, seed: int = 0) -> None:
        self.bandwidth: float | None = None
        self.requests: list[tuple[str, str]] = []
        self._server_port = server_port
        self._random = random.Random(seed)
        self._rules: list[Rule] = []
        self._free_at = {"up": 0.0, "down": 0.0}
        self._serving: set[asyncio.Task[None] | None] = set()  # asyncio itself refers to them weakly
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="fault-proxy", daemon=True)

    def add(self, rule: Rule) -> Rule:
        """Have a rule from now on; returns it, for its ``hits``."""
        self._rules = [*self._rules, rule]
        return rule

    def clear(self) -> None:
        """Break nothing any more."""
        self._rules = []
        self.bandwidth = None

    @property
    def url(self) -> str:
        """For ``endpoint_url``."""
        return f"http://127.0.0.1:{self._port}"

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        if not self._started.wait(30):
            raise RuntimeError("the proxy did not start")
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _run(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=CHUNK)
        self._port: int = server.sockets[0].getsockname()[1]
        self._started.set()
        await self._stop.wait()
        server.close()

    # -- one request --------------------------------------------------------------------------------------------------

    async def _serve(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        """Reset the connection, unless its request was answered in full."""
        task = asyncio.current_task()
        self._serving.add(task)
        try:
            await self._request(client, to_client)
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            _reset(to_client)
        finally:
            self._serving.discard(task)
            to_client.close()

    async def _request(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        head = await client.readuntil(b"\r\n\r\n")
        method, target, _ = head.decode("latin-1").split(" ", 2)
        self.requests.append((method, target))
        broken = {rule.kind: rule for rule in self._rules if rule.takes(method, target, self._random.random())}
        if "latency" in broken:
            await asyncio.sleep(broken["latency"].seconds)
        if "reset_before" in broken:
            raise ConnectionResetError
        if "status" in broken:
            to_client.write(_answer(broken["status"], with_body=method != "HEAD"))
            to_client.write_eof()
            await _drain(client, 10)
            return
        if "hang" in broken:
            await _drain(client, broken["hang"].seconds)
            raise ConnectionResetError
        server, to_server = await asyncio.open_connection("127.0.0.1", self._server_port, limit=CHUNK)
        to_server.write(_last_on_its_connection(head))
        sending = asyncio.ensure_future(self._send(client, to_server, broken.get("reset_request")))
        try:
            await self._receive(server, to_client, broken)
        finally:
            sending.cancel()
            to_server.close()

    async def _send(self, client: asyncio.StreamReader, to_server: asyncio.StreamWriter, reset: Rule | None) -> None:
        """Pass the request's body on; a reset towards the server ends the wait for its answer too."""
        passed = 0
        with suppress(OSError):
            while data := await client.read(CHUNK):
                passed += len(data)
                if reset is not None and passed > reset.after_bytes:
                    _reset(to_server)
                    return
                to_server.write(data)
                await self._pace("up", len(data))
                await to_server.drain()

    async def _receive(
        self, server: asyncio.StreamReader, to_client: asyncio.StreamWriter, broken: dict[Kind, Rule]
    ) -> None:
        """Pass the answer on, which ends with the server's connection."""
        while (head := await server.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 1"):
            to_client.write(head)  # 100 Continue
        if "ack_lost" in broken:
            raise ConnectionResetError
        to_client.write(head)
        cut = broken.get("reset_response") or broken.get("truncate_response")
        flip = broken.get("corrupt")
        passed = 0
        while data := await server.read(CHUNK):
            if flip is not None and passed <= flip.after_bytes < passed + len(data):
                at = flip.after_bytes - passed
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            if cut is not None and passed + len(data) > cut.after_bytes:
                to_client.write(data[: cut.after_bytes - passed])
                await to_client.drain()
                if cut.kind == "reset_response":
                    raise ConnectionResetError
                return
            passed += len(data)
            to_client.write(data)
            await self._pace("down", len(data))
            await to_client.drain()

    async def _pace(self, way: Literal["up", "down"], passed: int) -> None:
        if self.bandwidth is not None:
            now = time.monotonic()
            self._free_at[way] = max(self._free_at[way], now) + passed / self.bandwidth
            await asyncio.sleep(self._free_at[way] - now)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Close with RST, which a peer sees as a connection reset."""
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def _drain(reader: asyncio.StreamReader, seconds: float) -> None:
    """Read until the peer closes, or the time is up."""

    async def read() -> None:
        while await reader.read(CHUNK):
            pass

    with suppress(asyncio.TimeoutError):
        await asyncio.wait_for(read(), seconds)


def _answer(rule: Rule, with_body: bool) -> bytes:
    body = f'<?xml version="1.0" encoding="UTF-8"?><Error><Code>{rule.code}</Code><Message>injected</Message></Error>'
    lines = (
        f"HTTP/1.1 {rule.status} Injected",
        "Content-Type: application/xml",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join((*lines, "", body if with_body else "")).encode()


def _last_on_its_connection(head: bytes) -> bytes:
    """A request that tells the server to close afterwards, so that the answer's end needs no parsing."""
    kept = [line for line in head[:-4].split(b"\r\n") if not line.lower().startswith(b"connection:")]
    return b"\r\n".join((*kept, b"Connection: close", b"", b""))


if __name__ == "__main__":  # a process of its own: port of the server, bytes a second
    with FaultProxy(int(sys.argv[1])) as of_its_own:
        of_its_own.bandwidth = float(sys.argv[2])
        print(of_its_own.url, flush=True)
        sys.stdin.read()  # until whoever started it ends
