"""One corpus in four stores: S3 (jsonl.zst), Google Cloud Storage (parquet), a hub dataset (jsonl), local csv.

The servers run once; the same uris are then read directly, or through fault-injecting proxies. Every document is
unique and contains its location, so that a lost, duplicated or misplaced one is detected.
"""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from servers.environment import pointed_at
from servers.faults import FaultProxy, fault_proxy
from servers.gcs import GcsServer, gcs_server
from servers.hub import HubServer, hub_server
from servers.s3 import S3Server, s3_server

STORES = ("s3", "gcs", "hub", "local")
_WORDS = ("step", "plan", "row", "chunk", "unit", "token", "order", "epoch", "shard", "seed", "batch", "cache")


@dataclass(frozen=True)
class FourStores:
    """The running servers with the corpus in them.

    Attributes:
        sources: Value of ``data.sources``.
        texts: Every text of each source, in the order of its files.
    """

    s3: S3Server
    gcs: GcsServer
    hub: HubServer
    sources: list[dict[str, Any]]
    texts: dict[str, list[str]]

    @contextmanager
    def behind(self, *, seed: int = 0, **faults: float) -> Iterator[dict[str, FaultProxy]]:
        """Read through one proxy per server; a requested stall happens once at each."""
        with ExitStack() as stack:
            proxies: dict[str, FaultProxy] = {}
            for number, (name, server) in enumerate([("s3", self.s3), ("gcs", self.gcs), ("hub", self.hub)]):
                proxies[name] = stack.enter_context(fault_proxy(server.url, seed=seed + number, **faults))
                stack.enter_context(pointed_at(server.environment(proxies[name].url)))
            yield proxies


def texts_of(store: str, documents: int) -> list[str]:
    """Return deterministic distinct texts of 40 to 400 characters."""
    chooser = random.Random(f"texts of {store}")
    return [
        f"{store} document {number}: " + " ".join(chooser.choices(_WORDS, k=chooser.randint(5, 60)))
        for number in range(documents)
    ]


@contextmanager
def four_stores(folder: Path, *, documents: int = 400, files: int = 2) -> Iterator[FourStores]:
    """Start and fill the servers, and point this process at them.

    Args:
        folder: Directory of the local files.
        documents: Of each source, spread evenly over its files.
        files: Of each source.
    """
    texts = {store: texts_of(store, documents) for store in STORES}
    each = -(-documents // files)
    with s3_server() as s3, gcs_server() as gcs, hub_server() as hub:
        s3.bucket("corpora", versioned=True)
        gcs.bucket("corpora")
        folder.mkdir(parents=True, exist_ok=True)
        repository: dict[str, bytes | None] = {"README.md": b"# A corpus\n"}
        for number in range(files):
            part = {store: values[number * each : (number + 1) * each] for store, values in texts.items()}
            lines = "".join(json.dumps({"text": text}) + "\n" for text in part["s3"]).encode()
            s3.put("corpora", f"crawl/{number:02}.jsonl.zst", zstandard.ZstdCompressor().compress(lines))
            sink = io.BytesIO()
            pq.write_table(pa.table({"text": part["gcs"]}), sink, row_group_size=max(1, each // 8))
            gcs.put("corpora", f"books/{number:02}.parquet", sink.getvalue())
            lines = "".join(json.dumps({"text": text}) + "\n" for text in part["hub"]).encode()
            repository[f"data/{number:02}.jsonl"] = lines
            rows = io.StringIO()
            writer = csv.writer(rows)
            writer.writerows([["text", "number"], *([text, str(row)] for row, text in enumerate(part["local"]))])
            (folder / f"{number:02}.csv").write_text(rows.getvalue(), encoding="utf-8", newline="")
        hub.commit("acme/corpora", repository)
        sources = [
            {"name": "crawl", "format": "jsonl", "paths": ["s3://corpora/crawl/*.jsonl.zst"], "weight": "4/10"},
            {"name": "books", "format": "parquet", "paths": ["gs://corpora/books"], "weight": "3/10"},
            {"name": "edu", "format": "jsonl", "paths": ["hf://acme/corpora/data"], "weight": "2/10"},
            {"name": "notes", "format": "csv", "paths": [str(folder)], "weight": "1/10"},
        ]
        yield FourStores(s3, gcs, hub, sources, texts)
