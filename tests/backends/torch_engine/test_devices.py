"""What the machine cannot do is refused with the key; what it can is set, and recorded."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from backends.torch_engine.small_models import LLAMA, configuration, engine_of
from vorox.backends.torch_engine.device import devices
from vorox.backends.torch_engine.ranks.distributed import ranks
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema import RunConfig

pytestmark = pytest.mark.torch
CUDA = torch.device("cuda", 0)
MANY_HEADS = LLAMA | {"vocab_size": 65, "num_heads": 16, "intermediate_size": 48}


def refused(config: RunConfig, key: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        devices.prepare(config)
    assert key in caught.value.where


@pytest.mark.parametrize(
    ("settings", "key", "message"),
    [
        ({"model": LLAMA | {"num_heads": 8, "num_kv_heads": 2}}, "model.num_kv_heads", "= 2 is not divisible by"),
        ({"model": LLAMA | {"intermediate_size": 42}}, "model.intermediate_size", "= 42 is not divisible by"),
        ({"model": MANY_HEADS, "parallel__tensor_parallel_size": 16}, "", "65 tokens cannot be divided"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_tensor_parallelism_cannot_divide_is_refused(settings: dict[str, Any], key: str, message: str) -> None:
    config = configuration(**{"parallel__tensor_parallel_size": 4, **settings})
    with pytest.raises(ConfigError, match=message) as caught:
        engine_of(config)
    assert key in caught.value.where
    assert "parallel.tensor_parallel_size" in caught.value.where
    assert caught.value.hint


def test_tensor_parallelism_needs_its_ranks() -> None:
    with pytest.raises(ConfigError, match="1 x 1 x 2 = 2, but the run has 1 process") as caught:
        engine_of(configuration(parallel__tensor_parallel_size=2))
    assert "--nproc 2" in caught.value.hint


def test_a_layout_of_other_size_than_the_world_is_refused() -> None:
    config = configuration(parallel__fsdp_size=2)
    with pytest.raises(ConfigError, match="1 x 2 = 2, but the run has 1 process") as caught:
        ranks(config, DistributedContext(), torch.device("cpu"))
    assert "--nproc 2" in caught.value.hint


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_a_device_that_is_not_there(kind: str) -> None:
    if {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[kind]:
        pytest.skip(f"this machine has {kind}")
    refused(
        configuration(runtime__device=kind), "runtime.device", f"device = {kind}, but PyTorch .* finds no such device"
    )


def test_tf32_is_for_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    refused(
        configuration(precision__matmul="tf32"), "precision.matmul", "tf32 needs an NVIDIA GPU; this device is a cpu"
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla T4")
    with pytest.raises(ConfigError, match="Tesla T4 has no TensorFloat-32"):
        devices._set_float32_products("tf32", CUDA)


def test_bf16_is_for_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100")
    with pytest.raises(ConfigError, match="bf16 is not supported by Tesla V100") as caught:
        devices._select_dtype("bf16", CUDA)
    assert "fp16" in caught.value.hint
    assert devices._select_dtype("fp16", CUDA) is torch.float16


@pytest.mark.parametrize(("present", "expected"), [(("cuda", "mps"), "cuda"), (("mps",), "mps"), ((), "cpu")])
def test_auto_takes_the_first_that_exists(
    present: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: "cuda" in present)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: "mps" in present)
    assert devices._select_device("auto").type == expected


class TestDeterminism:
    def test_levels(self) -> None:
        assert devices.prepare(configuration()).determinism == "bitwise"
        for level in ("none", "data", "bitwise", "bitwise-any-world"):
            assert devices.prepare(configuration(runtime__determinism=level)).determinism == level

    def test_threads_do_not_depend_on_the_ranks_of_a_machine(self) -> None:
        """Another number of threads adds in another order."""
        exact = configuration(runtime={"device": "cpu", "determinism": "bitwise-any-world"})
        before = torch.get_num_threads()
        try:
            assert devices.prepare(exact).num_threads == 1
            assert devices.prepare(configuration(runtime={"device": "cpu"})).num_threads == devices.physical_cores()
        finally:
            torch.set_num_threads(before)

    def test_d2_is_refused_where_it_cannot_be_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="bitwise is not supported on mps"):
            devices._set_determinism("bitwise", torch.device("mps"), compiled=False)
        with pytest.raises(ConfigError, match="compiled CUDA kernels"):
            devices._set_determinism("bitwise", CUDA, compiled=True)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
        with pytest.raises(ConfigError, match="needs CUBLAS_WORKSPACE_CONFIG to be set before CUDA starts"):
            devices._set_determinism("bitwise", CUDA, compiled=False)

    def test_d2_on_cuda_tells_pytorch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[bool] = []
        monkeypatch.setattr(torch, "use_deterministic_algorithms", asked.append)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", lambda _: None)
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
        monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
        devices._set_determinism("bitwise", CUDA, compiled=False)
        assert asked == [True]
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "what the user set is kept"
        assert not torch.utils.deterministic.fill_uninitialized_memory
        devices._set_determinism("data", CUDA, compiled=True)
        assert asked == [True, False]


class TestThreads:
    def test_given(self) -> None:
        assert devices.prepare(configuration(runtime__num_threads=2)).num_threads == 2
        assert torch.get_num_threads() == 2
        assert devices.prepare(configuration(runtime__num_threads=1)).num_threads == 1
        assert torch.get_num_threads() == 1

    def test_default_is_the_physical_cores_that_we_may_use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        devices.physical_cores.cache_clear()
        monkeypatch.setattr(devices.psutil, "cpu_count", lambda logical: 8 if logical else 4)
        monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
        assert devices.physical_cores() == 3
        devices.physical_cores.cache_clear()
        monkeypatch.setattr(devices.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
        assert devices.physical_cores() == 4
        devices.physical_cores.cache_clear()


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [("AuthenticAMD", "AVX512", "onednn"), ("GenuineIntel", "AVX512", "blas"), ("AuthenticAMD", "AVX2", "blas")],
)
def test_products_follow_from_the_processor(
    vendor: str, capability: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_is_intel", lambda: vendor == "GenuineIntel")
    monkeypatch.setattr(devices, "has_onednn_linear", lambda: True)
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    assert devices._select_products(torch.device("cpu")) == expected
    assert devices._select_products(CUDA) == "blas"


def test_a_resume_takes_over_the_choices_of_its_run() -> None:
    """A run of a device that has dense masks only, and one of this kind of device."""
    engine = engine_of(configuration())
    own = dict(engine.environment())
    assert own["document_attention"] == "slices"
    for recorded in (own | {"document_attention": "mask"}, own):
        engine.adopt_environment(recorded)
        assert engine.environment() == recorded


def test_environment_records_what_decides_the_bits() -> None:
    found = engine_of(configuration()).environment()
    assert found["torch"] == torch.__version__
    assert found["num_threads"] == 1
    assert found["device_kind"] == "cpu"
    assert found["determinism"] == "bitwise"
    assert found["matrix_products"] in {"blas", "onednn"}
    assert found["instruction_set"] == torch.backends.cpu.get_cpu_capability()
