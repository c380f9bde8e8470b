"""No command connects to anybody, or looks a name up, unless its configuration names a place to connect to.

A library preloaded into every process of a command writes down each address that it connects or sends to and each name
that it resolves, whatever the language of the caller (Python, Rust, C++). Loopback and sockets of this machine are left
out, and so is the name of the machine itself.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tiny_runs import configuration

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="cc is not installed"),
]

SHIM = r"""
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static void note(const char *what, const char *whom) {
    const char *path = getenv("TESTS_CONTACTS");
    char line[600];
    int file, size = snprintf(line, sizeof line, "%s %s\n", what, whom);
    if (path && (file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600)) >= 0) {
        if (write(file, line, size) < 0) abort();
        close(file);
    }
}
static void address(const char *what, const struct sockaddr *to) {
    char text[INET6_ADDRSTRLEN] = "";
    if (!to) return;
    if (to->sa_family == AF_INET) inet_ntop(AF_INET, &((struct sockaddr_in *)to)->sin_addr, text, sizeof text);
    else if (to->sa_family == AF_INET6) inet_ntop(AF_INET6, &((struct sockaddr_in6 *)to)->sin6_addr, text, sizeof text);
    else return;
    if (strncmp(text, "127.", 4) && strcmp(text, "::1") && strncmp(text, "::ffff:127.", 11) && strcmp(text, "::"))
        note(what, text);
}
static int is_datagram(int fd) {
    int kind = 0;
    socklen_t size = sizeof kind;
    return getsockopt(fd, SOL_SOCKET, SO_TYPE, &kind, &size) == 0 && kind == SOCK_DGRAM;
}
/* Connecting a datagram socket sends nothing (programs find their own address so); what is sent on it counts. */
static void peer(const char *what, int fd) {
    struct sockaddr_storage to;
    socklen_t size = sizeof to;
    if (is_datagram(fd) && getpeername(fd, (struct sockaddr *)&to, &size) == 0) address(what, (struct sockaddr *)&to);
}
int connect(int fd, const struct sockaddr *to, socklen_t size) {
    if (!is_datagram(fd)) address("connect", to);
    return ((int (*)(int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "connect"))(fd, to, size);
}
ssize_t send(int fd, const void *data, size_t length, int flags) {
    peer("send", fd);
    return ((ssize_t (*)(int, const void *, size_t, int))dlsym(RTLD_NEXT, "send"))(fd, data, length, flags);
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    if (message->msg_name) address("sendmsg", message->msg_name); else peer("sendmsg", fd);
    return ((ssize_t (*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg"))(fd, message, flags);
}
ssize_t sendto(int fd, const void *data, size_t length, int flags, const struct sockaddr *to, socklen_t size) {
    if (to) address("sendto", to); else peer("sendto", fd);
    return ((ssize_t (*)(int, const void *, size_t, int, const struct sockaddr *, socklen_t))dlsym(RTLD_NEXT, "sendto"))
        (fd, data, length, flags, to, size);
}
int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    char own[256] = "";
    struct in6_addr ignored;
    gethostname(own, sizeof own);
    if (node && strcmp(node, "localhost") && strcmp(node, own) && inet_pton(AF_INET, node, &ignored) != 1
        && inet_pton(AF_INET6, node, &ignored) != 1)
        note("resolve", node);
    return ((int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))
        dlsym(RTLD_NEXT, "getaddrinfo"))(node, service, hints, found);
}
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shim")
    (folder / "shim.c").write_text(SHIM)
    command = ["cc", "-shared", "-fPIC", "-O1", "-o", "shim.so", "shim.c", "-ldl"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "shim.so"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small text and its configuration."""
    directory = tmp_path_factory.mktemp("quiet")
    configuration(directory)
    return directory


def contacts(shim: Path, folder: Path, command: list[str], allowed: Collection[str] = ()) -> list[str]:
    """Run a command to its end, and return whom it and its children contacted, but for those that are allowed."""
    noted = folder / "contacts"
    noted.unlink(missing_ok=True)
    kept = {
        name: value for name, value in os.environ.items() if name not in {"DO_NOT_TRACK", "RAY_USAGE_STATS_ENABLED"}
    }
    kept = {name: value for name, value in kept.items() if not name.startswith(("HF_", "WANDB_", "MLFLOW_"))}
    environment = kept | {"LD_PRELOAD": str(shim), "TESTS_CONTACTS": str(noted)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = noted.read_text().splitlines() if noted.exists() else []
    return [line for line in lines if line.split()[1] not in allowed]


def vorox(*words: str) -> list[str]:
    return [sys.executable, "-P", "-m", "vorox", *words]


def test_the_shim_sees_every_kind_of_contact(shim: Path, folder: Path) -> None:
    program = (
        "import socket, contextlib\n"
        "with contextlib.suppress(OSError): socket.getaddrinfo('telemetry.example', 443)\n"
        "with contextlib.suppress(OSError): socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('192.0.2.1', 9))\n"
        "one = socket.socket(type=socket.SOCK_DGRAM)\n"
        "with contextlib.suppress(OSError): one.connect(('192.0.2.2', 9)), one.send(b'x')\n"
        "two = socket.socket()\n"
        "two.setblocking(False)\n"
        "with contextlib.suppress(OSError): two.connect(('192.0.2.3', 9))\n"
        "with contextlib.suppress(OSError): socket.create_connection(('127.0.0.1', 9))\n"
    )
    found = contacts(shim, folder, [sys.executable, "-c", program])
    assert found == ["resolve telemetry.example", "sendto 192.0.2.1", "send 192.0.2.2", "connect 192.0.2.3"]


CLOUD_METADATA = ("169.254.169.254", "metadata.google.internal")
"""Where Ray's head asks in which cloud it runs, also with its reports off; that machine is the cloud's own."""
TRAIN = ("train", "tiny.yaml", "train.num_steps=6")


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([*TRAIN, "--name", "one"], id="train", marks=pytest.mark.torch),
        pytest.param([*TRAIN, "--name", "two", "parallel.data_parallel_size=2", "train.global_batch_sequences=8",
                      "runtime.num_threads=null", "--nproc", "2"], id="ranks", marks=pytest.mark.torch),
        pytest.param([*TRAIN, "--name", "jax", "backend=jax", "runtime.num_threads=null"], id="jax",
                     marks=pytest.mark.jax),
        pytest.param([*TRAIN, "--name", "sinks", "log.tensorboard=true", "log.mlflow=true"], id="sinks",
                     marks=pytest.mark.torch),
        pytest.param(["data", "build", "tiny.yaml", "--executor", "ray", "--workers", "2", "--force-rebuild"],
                     id="ray"),
        pytest.param(["doctor"], id="doctor"),
        pytest.param(["runs", "list"], id="runs"),
        pytest.param(["plan", "tiny.yaml"], id="plan"),
    ],
)  # fmt: skip
def test_a_command_contacts_nobody(shim: Path, folder: Path, words: list[str]) -> None:
    allowed = CLOUD_METADATA if "ray" in words else ()
    assert contacts(shim, folder, vorox(*words), allowed) == []
