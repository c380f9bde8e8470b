"""Judge the installations of frameworks, from the reports of child processes and of the driver.

A report is what ``backends/*/installation_report.py`` prints; ``nvidia-smi`` reports the GPUs of the driver.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vorox.core.pluralize import pluralize
from vorox.runtime.machine_checks import Finding

_SMI_TIMEOUT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """One GPU as the driver reports it."""

    name: str
    driver: str
    memory_mib: int
    used_mib: int


def driver_gpus() -> list[DriverGpu] | str:
    """Return the GPUs that ``nvidia-smi`` lists, or why it lists none; empty without the program."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,memory.used", "--format=csv,noheader,nounits"]
    try:
        ended = subprocess.run(query, capture_output=True, text=True, timeout=_SMI_TIMEOUT_SECONDS, check=False)
    except FileNotFoundError:
        return []
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    if ended.returncode:
        return (ended.stdout + ended.stderr).strip().split("\n")[0]
    return parse_driver_gpus(ended.stdout)


def parse_driver_gpus(table: str) -> list[DriverGpu]:
    """Parse the table of ``nvidia-smi``; an unknown number is 0."""
    rows = [[cell.strip() for cell in line.rsplit(",", 3)] for line in table.splitlines() if line.count(",") >= 3]
    numbers = [[int(cell) if cell.isdecimal() else 0 for cell in row[2:]] for row in rows]
    return [DriverGpu(row[0], row[1], total, used) for row, (total, used) in zip(rows, numbers, strict=True)]


def check_driver(gpus: Sequence[DriverGpu] | str) -> Finding:
    """Judge the driver."""
    if isinstance(gpus, str):
        return Finding("driver", "fail", f"nvidia-smi fails: {gpus}", "restart the machine, or reinstall the driver")
    if not gpus:
        return Finding("driver", "ok", "no NVIDIA driver; training uses the CPU")
    used = max(gpu.used_mib / max(1, gpu.memory_mib) for gpu in gpus)
    text = f"NVIDIA {gpus[0].driver}, {pluralize(len(gpus), 'GPU')}"
    if used > 0.1:
        text += f", {used:.0%} of the memory of one in use"
        return Finding("driver", "warn", text, "other programs use the GPU; `nvidia-smi` lists them")
    return Finding("driver", "ok", text)


def check_frameworks(
    reports: Mapping[str, Mapping[str, Any]],
    problems: Mapping[str, str],
    installs: Mapping[str, str],
    gpus: Sequence[DriverGpu] | str,
) -> Iterator[Finding]:
    """Judge every framework.

    Args:
        reports: Report by backend.
        problems: Why there is no report, by backend, for installed frameworks that fail.
        installs: The command that installs a framework, by backend, in the order of the findings.
        gpus: The GPUs of the driver.
    """
    num_gpus = 0 if isinstance(gpus, str) else len(gpus)
    for framework in installs:
        if framework in reports:
            yield from _judge(framework, reports[framework], num_gpus)
        elif framework in problems:
            yield Finding(
                framework, "fail", problems[framework], f"reinstall it: {installs[framework]} --force-reinstall"
            )
        elif reports or problems:
            yield Finding(framework, "ok", f"not installed; only backend={framework} needs it")
        else:
            yield Finding(framework, "fail", "not installed, and no other engine is", installs[framework])


def _judge(framework: str, report: Mapping[str, Any], num_gpus: int) -> Iterator[Finding]:
    devices: Sequence[Mapping[str, Any]] = report["devices"]
    accelerators = [device for device in devices if device["kind"] != "cpu"]
    text = f"{report['version']} ({report['built_for']})"
    broken = next((device for device in devices if device["problem"]), None)
    if broken is not None:
        remedy = "install a build for this device (https://pytorch.org/get-started)"
        yield Finding(framework, "fail", f"{text}: {broken['name']} fails: {broken['problem']}", remedy)
        return
    if num_gpus and not accelerators:
        remedy = f"install {report['cuda_build']}, or check CUDA_VISIBLE_DEVICES and the driver's version"
        yield Finding(framework, "warn", f"{text} does not use the {pluralize(num_gpus, 'GPU')} of the driver", remedy)
        return
    yield Finding(framework, "ok", f"{text}; {_devices(devices)}")
    if "has_triton" in report:
        yield from _kernels(report, accelerators)


def _devices(devices: Sequence[Mapping[str, Any]]) -> str:
    names = [f"{device['name']}{_memory(device)}" for device in devices]
    return ", ".join(
        f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)
    )


def _memory(device: Mapping[str, Any]) -> str:
    memory, capability = device.get("memory_bytes"), device.get("capability")
    facts = [f"{memory / 2**30:.1f} GiB"] if memory else []
    facts += [f"capability {capability}"] if capability else []
    facts += ["no bf16"] if device.get("has_bf16") is False else []
    return f" ({', '.join(facts)})" if facts else ""


def _kernels(report: Mapping[str, Any], accelerators: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Judge flash attention and Triton."""
    cuda = [device for device in accelerators if device["kind"] == "cuda"]
    if not cuda:
        yield Finding("flash attention", "ok", "not used without a CUDA device")
        return
    problem = next((device["flash_attention"] for device in cuda if device.get("flash_attention")), "")
    if problem:
        remedy = "attention runs with PyTorch's other kernels, slower; GPUs from Ampere on (8.0) have it"
        yield Finding("flash attention", "warn", problem, remedy)
    else:
        yield Finding("flash attention", "ok", "PyTorch's kernel runs on this GPU")
    if not report["has_triton"]:
        remedy = "pip install triton-windows on Windows, triton elsewhere"
        yield Finding("triton", "warn", "not installed; runtime.compile=true needs it on a GPU", remedy)
