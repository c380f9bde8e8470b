"""Real servers on loopback for tests: S3, Google Cloud Storage, Azure, the hub, the web, and a proxy that makes faults.

Every server is a context manager that also points this process at itself (environment variables), so that
``list_files("s3://...")`` inside of it just works; ``pointed_at`` points at a proxy in front of it instead.
"""

from servers.azure import AzureServer, azure_server
from servers.environment import pointed_at
from servers.faults import Fault, FaultProxy, fault_proxy
from servers.gcs import GcsServer, gcs_server
from servers.hub import HubServer, hub_server
from servers.recorded import Request
from servers.s3 import S3Server, s3_server
from servers.web import WebServer, http_server

__all__ = [
    "AzureServer", "Fault", "FaultProxy", "GcsServer", "HubServer", "Request", "S3Server", "WebServer",
    "azure_server", "fault_proxy", "gcs_server", "http_server", "hub_server", "pointed_at", "s3_server",
]  # fmt: skip
