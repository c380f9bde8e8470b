"""The state of FSDP2 in host memory (``parallel.fsdp_offload``), as far as one process without a GPU can show it.

``ranks/test_torch_ranks.py`` trains two ranks with it on the CPU, where it changes nothing.
"""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from backends.torch_engine.small_models import LLAMA, POSITIONS, VOCAB, configuration, make
from vorox.backends.torch_engine.device.results import TorchStepResult
from vorox.backends.torch_engine.layouts.sharded_parameters import ShardedParameters
from vorox.backends.torch_engine.optimizers.optimizer import Optimizer
from vorox.backends.torch_engine.ranks.distributed import Ranks
from vorox.core.config import load_config
from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.optimizer_groups import optimizer_groups
from vorox.planning.memory_estimate import memory_per_device

pytestmark = pytest.mark.torch

KEY = "parallel.fsdp_offload"
FSDP: dict[str, Any] = {"parallel__fsdp_size": 2}
OFFLOAD = FSDP | {"parallel__fsdp_offload": True}


class Mesh:
    """A mesh of two ranks, of which this is the first."""

    def __init__(self, device_type: str) -> None:
        self.device_type = device_type

    def __getitem__(self, name: str) -> Mesh:
        return self

    def get_local_rank(self, name: str) -> int:
        return 0


def spec_of(config: RunConfig) -> DecoderSpec:
    return decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)


@pytest.mark.parametrize(("device_type", "offload"), [("cuda", True), ("cpu", True), ("cpu", False)])
def test_every_unit_gets_the_policy(monkeypatch: pytest.MonkeyPatch, device_type: str, offload: bool) -> None:
    """Pinned memory, from which a GPU copies while the host goes on, exists with CUDA only."""
    config = configuration(LLAMA)
    spec = spec_of(config)
    ranks = Ranks(num_fsdp_shards=2, mesh=cast("Any", Mesh(device_type)))
    parameters = ShardedParameters(spec, optimizer_groups(spec, config.optimizer), ranks=ranks)
    named = {name.replace(".", "_"): parameter for name, parameter in parameters.modules.items()}
    blocks, rest = [nn.ParameterDict(), nn.ParameterDict()], nn.ParameterDict()
    for name, parameter in named.items():
        owner = blocks[int(name.split("_")[1])] if name.startswith("blocks_") else rest
        owner[name] = parameter
    model, calls = nn.ModuleList([*blocks, rest]), list[tuple[nn.Module, Any]]()

    def fully_shard(module: nn.Module, **options: Any) -> None:
        calls.append((module, options["offload_policy"]))

    monkeypatch.setattr(torch.distributed.fsdp, "fully_shard", fully_shard)
    parameters.shard(model, blocks, torch.float32, reshard=True, offload=offload)
    assert [module for module, _ in calls] == [*blocks, model]
    for _, policy in calls:
        assert type(policy) is (CPUOffloadPolicy if offload else OffloadPolicy)
        assert getattr(policy, "pin_memory", False) is (offload and device_type == "cuda")
    assert {parameter.device.type for parameter in parameters.modules.values()} == {"cpu"}


@pytest.mark.parametrize("offload", [False, True])
def test_the_update_runs_where_the_state_is(offload: bool) -> None:
    """``meta`` stands in for a GPU."""
    engine, config = make(LLAMA), configuration(LLAMA, **(OFFLOAD if offload else FSDP))
    compute = dataclasses.replace(engine.compute, device=torch.device("meta"))
    optimizer = Optimizer(config, engine.parameters, compute, Ranks())
    assert optimizer.updates.device.type == ("cpu" if offload else "meta")


def test_numbers_of_the_host_join_those_of_the_device() -> None:
    scalars = {"loss": torch.zeros((), device="meta"), "grad_norm": torch.ones(()), "finite": torch.tensor(True)}
    result = TorchStepResult(scalars, {"parameter_norm": torch.ones(())}, None, torch.zeros(4))
    assert (result._values.device.type, result._values.shape) == ("meta", (8,))


def test_a_gpu_has_room_for_what_it_gathers_only() -> None:
    spec = spec_of(configuration(LLAMA))
    kept, moved = (memory_per_device(spec, configuration(LLAMA, **settings)) for settings in (FSDP, OFFLOAD))
    expected = dataclasses.replace(kept, parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0)
    assert moved == expected != kept
    on_cpu = [memory_per_device(spec, configuration(LLAMA, **settings), "cpu") for settings in (FSDP, OFFLOAD)]
    assert on_cpu[0] == on_cpu[1]


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"parallel__tensor_parallel_size": 2}, "parallel.tensor_parallel_size"),
        ({"parallel__pipeline_parallel_size": 2}, "parallel.pipeline_parallel_size"),
        ({"parallel__context_parallel_size": 2}, "parallel.context_parallel_size"),
        ({"optimizer__name": "muon"}, "optimizer.name"),
        ({"precision__dtype": "fp16"}, "precision.dtype"),
        ({"loss__name": "dpo"}, "loss.name"),
        ({"runtime__compile": True}, "runtime.compile"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_it_does_not_support_is_refused(settings: dict[str, Any], key: str) -> None:
    def named(settings: dict[str, Any]) -> set[str]:
        problems = find_problems(configuration(LLAMA, **settings))
        return {key for problem in problems if KEY in problem.what for key in problem.keys}

    assert {key, KEY} <= named(OFFLOAD | settings)
    assert named(FSDP | settings) == set()
    assert named(OFFLOAD) == set()


@pytest.mark.parametrize("settings", [["parallel.fsdp_size=1"], ["parallel.fsdp_size=2", "backend=jax"]])
def test_without_shards_of_pytorch_it_is_refused(settings: list[str]) -> None:
    base = [f"{KEY}=true", "backend=torch", "optimizer.name=adamw"]
    load_config("quickstart", [*base, "parallel.fsdp_size=2"])
    with pytest.raises(ConfigError, match=KEY):
        load_config("quickstart", [*base, *settings])
