"""The environment of a run: code version, interpreter, machine, library versions, variables.

The record is for audits and never an input; only ``usable_cores`` influences a run (the number of threads), and the
memory of the host and the free space of a disk decide whether it may start.
Environment variables are recorded from an allow-list, so secrets of the shell do not enter the run directory.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from vorox.core.version import __version__

RECORDED_VARIABLES = (
    "ATEN_CPU_CAPABILITY",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "HF_HUB_OFFLINE",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "LOCAL_RANK",
    "MKL_CBWR",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_NUM_THREADS",
    "PYTHONHASHSEED",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "SLURM_JOB_ID",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR",
    "TORCH_BLAS_PREFER_CUBLASLT",
    "TRITON_CACHE_DIR",
    "VOROX_CACHE",
    "WORLD_SIZE",
    "XLA_FLAGS",
)
"""Variables that libraries read, or that give the rank of this process."""

RECORDED_PACKAGES = (
    "flax",
    "jax",
    "jaxlib",
    "lz4",
    "numpy",
    "optax",
    "pyarrow",
    "pydantic",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "triton",
    "xxhash",
)

_GIT_TIMEOUT_SECONDS = 10.0


def environment_record() -> dict[str, Any]:
    """Return interpreter, machine, versions and allow-listed variables as plain JSON values."""
    import psutil

    return {
        "vorox": __version__,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "platform": {
            "system": platform.system(),
            "release": platform.release(),
            "machine": platform.machine(),
            "hostname": socket.gethostname(),
            "processor": processor_name(),
            "physical_cores": psutil.cpu_count(logical=False),
            "logical_cores": psutil.cpu_count(logical=True),
            "memory_bytes": host_memory_bytes(),
        },
        "packages": package_versions(),
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
    }


def package_versions() -> dict[str, str]:
    """Return the versions of packages that can change results, without importing them."""
    return dict(_package_versions())


@functools.cache
def _package_versions() -> dict[str, str]:
    import importlib.metadata

    versions: dict[str, str] = {}
    for name in RECORDED_PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def host_memory_bytes() -> int:
    """Return the memory of this machine."""
    import psutil

    return psutil.virtual_memory().total


def existing_parent(path: Path) -> Path:
    """Return a path, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def free_disk_bytes(path: Path) -> int:
    """Return the free space of the file system of an existing or future path."""
    return shutil.disk_usage(existing_parent(path)).free


def usable_cores() -> int:
    """Return the number of logical cores that this process may use, respecting its CPU affinity."""
    allowed = getattr(os, "sched_getaffinity", None)
    return len(allowed(0)) if allowed is not None else os.cpu_count() or 1


def processor_name() -> str:
    """Return the CPU model, as far as it is known."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def code_record() -> dict[str, Any] | None:
    """Return the commit of this package, or ``None`` if its files are not under version control."""
    source = Path(__file__).resolve()
    if _git(source.parent, "ls-files", "--error-unmatch", source.name) is None:
        return None  # installed into a folder inside an unrelated repository
    return git_record(source.parent)


def git_record(directory: Path) -> dict[str, Any] | None:
    """Return commit, branch and uncommitted changes of the repository around ``directory``; ``None`` without one.

    ``diff_sha256`` is the hash of ``git diff HEAD``. Remotes are not recorded, because their URLs can contain
    passwords.
    """
    status = _git(directory, "status", "--porcelain=v2", "--branch", "--untracked-files=no")
    if status is None:
        return None
    headers = dict(line[2:].split(" ", 1) for line in status.decode(errors="replace").splitlines() if line[:2] == "# ")
    dirty = any(line[:2] != b"# " for line in status.splitlines())
    diff = _git(directory, "diff", "HEAD") if dirty else None
    return {
        "commit": headers.get("branch.oid", ""),
        "branch": headers.get("branch.head", ""),
        "dirty": dirty,
        "diff_sha256": hashlib.sha256(diff).hexdigest() if diff is not None else "",
    }


def _git(directory: Path, *arguments: str) -> bytes | None:
    """Return the output of a read-only git command; ``None`` if it fails, times out or git is not installed."""
    command = ["git", "-C", str(directory), *arguments]
    try:
        finished = subprocess.run(
            command,
            capture_output=True,
            check=True,
            timeout=_GIT_TIMEOUT_SECONDS,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return finished.stdout
