"""The profiler of the PyTorch engine: ``torch.profiler`` on the host and the GPU.

In: the steps between start and stop. Out: a Chrome trace, and the same events as intervals and operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function

from vorox.core.step_profile import BETWEEN_STEPS, PHASE_PREFIX, Activity, Interval, Operator, Phase

_COLLECTIVES = ("nccl", "gloo:", "c10d::", "_c10d_functional::", "record_param_comms")
"""Prefixes of the names of collectives: operators on the host, and kernels of NCCL (``ncclDevKernel_...``)."""


class TorchRecording:
    """See ``core.step_profile.StepRecording``. Shapes, stacks and memory are not recorded.

    Args:
        trace: The file to write, ``.json.gz``.
        device: Device of the run.
    """

    def __init__(self, trace: Path, device: torch.device) -> None:
        self._trace, self._on_host, self._is_open = trace, device.type == "cpu", True
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profile = profile(activities=activities)
        self._profile.start()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._profile.stop()

    def save(self) -> Activity:
        self._profile.export_chrome_trace(str(self._trace))
        events = self._profile.events() or []
        on_host = [event for event in events if event.device_type.name == "CPU"]
        kernels = [event for event in events if event.device_type.name != "CPU" and not event.is_user_annotation]
        work = [event for event in on_host if _is_operator(event)] if self._on_host else kernels
        waits = on_host if self._on_host else [event for event in on_host if event.name.startswith("gloo:")]
        phases = [
            Phase(event.name.removeprefix(PHASE_PREFIX), _interval(event))
            for event in on_host
            if event.name.startswith(PHASE_PREFIX)
        ]
        between = [phase.interval for phase in phases if phase.name in BETWEEN_STEPS]
        operators = [
            event
            for event in on_host
            if (not event.is_user_annotation or _is_collective(event))
            and not any(start <= _interval(event)[0] < end for start, end in between)
        ]
        return Activity(
            phases=phases,
            # On other devices than CPU and CUDA, nothing but the host is measured.
            compute=[_interval(event) for event in work if not _is_collective(event)] if work else None,
            communication=[_interval(event) for event in [*kernels, *waits] if _is_collective(event)],
            operators=_by_name(operators),
        )


def _is_operator(event: FunctionEvent) -> bool:
    """Whether an event on the host is compute, and not a function in Python or a node of autograd around it."""
    if event.is_user_annotation or event.name.startswith(("autograd::", "torch::autograd::")):
        return False
    return "::" in event.name or "Compiled" in event.name


def _is_collective(event: FunctionEvent) -> bool:
    return event.name.startswith(_COLLECTIVES)


def _interval(event: FunctionEvent) -> Interval:
    return event.time_range.start / 1e6, event.time_range.end / 1e6


def _by_name(events: Sequence[FunctionEvent]) -> list[Operator]:
    sums: dict[str, Operator] = {}
    for event in events:
        _, num_calls, host_seconds, device_seconds = sums.get(event.name, Operator(event.name, 0, 0.0, 0.0))
        sums[event.name] = Operator(
            event.name, num_calls + 1, host_seconds + event.self_cpu_time_total / 1e6,
            device_seconds + event.self_device_time_total / 1e6,
        )  # fmt: skip
    return list(sums.values())
