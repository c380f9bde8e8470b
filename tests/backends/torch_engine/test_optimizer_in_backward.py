"""Updates in the backward pass against the ordinary update, bit for bit, and the gradients that exist meanwhile."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.torch_engine import transformers_models
from backends.torch_engine.small_models import LLAMA, MODELS, PATTERNS, batch_of, make, random_rows, train
from backends.torch_engine.test_checkpoint import save
from tiny_runs import Killed, configuration, kill, result, run
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.optimizers.optimizer_in_backward import TransientGradients
from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.errors import ConfigError
from vorox.planning.memory_estimate import memory_per_device
from vorox.training.replay import replay

pytestmark = pytest.mark.torch
NEEDED: dict[str, Any] = {"optimizer__clip_norm": None, "train__max_nonfinite_steps": 0}
DEEP = LLAMA | {"num_layers": 6, "tie_embeddings": False}


def pair(model: dict[str, Any], **overrides: Any) -> tuple[TorchEngine, TorchEngine]:
    """An engine that updates after the backward pass, and one that updates in it."""
    return make(model, **NEEDED, **overrides), make(model, optimizer__in_backward=True, **NEEDED, **overrides)


def observe(engine: TorchEngine) -> list[tuple[str, bool, int]]:
    """Record name, whether a backward pass runs, and bytes of all gradients, at every update."""
    found: list[tuple[str, bool, int]] = []
    parameters = engine.parameters
    assert isinstance(parameters, TransientGradients)
    update = parameters.on_complete

    def recorded(name: str) -> None:
        found.append((name, torch._C._current_graph_task_id() != -1, live_bytes(engine)))
        update(name)

    parameters.on_complete = recorded
    return found


def live_bytes(engine: TorchEngine) -> int:
    return sum(one.grad.nbytes for one in engine.parameters.modules.values() if one.grad is not None)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adamw, tied": (LLAMA, {}),
    "adamw, untied": (DEEP, {}),
    "adamw, biases": (MODELS["gpt2"], {"train__ema_decay": 0.9}),
    "adamw, experts": (MODELS["mixtral"], {}),
    "adamw, Mamba-2": (PATTERNS["hybrid, rotary, gated"], {}),
    "adamw, frozen": (DEEP, {"optimizer__groups": [{"match": "blocks.0.*", "frozen": True}]}),
    "adamw, recomputed": (DEEP, {"train__activation_checkpointing": "block"}),
    "adamw, recomputed in part": (DEEP, {"train__activation_checkpointing": "dots"}),
    "muon, tied": (LLAMA, {"optimizer__name": "muon"}),
    "muon, grouped queries": (MODELS["qwen3"], {"optimizer__name": "muon"}),
    "muon, experts": (MODELS["mixtral"], {"optimizer__name": "muon"}),
    "adamw, bf16": (DEEP, {"precision__dtype": "bf16"}),
    "muon, bf16": (DEEP, {"precision__dtype": "bf16", "optimizer__name": "muon"}),
}


@pytest.mark.parametrize("case", CASES)
def test_twenty_steps_equal_the_update_after_the_backward_pass(case: str) -> None:
    model, overrides = CASES[case]
    after, within = pair(model, **overrides)
    updates = observe(within)
    assert train(after, 20) == train(within, 20)
    assert after.fingerprint() == within.fingerprint()
    assert all(in_backward for _, in_backward, _ in updates)
    assert len(updates) == 20 * sum(one.requires_grad for one in within.parameters.modules.values())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_compiled_blocks(name: str) -> None:
    after, within = pair(LLAMA, optimizer__name=name, runtime__compile=True)
    assert train(after, 20) == train(within, 20)
    assert after.fingerprint() == within.fingerprint()


@pytest.mark.hf
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers(name: str, tmp_path: Path) -> None:
    directory = transformers_models.write_model(tmp_path, name)
    settings = ["optimizer.clip_norm=null", "train.max_nonfinite_steps=0"]
    engines = [
        transformers_models.engine_of(directory, *settings, *more) for more in ([], ["optimizer.in_backward=true"])
    ]
    updates, batch = observe(engines[1]), transformers_models.batch_of(0)
    for _ in range(20):
        losses = [engine.train_step(batch, lr=1e-3, weight_decay=0.1).fetch().loss for engine in engines]
        assert losses[0] == losses[1]
    assert engines[0].fingerprint() == engines[1].fingerprint()
    assert all(in_backward for _, in_backward, _ in updates)
    planned = memory_per_device(engines[1]._spec, engines[1]._config).gradient_bytes
    assert max(held for _, _, held in updates) <= planned < live_bytes(engines[0])


@pytest.mark.hf
def test_a_model_that_runs_documents_one_by_one_is_refused(tmp_path: Path) -> None:
    directory = transformers_models.write_model(tmp_path, "bloom")
    settings = ["optimizer.clip_norm=null", "train.max_nonfinite_steps=0", "optimizer.in_backward=true"]
    with pytest.raises(ConfigError, match="one backward pass"):
        transformers_models.engine_of(directory, *settings)


@pytest.mark.parametrize("tied", [True, False])
def test_gradients_that_exist_at_a_time(tied: bool) -> None:
    """At most those of one block, and of a tied embedding, as planned; none after the backward pass."""
    after, within = pair(DEEP | {"tie_embeddings": tied})
    updates = observe(within)
    train(after, 1)
    train(within, 1)
    peak, planned = max(held for _, _, held in updates), memory_per_device(within._spec, within._config).gradient_bytes
    assert peak <= planned
    assert memory_per_device(after._spec, after._config).gradient_bytes == live_bytes(after)
    assert peak < live_bytes(after) / 5
    assert live_bytes(within) == 0
    assert not within.parameters.gradients
    assert planned < 3 * peak, "the plan counts one whole block"


def test_the_norm_of_all_gradients_is_reported() -> None:
    after, within = pair(DEEP)
    norms = [
        engine.train_step(batch_of(random_rows(8)), lr=1e-3, weight_decay=0.1).fetch().grad_norm
        for engine in (after, within)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-6)


def test_a_rehearsed_step_changes_nothing() -> None:
    engine = make(DEEP, optimizer__in_backward=True, **NEEDED)
    train(engine, 2)
    before = engine.fingerprint()
    engine.train_step(batch_of(random_rows(8)), lr=0.1, weight_decay=0.1, max_loss=-math.inf).fetch()
    assert engine.fingerprint() == before
    train(engine, 1)
    assert engine.fingerprint() != before


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    engine = make(DEEP, optimizer__in_backward=True, **NEEDED)
    train(engine, 2)
    with torch.no_grad():
        engine.parameters.modules["final_norm.weight"].fill_(float("nan"))
    before = engine.fingerprint()
    assert not engine.train_step(batch_of(random_rows(8)), lr=0.1, weight_decay=0.1).fetch().finite
    assert engine.fingerprint() == before
    found = engine.locate_nonfinite(batch_of(random_rows(8)))
    assert found is not None
    assert found.micro_batch == 0


def test_a_gradient_that_is_not_finite_is_not_applied_and_reported() -> None:
    """The other parameters are updated, so the configuration must stop the run after such a step."""
    engine = make(DEEP, optimizer__in_backward=True, precision__dtype="bf16", **NEEDED)
    train(engine, 2)
    before = {name: array.copy() for name, array in engine.export_weights()}
    hook = engine.parameters.modules["blocks.3.mlp.down.weight"].register_hook(lambda gradient: gradient * math.inf)
    values = engine.train_step(batch_of(random_rows(8)), lr=0.1, weight_decay=0.1).fetch()
    hook.remove()
    assert math.isfinite(values.loss)
    assert not values.finite
    after = dict(engine.export_weights())
    assert [name for name in after if np.array_equal(after[name], before[name])] == ["blocks.3.mlp.down.weight"]


def test_a_parameter_that_is_used_after_its_update_is_an_error() -> None:
    """Autograd compares versions: its saved value is gone, and the gradient would be that of other weights."""
    engine = make(DEEP, optimizer__in_backward=True, **NEEDED)
    parameter = engine.parameters.modules["blocks.5.mlp.down.weight"]
    saved = torch.ones(parameter.shape[1], requires_grad=True)
    later = (parameter.detach() * saved).sum()
    train(engine, 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        later.backward()


def test_a_second_backward_pass_in_a_step_is_refused() -> None:
    engine = make(DEEP, optimizer__in_backward=True, **NEEDED)
    with pytest.raises(ConfigError, match="two backward passes"):
        engine.train_step(batch_of(random_rows(8), 2), lr=1e-3, weight_decay=0.1)


def test_a_loaded_state_continues_bit_for_bit(tmp_path: Path) -> None:
    straight, first, second = (make(DEEP, optimizer__in_backward=True, **NEEDED) for _ in range(3))
    losses = train(straight, 8)
    train(first, 5)
    second.load(save(first, tmp_path / "state"))
    assert train(second, 3, start=5) == losses[5:]
    assert second.fingerprint() == straight.fingerprint()


RUN = [
    "backend=torch", "optimizer.in_backward=true", "optimizer.clip_norm=null", "train.max_nonfinite_steps=0",
    "train.micro_batch_sequences=4", "runtime.rehearsal=true",
]  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_ends_as_the_straight_one_and_replays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    straight = run(configuration(tmp_path, [*RUN, "run.name=straight"]))
    config, train_step, calls = configuration(tmp_path, [*RUN, "run.name=killed"]), TorchEngine.train_step, []

    def killed(engine: TorchEngine, *arguments: Any, **rates: Any) -> Any:
        calls.append(train_step(engine, *arguments, **rates))
        if len(calls) == 8:  # the rehearsal, and seven steps
            kill()
        return calls[-1]

    with monkeypatch.context() as patch:
        patch.setattr(TorchEngine, "train_step", killed)
        with pytest.raises(Killed):
            run(config)
    resumed = run(config)
    assert result(resumed) == result(straight)
    from training.test_replay import make_workload

    assert replay(resumed.run_directory, make_workload).difference is None


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"optimizer__name": "adamw_8bit"}, "optimizer.name"),
        ({"optimizer__name": "torch.optim:SGD"}, "optimizer.name"),
        ({"optimizer__clip_norm": 1.0}, "optimizer.clip_norm"),
        ({"train__micro_batch_sequences": 4}, "train.micro_batch_sequences"),
        ({"train__max_nonfinite_steps": 3}, "train.max_nonfinite_steps"),
        ({"train__spike_policy": "skip"}, "train.spike_policy"),
        ({"train__forward_backward": "own.py:step"}, "train.forward_backward"),
        ({"precision__dtype": "fp16"}, "precision.dtype"),
        ({"parallel__kind": "deepspeed"}, "parallel.kind"),
        ({"parallel__data_parallel_size": 2}, "parallel.data_parallel_size"),
        ({"parallel__fsdp_size": 2}, "parallel.fsdp_size"),
        ({"parallel__tensor_parallel_size": 2}, "parallel.tensor_parallel_size"),
        ({"parallel__pipeline_parallel_size": 2}, "parallel.pipeline_parallel_size"),
        ({"runtime__recompute_every_steps": 2}, "runtime.recompute_every_steps"),
        ({"runtime__determinism": "bitwise-any-world"}, "runtime.determinism"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_needs_all_gradients_is_refused(settings: dict[str, Any], key: str) -> None:
    from small_configurations import configuration as small

    def keys(*, in_backward: bool, **more: Any) -> set[str]:
        config = small(LLAMA, optimizer__in_backward=in_backward, **{**NEEDED, **more})
        return {
            key for problem in find_problems(config) if "optimizer.in_backward" in problem.what for key in problem.keys
        }

    assert key in keys(in_backward=True, **settings)
    assert not keys(in_backward=True)
    assert not keys(in_backward=False, **settings)
