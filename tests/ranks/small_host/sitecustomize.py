"""Python runs this at its start where the folder is on its path: the host has little memory, and perhaps another name.

``TESTS_HOST_BYTES`` is the memory; with ``TESTS_HOSTS``, every rank is on a host of its own.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import psutil

_virtual_memory = psutil.virtual_memory


def virtual_memory() -> Any:
    return _virtual_memory()._replace(total=int(os.environ["TESTS_HOST_BYTES"]))


psutil.virtual_memory = virtual_memory
if "TESTS_HOSTS" in os.environ:
    socket.gethostname = lambda: f"host-{os.environ.get('RANK', '')}"
