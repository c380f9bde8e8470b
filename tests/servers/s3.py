"""Amazon S3 by moto: buckets with and without versions."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from servers.environment import pointed_at

SECRET = "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY"
"""The secret key that tests sign with: it must not appear in a message."""


@dataclass
class S3Server:
    """The running server, and a client to fill it."""

    url: str
    client: Any

    def environment(self, url: str | None = None) -> dict[str, str]:
        """Variables that point at this server, or at a proxy in front of it."""
        return {
            "AWS_ENDPOINT_URL_S3": url or self.url,
            "AWS_ACCESS_KEY_ID": "AKIAIOSFODNN7EXAMPLE",
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": "/nonexistent",
            "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        }

    def bucket(self, name: str, *, versioned: bool = False) -> None:
        """Create a bucket."""
        self.client.create_bucket(Bucket=name)
        if versioned:
            self.client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})

    def put(self, bucket: str, key: str, content: bytes) -> None:
        """Write an object."""
        self.client.put_object(Bucket=bucket, Key=key, Body=content)


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start an empty S3 and point this process at it."""
    for package in ("obstore", "moto"):
        pytest.importorskip(package)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of libraries, while they are imported
        import botocore.session
        from moto.server import ThreadedMotoServer

    backend = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    backend.start()
    host, port = backend.get_host_and_port()
    server = S3Server(f"http://{host}:{port}", None)
    try:
        with pointed_at(server.environment()):
            server.client = botocore.session.get_session().create_client("s3")
            _reset(server.url)
            yield server
            server.client.close()
    finally:
        backend.stop()
        backend._server.server_close()


def _reset(url: str) -> None:
    """Remove moto's buckets, which it keeps per process."""
    import http.client
    from urllib.parse import urlsplit

    connection = http.client.HTTPConnection(urlsplit(url).netloc)
    connection.request("POST", "/moto-api/reset")
    connection.getresponse().read()
    connection.close()
