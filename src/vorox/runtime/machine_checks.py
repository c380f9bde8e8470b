"""Checks of this machine for ``vorox doctor``: interpreter, memory, disks, clock, compiler, network.

Each check returns findings and raises nothing. Disks are measured with a temporary file that has no name.
"""

from __future__ import annotations

import email.utils
import http.client
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from vorox.core.platform.environment import existing_parent, free_disk_bytes, usable_cores
from vorox.core.version import __version__

Status = Literal["ok", "warn", "fail"]

OLDEST_PYTHON = (3, 11)
MIN_SHARED_BYTES = 1 << 30
MIN_FREE_BYTES = 5 << 30
MIN_BYTES_PER_SECOND = 50e6
MAX_CLOCK_SKEW_SECONDS = 5.0
MAX_WINDOWS_PATH = 100
"""Triton appends names of up to 150 characters; Windows allows 260 in total."""

_SAMPLE_BYTES = 32 << 20
_NETWORK_TIMEOUT_SECONDS = 10.0
_PROGRAM = "#include <Python.h>\n#include <cmath>\nint vorox_probe(int x) { return static_cast<int>(std::sqrt(x)); }\n"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of ``vorox doctor``.

    Attributes:
        name: What was checked.
        status: ``warn``: training works, but slower or without an option. ``fail``: training does not work.
        text: What was found.
        remedy: What to do about it; empty if it is ok.
    """

    name: str
    status: Status
    text: str
    remedy: str = ""


def check_python() -> Finding:
    """Check the interpreter's version and word size."""
    text = f"{platform.python_version()} ({sys.executable}), Vorox {__version__}"
    if sys.version_info[:2] < OLDEST_PYTHON or sys.maxsize < 1 << 32:
        return Finding("python", "fail", text, "install a 64-bit Python 3.11 or newer")
    return Finding("python", "ok", text)


def check_processor(environment: Mapping[str, str]) -> Finding:
    """Check that the threads of numerical libraries are not limited to fewer than the usable cores."""
    cores, limit = usable_cores(), environment.get("OMP_NUM_THREADS", "")
    text = f"{cores} usable of {psutil.cpu_count()} cores"
    if limit.isdecimal() and int(limit) < cores:
        return Finding("processor", "warn", f"{text}; OMP_NUM_THREADS={limit}", "unset OMP_NUM_THREADS")
    return Finding("processor", "ok", text)


def check_memory(available_bytes: int | None = None) -> Finding:
    """Check the free host memory."""
    memory = psutil.virtual_memory()
    available = memory.available if available_bytes is None else available_bytes
    text = f"{_gib(available)} of {_gib(memory.total)} available"
    if available < 2 << 30:
        return Finding("memory", "warn", text, "end other programs; `vorox plan CONFIG` estimates the need of a run")
    return Finding("memory", "ok", text)


def check_shared_memory(folder: Path = Path("/dev/shm"), total_bytes: int | None = None) -> Finding:  # noqa: S108
    """Check the shared memory that the ranks of one machine exchange arrays through (NCCL, gloo)."""
    if not folder.is_dir():
        return Finding("shared memory", "ok", f"{folder} does not exist here; one rank needs none")
    usage = shutil.disk_usage(folder)
    total = usage.total if total_bytes is None else total_bytes
    text = f"{_gib(usage.free)} of {_gib(total)} free in {folder}"
    if total < MIN_SHARED_BYTES:
        remedy = f"start the container with --shm-size=8g, or `sudo mount -o remount,size=8G {folder}`"
        return Finding("shared memory", "warn", text, remedy)
    return Finding("shared memory", "ok", text)


def check_disk(name: str, folder: Path, setting: str, now_offset_seconds: float = 0.0) -> Iterator[Finding]:
    """Check free space, write speed and clock of the file system of an existing or future folder.

    Args:
        name: What the folder is for.
        folder: The folder.
        setting: What moves it elsewhere.
        now_offset_seconds: Added to the time of this machine; for tests.
    """
    existing = existing_parent(folder)
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            block = os.urandom(1 << 20)
            started = time.perf_counter()
            for _ in range(_SAMPLE_BYTES >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            rate = _SAMPLE_BYTES / (time.perf_counter() - started)
            skew = os.fstat(file.fileno()).st_mtime - (time.time() + now_offset_seconds)
    except OSError as error:
        yield Finding(name, "fail", f"{existing} cannot be written: {error.strerror}", f"set {setting}")
        return
    free = free_disk_bytes(existing)
    text = f"{_gib(free)} free, {rate / 1e6:,.0f} MB/s written in {folder}"
    if free < MIN_FREE_BYTES:
        yield Finding(name, "warn", text, f"free some space, or set {setting}")
    elif rate < MIN_BYTES_PER_SECOND:
        yield Finding(name, "warn", text, f"checkpoints will be slow: set {setting} to a local disk")
    else:
        yield Finding(name, "ok", text)
    if abs(skew) > MAX_CLOCK_SKEW_SECONDS:
        text = f"the file server of {folder} is {abs(skew):,.0f} s {'ahead' if skew > 0 else 'behind'}"
        yield Finding("clock", "warn", text, "synchronise the clocks of this machine and of the server (NTP)")


def check_clock(now: float | None = None) -> Finding:
    """Check that the clock is later than the installation of Vorox."""
    now = time.time() if now is None else now
    text = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < Path(__file__).stat().st_mtime - 86400:
        return Finding("clock", "warn", f"{text} is before the installation", "set the clock, or start an NTP client")
    return Finding("clock", "ok", text)


def check_open_files() -> Finding:
    """Check the limit of open files: every chunk of a cache that is being read is one."""
    try:
        import resource
    except ImportError:
        return Finding("open files", "ok", "no limit on this system")
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 4096:
        return Finding("open files", "warn", f"at most {hard:,}", "raise the hard limit (ulimit -Hn 65536)")
    return Finding("open files", "ok", "no limit" if hard == resource.RLIM_INFINITY else f"at most {hard:,}")


def check_compiler(environment: Mapping[str, str]) -> Finding:
    """Compile a short C++ program with Python's headers, as ``runtime.compile`` does."""
    name = "compiler"
    install = {
        "darwin": "xcode-select --install",
        "win32": "install Visual Studio Build Tools (C++), and start from its developer prompt",
    }.get(sys.platform, "sudo apt install g++ python3-dev")
    candidates = ["cl"] if sys.platform == "win32" else ["g++", "c++", "clang++"]
    words = shlex.split(environment.get("CXX", "")) or candidates
    command = [words[0], *words[1:]] if environment.get("CXX") else [next(filter(shutil.which, words), words[0])]
    if shutil.which(command[0]) is None:
        return Finding(name, "warn", f"{command[0]} was not found; runtime.compile=true needs it", install)
    include = sysconfig.get_path("include")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text(_PROGRAM, encoding="utf-8")
        flags = ["/c", f"/I{include}"] if command[0] == "cl" else ["-c", "-fPIC", f"-I{include}", "-o", "probe.o"]
        try:
            ended = subprocess.run(
                [*command, *flags, source.name], cwd=folder, capture_output=True, text=True, timeout=60, check=False
            )
        except (OSError, subprocess.SubprocessError) as error:
            return Finding(name, "warn", f"{command[0]} does not run: {error}", install)
    if ended.returncode:
        lines = [line for line in (ended.stderr or ended.stdout).split("\n") if "error" in line.lower()] or ["unknown"]
        return Finding(name, "warn", f"{command[0]} fails: {lines[0].strip()}", install)
    return Finding(name, "ok", f"{shutil.which(command[0])} compiles C++ with Python's headers")


def check_triton_cache(environment: Mapping[str, str], platform_name: str = sys.platform) -> Iterator[Finding]:
    """Check the folder of compiled Triton kernels, and the variables that change how they run."""
    given = environment.get("TRITON_CACHE_DIR")
    folder = Path(given) if given else Path.home() / ".triton" / "cache"
    existing = existing_parent(folder)
    text = f"{folder}" + ("" if given else " (default)")
    if not os.access(existing, os.W_OK):
        yield Finding("triton cache", "warn", f"{text} cannot be written", "set TRITON_CACHE_DIR to another folder")
    elif platform_name == "win32" and len(str(folder.absolute())) > MAX_WINDOWS_PATH:
        remedy = r"set TRITON_CACHE_DIR to a short path, such as C:\triton"
        yield Finding("triton cache", "warn", f"{text} is too long a path for Windows", remedy)
    else:
        yield Finding("triton cache", "ok", text)
    if environment.get("TRITON_INTERPRET", "0") not in {"", "0"}:
        remedy = "unset TRITON_INTERPRET; set it only to debug a kernel"
        yield Finding("triton", "warn", "TRITON_INTERPRET is set: kernels run in Python, very slowly", remedy)


def check_allocator(environment: Mapping[str, str], platform_name: str = sys.platform) -> Finding:
    """Check the settings of PyTorch's CUDA allocator."""
    value = environment.get("PYTORCH_CUDA_ALLOC_CONF") or environment.get("PYTORCH_ALLOC_CONF") or ""
    if platform_name == "win32" and "expandable_segments:true" in value.lower():
        remedy = "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"
        return Finding("allocator", "warn", f"{value}: Windows has no expandable segments", remedy)
    return Finding("allocator", "ok", value or "default settings")


def check_network(host: str = "huggingface.co", port: int = 443) -> Finding:
    """Check that a host answers HTTPS, and compare its clock with that of this machine."""
    connection = http.client.HTTPSConnection(host, port, timeout=_NETWORK_TIMEOUT_SECONDS)
    started = time.time()
    try:
        connection.request("HEAD", "/")
        date = connection.getresponse().getheader("Date")
    except (OSError, http.client.HTTPException) as error:
        remedy = "check DNS, proxy and firewall; only hf:// and other remote sources need the network"
        return Finding("network", "warn", f"{host} does not answer: {error}", remedy)
    finally:
        connection.close()
    text = f"{host} answered in {time.time() - started:.1f} s"
    skew = 0.0 if date is None else started - email.utils.parsedate_to_datetime(date).timestamp()
    if abs(skew) > MAX_CLOCK_SKEW_SECONDS:
        text += f"; this clock is {abs(skew):,.0f} s {'ahead' if skew > 0 else 'behind'}"
        return Finding("network", "warn", text, "synchronise the clock (NTP): stores refuse requests signed too early")
    return Finding("network", "ok", text)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.0f} MiB"
