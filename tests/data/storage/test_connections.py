"""Clients are shared within a process, closed once at its end, and never by a forked child."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import pytest

from vorox.data.storage.connections import Close, client, close_connections, drop_client
from vorox.data.storage.requests import start

PROGRAM = """
import os, sys
from vorox.data.storage.connections import client
from vorox.data.storage.requests import start

def open_client(name):
    async def close():
        print(f"{os.getpid()} closed {name}", flush=True)
    async def create():
        return name, close
    return start(client(name, create)).result(timeout=10)

assert open_client("parent") == open_client("parent") == "parent"
child = os.fork()
if child == 0:
    open_client("child")
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
print(f"{os.getpid()} waited for {child}", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="forks")
def test_each_process_closes_its_own_clients_at_its_end() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    parent, child = lines[1].split()[0], lines[1].split()[-1]
    assert lines == [f"{child} closed child", f"{parent} waited for {child}", f"{parent} closed parent"]


def test_a_dropped_client_is_created_again() -> None:
    counts = Counter[str]()

    async def close() -> None:
        counts["closed"] += 1

    async def create() -> tuple[object, Close]:
        counts["created"] += 1
        return object(), close

    first = start(client("test", create)).result(timeout=10)
    assert start(client("test", create)).result(timeout=10) is first
    assert counts == {"created": 1}
    start(drop_client("test")).result(timeout=10)
    assert start(client("test", create)).result(timeout=10) is not first
    close_connections()
    assert counts == {"created": 2, "closed": 2}
