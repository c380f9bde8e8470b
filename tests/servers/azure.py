"""Azure Blob Storage: Azurite, Microsoft's emulator, from npm."""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import hashlib
import hmac
import http.client
import itertools
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

import pytest

from servers.environment import pointed_at

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The public account key of Azurite."""

_INSTALLED = Path(__file__).parents[2] / ".azurite" / "node_modules" / ".bin" / "azurite-blob"
_numbers = itertools.count()


@dataclass
class AzureServer:
    """The running server."""

    url: str

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Variables that point at this server, or at a proxy in front of it."""
        return {
            "AZURE_STORAGE_ENDPOINT": f"{url or self.url}/{ACCOUNT}", "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        }  # fmt: skip

    def container(self) -> str:
        """Create a container with a new name."""
        name = f"corpora{next(_numbers)}"
        self._send(f"/{ACCOUNT}/{name}?restype=container", b"", {})
        return name

    def put(self, container: str, name: str, content: bytes) -> None:
        """Write an object."""
        self._send(f"/{ACCOUNT}/{container}/{quote(name)}", content, {"x-ms-blob-type": "BlockBlob"})

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> None:
        date = format_datetime(datetime.now(UTC), usegmt=True)
        headers = {**headers, "x-ms-date": date, "x-ms-version": "2021-08-06"}
        address = urlsplit(path)
        named = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        query = "".join(f"\n{name}:{value}" for name, value in sorted(parse_qsl(address.query)))
        length = str(len(body)) if body else ""
        signed = f"PUT\n\n\n{length}\n" + "\n" * 8 + f"{named}/{ACCOUNT}{address.path}{query}"
        digest = hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(digest).decode()}"
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=30)
        with contextlib.closing(connection):
            connection.request("PUT", path, body=body, headers=headers)
            answer = connection.getresponse()
            assert answer.status == 201, answer.read()


@contextmanager
def azure_server() -> Iterator[AzureServer]:
    """Point this process at the Azurite that all its tests share; skip without Azurite."""
    program = shutil.which("azurite-blob") or (str(_INSTALLED) if _INSTALLED.exists() else None)
    if program is None or shutil.which("node") is None:
        pytest.skip("Azurite is not installed: make test installs it where npm is")
    server = AzureServer(_started(program))
    with pointed_at(server.environment()):
        yield server


@functools.cache
def _started(program: str) -> str:
    process = subprocess.Popen(
        [program, "--skipApiVersionCheck", "--inMemoryPersistence", "--disableTelemetry", "--blobPort", "0"],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    atexit.register(process.terminate)
    assert process.stdout is not None
    for line in process.stdout:
        if (found := re.search(r"successfully listens on (http://\S+)", line)) is not None:
            threading.Thread(target=process.stdout.read, daemon=True).start()  # so that it never waits for a reader
            return found[1]
    raise AssertionError("Azurite did not start")
