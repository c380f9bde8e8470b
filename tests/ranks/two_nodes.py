"""Two machines on one: network namespaces with a cable between them, each with a host name and processes of its own.

Needs root and the right to make namespaces (``ip`` of iproute2, ``unshare`` of util-linux).
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import psutil

NETWORK = "10.213.77"
ETC = Path("/etc/netns")
"""``ip netns exec`` puts the files of the folder of a namespace over those of ``/etc``."""
PORT = 29_500
CABLE = "cable"
_numbers = itertools.count()


class TwoNodes:
    """Two namespaces whose host names each other knows. Use it as a context manager."""

    def __init__(self) -> None:
        self.names = [f"vorox-{os.getpid()}-{next(_numbers)}" for _ in range(2)]

    def __enter__(self) -> TwoNodes:
        try:
            for name in self.names:
                ip("netns", "add", name)
            first, second = self.names
            ip("-n", first, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", second)
            for index, name in enumerate(self.names):
                ip("-n", name, "address", "add", f"{NETWORK}.{index + 1}/24", "dev", CABLE)
                ip("-n", name, "link", "set", CABLE, "up")
                ip("-n", name, "link", "set", "lo", "up")
                (ETC / name).mkdir(parents=True)
                (ETC / name / "hosts").write_text(f"127.0.0.1 localhost\n{NETWORK}.1 node-0\n{NETWORK}.2 node-1\n")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)
            shutil.rmtree(ETC / name, ignore_errors=True)

    def command(self, index: int, words: Sequence[str]) -> list[str]:
        """The command on one of the machines, whose host name is ``node-INDEX``."""
        own = ["--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
        there = ["unshare", *own, "sh", "-c", 'hostname "$0" && exec "$@"', f"node-{index}"]
        return ["ip", "netns", "exec", self.names[index], *there, *words]

    @staticmethod
    def variables(index: int) -> dict[str, str]:
        """What a scheduler sets on a machine."""
        return {
            "VOROX_COORDINATOR": f"{NETWORK}.1:{PORT}", "VOROX_NODE_COUNT": "2", "VOROX_NODE_INDEX": str(index),
            "GLOO_SOCKET_IFNAME": CABLE,
        }  # fmt: skip

    @staticmethod
    def process_here(command: subprocess.Popen[str], number: int) -> int:
        """The id here of the process that has an id on the machine of a command."""
        for process in psutil.Process(command.pid).children(recursive=True):
            ids = re.search(r"^NSpid:(.*)", Path(f"/proc/{process.pid}/status").read_text(), re.MULTILINE)
            if ids is not None and ids[1].split()[-1] == str(number) and len(ids[1].split()) > 1:
                return process.pid
        raise ProcessLookupError(number)

    def cut(self) -> None:
        """Pull the cable."""
        ip("-n", self.names[0], "link", "set", CABLE, "down")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def reason_against() -> str:
    """Why two machines cannot be made here; empty where they can."""
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "ip (iproute2) or unshare (util-linux) is not installed"
    try:
        with TwoNodes():
            return ""
    except subprocess.CalledProcessError as error:
        return f"no network namespaces here: {error.stderr.strip()}"
    except PermissionError as error:
        return f"no network namespaces here: {error}"
