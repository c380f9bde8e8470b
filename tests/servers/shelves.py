"""One place to put files per kind of store, so that a test can be written once for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from servers.azure import azure_server
from servers.environment import pointed_at
from servers.faults import FaultProxy, fault_proxy
from servers.gcs import gcs_server
from servers.hub import hub_server
from servers.s3 import s3_server
from servers.web import http_server

WRITABLE = ("s3", "s3-versioned", "gs", "az")
"""The writable kinds."""

KINDS = ("s3", "s3-versioned", "gs", "az", "hf", "http")
"""Every kind of store, S3 with and without versions."""


@dataclass(frozen=True)
class Shelf:
    """A folder in a store.

    Attributes:
        kind: One of ``KINDS``.
        put: Writes a file, or replaces it.
        url: Address of the server.
    """

    kind: str
    put: Callable[[str, bytes], None]
    url: str
    _root: Callable[[str], str]
    _environment: Callable[[str], dict[str, str]]

    @property
    def root(self) -> str:
        """The folder's uri."""
        return self._root(self.url)

    @contextmanager
    def behind(self, **faults: float) -> Iterator[tuple[str, FaultProxy]]:
        """Yield the folder's uri behind a fault-injecting proxy, and the proxy."""
        with fault_proxy(self.url, **faults) as proxy, pointed_at(self._environment(proxy.url)):
            yield self._root(proxy.url), proxy


@contextmanager
def shelf(kind: str, folder: Path) -> Iterator[Shelf]:
    """Start a store of a kind and yield an empty folder in it.

    Args:
        folder: Directory for a store that needs one.
    """
    with contextlib.ExitStack() as stack:
        if kind in {"s3", "s3-versioned"}:
            s3 = stack.enter_context(s3_server())
            s3.bucket("corpora", versioned=kind == "s3-versioned")
            yield Shelf(
                kind, lambda name, data: s3.put("corpora", f"text/{name}", data), s3.url,
                lambda _: "s3://corpora/text", s3.environment,
            )  # fmt: skip
        elif kind == "gs":
            gcs = stack.enter_context(gcs_server())
            gcs.bucket("corpora")
            yield Shelf(
                kind, lambda name, data: gcs.put("corpora", f"text/{name}", data), gcs.url,
                lambda _: "gs://corpora/text", gcs.environment,
            )  # fmt: skip
        elif kind == "az":
            azure = stack.enter_context(azure_server())
            container = azure.container()
            yield Shelf(
                kind, lambda name, data: azure.put(container, f"text/{name}", data), azure.url,
                lambda _: f"az://{container}/text", azure.environment,
            )  # fmt: skip
        elif kind == "hf":
            hub = stack.enter_context(hub_server())
            hub.commit("acme/corpora", {"README.md": b"# Text"})
            yield Shelf(
                kind, lambda name, data: hub.commit("acme/corpora", {f"text/{name}": data}) and None, hub.url,
                lambda _: "hf://datasets/acme/corpora/text", hub.environment,
            )  # fmt: skip
        else:
            web = stack.enter_context(http_server(folder))

            def put(name: str, data: bytes) -> None:
                path = folder / "text" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)

            yield Shelf(kind, put, web.url, lambda url: f"{url}/text", lambda _: {})
