"""The first screen of the menu: the devices of this machine, and whether memory and disks have room."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import vorox
from vorox import backends
from vorox.cli.terminal import humanize
from vorox.cli.terminal.output import print_wrapped
from vorox.cli.training.menu.questions import title
from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.errors import VoroxError
from vorox.core.platform.environment import free_disk_bytes, processor_name, usable_cores
from vorox.core.platform.windows_variables import windows_variables
from vorox.core.pluralize import pluralize
from vorox.core.schema import RunConfig
from vorox.data.corpus.cache_location import root_of
from vorox.planned_run import planned_model
from vorox.planning.hardware import Hardware
from vorox.planning.resource_plan import plan_resources
from vorox.records.run_lookup import short_path
from vorox.runtime.machine_checks import MIN_FREE_BYTES, check_memory, check_shared_memory

_NAME_COLUMNS = 15
_COMPILED_HIDDEN_SIZE = 512
"""Smaller models are trained in about the time that compiling takes."""


def print_machine(root: Path, hardware: Hardware) -> None:
    """Print what training uses on this machine and why, and what is scarce."""
    title(f"Vorox {vorox.__version__}")
    print_wrapped(
        (f"  {name:<{_NAME_COLUMNS}}{text}" for name, text in _lines(root, hardware)), indent_columns=_NAME_COLUMNS + 2
    )


def _lines(root: Path, hardware: Hardware) -> Iterator[tuple[str, str]]:
    if hardware.is_cpu:
        yield "device", f"{pluralize(usable_cores(), 'core')} of {processor_name()}; no NVIDIA GPU was found"
    else:
        memory = humanize.size(hardware.memory_bytes)
        yield "device", f"{hardware.num_devices} x {hardware.product}, {memory} usable on each"
        if hardware.num_devices > 1:
            yield "", f"training uses one; --nproc {hardware.num_devices} uses all"
    has_shared_memory = sys.platform == "linux"
    for finding in (check_memory(), *([check_shared_memory()] if has_shared_memory else ())):
        yield finding.name, finding.text
        yield from [("", f"-> {finding.remedy}")] if finding.remedy else []
    caches = root_of(None)
    for name, folder in (("disk of runs", root), ("disk of caches", caches)):
        free = free_disk_bytes(folder)
        text = f"{humanize.size(free)} free in {short_path(folder.absolute())}"
        yield name, text + ("; -> free some space" if free < MIN_FREE_BYTES else "")
    for name in windows_variables(Path()) if sys.platform == "win32" else ():
        yield "", f"{name}={os.environ.get(name)}"


def settings_for_machine(config: RunConfig, hardware: Hardware) -> list[tuple[str, str]]:
    """Return the settings that suit one GPU of this machine better than those of a preset, each with the reason."""
    if hardware.is_cpu:
        return []
    found: list[tuple[str, str]] = []
    if config.precision.dtype == "fp32" and hardware.devices.has_bf16:
        found.append(("precision.dtype=bf16", f"{hardware.product} computes bf16 faster than fp32, in half the memory"))
        config = config.model_copy(update={"precision": config.precision.model_copy(update={"dtype": "bf16"})})
    if _is_faster_compiled(config) and _has_triton():
        why = "fewer, larger kernels: GPT-2 124M ran 1.35 times as fast on an H200; the first step takes longer"
        found.append(("runtime.compile=true", why))
    return [*found, *_settings_for_memory(config, hardware)]


def _is_faster_compiled(config: RunConfig) -> bool:
    """Whether the model can be compiled, and is large enough that this saves more time than it takes."""
    model, runtime = config.model, config.runtime
    if runtime.compile or backends.always_compiles(config.backend) or model.hidden_size < _COMPILED_HIDDEN_SIZE:
        return False
    if runtime.determinism in {"bitwise", "bitwise-any-world"}:  # refused on GPUs only, so by the engine
        return False
    # A user's function may not be traceable, and experts stay outside of the graphs.
    if any(part is not None for part in (model.block, model.mlp, model.num_experts, config.train.forward_backward)):
        return False
    compiled = config.model_copy(update={"runtime": runtime.model_copy(update={"compile": True})})
    return len(find_problems(compiled)) <= len(find_problems(config))


def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _settings_for_memory(config: RunConfig, hardware: Hardware) -> Iterator[tuple[str, str]]:
    """Yield settings with which a run fills the memory of one GPU, or fits into it at all."""
    usable = hardware.devices.usable.memory_bytes
    try:
        plan = plan_resources(config, planned_model(config), replace(hardware, num_devices=1, memory_bytes=usable))
    except VoroxError:
        return  # its size depends on the text
    limit = f"{hardware.devices.usable_fraction:.0%} of {humanize.size(hardware.memory_bytes)}"
    largest = plan.largest_micro_batch_sequences
    if not plan.fits and plan.alternatives:
        cheapest = plan.alternatives[0]
        for setting in cheapest.settings:
            yield setting, f"fits into {limit}; cost: {cheapest.cost}"
    elif plan.fits and largest > plan.config.train.micro_batch_rows:
        yield f"train.micro_batch_sequences={largest}", f"fits into {limit}; larger products run faster"
