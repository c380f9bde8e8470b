"""Quantisation-aware training (``train.quantization_aware``), against rounding in float64 and torchao.

The straight-through gradient of a weight is the gradient at the rounded weights, so a plain engine that holds the
rounded weights is the oracle of loss and gradients. Numbers are fp32: loss to 1e-6, gradients to 1e-4 of the largest.

Shape legend: M positions, R rows, I inputs, O outputs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_runs
from backends.torch_engine import transformers_models as hub
from backends.torch_engine.small_models import GPT2, LLAMA, batch_of, configuration, make, random_rows, randomise
from rounding import round_int4, round_int8
from vorox.backends.torch_engine.device import devices
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.layers.kernels import select
from vorox.backends.torch_engine.low_precision.fake_quantization import quantize_kernels
from vorox.core.config import config_digest, load_config
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch
SCHEMES = ["int8-weight-only", "int8-dynamic", "int4"]
KEY = "train__quantization_aware"


ROUND = {
    "int8-weight-only": (round_int8, lambda x: x.astype(np.float64)),
    "int8-dynamic": (round_int8, round_int8),
    "int4": (round_int4, lambda x: x.astype(np.float64)),
}


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("num_inputs", [64, 40])
def test_a_linear_layer_equals_one_that_rounds_in_float64(scheme: Any, num_inputs: int) -> None:
    generator = np.random.default_rng(3)
    shapes = (50, num_inputs), (24, num_inputs), 24, (50, 24)
    x_MI, weight_OI, bias_O, d_y_MO = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
    compute = devices.prepare(configuration())
    kernels = quantize_kernels(select(compute), compute, scheme)
    x, weight, bias = (torch.nn.Parameter(torch.from_numpy(array)) for array in (x_MI, weight_OI, bias_O))
    y = kernels.linear(x, weight, bias)
    y.backward(torch.from_numpy(d_y_MO))
    round_weight, round_inputs = ROUND[scheme]
    rounded_x, rounded_weight = round_inputs(x_MI), round_weight(weight_OI)
    expected = [
        (y, rounded_x @ rounded_weight.T + bias_O), (x.grad, d_y_MO @ rounded_weight),
        (weight.grad, d_y_MO.T @ rounded_x), (bias.grad, d_y_MO.sum(0)),
    ]  # fmt: skip
    for found, oracle in expected:
        assert found is not None
        np.testing.assert_allclose(found.detach().numpy(), oracle, rtol=1e-5, atol=1e-5 * np.abs(oracle).max())
    is_rounded = scheme != "int4" or num_inputs == 64
    assert (np.abs(rounded_weight - weight_OI).max() > 1e-3) == is_rounded


def test_rounding_is_that_of_torchao() -> None:
    quantization = pytest.importorskip("torchao.quantization")
    from vorox.backends.torch_engine.low_precision import affine_quantization

    for dtype in (torch.float32, torch.bfloat16):
        x_RI = torch.randn(17, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
        theirs = quantization.Int8Tensor.from_hp(x_RI, quantization.PerRow()).dequantize()
        torch.testing.assert_close(affine_quantization.round_int8(x_RI), theirs, rtol=0, atol=0)


def rounded_weights(engine: TorchEngine, scheme: str) -> list[tuple[str, np.ndarray]]:
    """The weights of an engine with the matrices of the blocks rounded."""
    matrices = {row.name for row in engine._spec.parameters if row.kind == "matrix"}
    return [
        (name, ROUND[scheme][0](array).astype(np.float32) if name in matrices else array)
        for name, array in engine.export_weights()
    ]


@pytest.mark.parametrize("scheme", ["int8-weight-only", "int4"])
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        (LLAMA | {"num_kv_heads": 2, "tie_embeddings": False}, {}),
        (GPT2, {"train__activation_checkpointing": "dots", "train__micro_batch_sequences": 4}),
        pytest.param(LLAMA, {"precision__dtype": "bf16"}, marks=pytest.mark.slow),
        pytest.param(
            LLAMA,
            {"runtime__compile": True},
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")],  # of the compiler's own modules
        ),
    ],
    ids=["llama", "gpt2, dots", "bf16", "compiled"],
)
def test_loss_and_gradients_are_those_of_the_rounded_weights(
    scheme: str, model: dict[str, Any], overrides: dict[str, Any]
) -> None:
    found, plain = make(model, **{KEY: scheme}, **overrides), make(model, **overrides)
    randomise(found)
    plain.import_weights(rounded_weights(found, scheme))
    batch = batch_of(random_rows(8, 50), 8 // found._config.train.micro_batch_rows, step=3)
    is_coarse = "precision__dtype" in overrides
    held_out = [engine.eval_step(batch).loss_sum for engine in (found, plain)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-3 if is_coarse else 1e-6)
    values = [engine.train_step(batch, lr=0.0, weight_decay=0.0).fetch() for engine in (found, plain)]
    assert values[0].loss == pytest.approx(values[1].loss, rel=1e-3 if is_coarse else 1e-6)
    mine, theirs = (dict(engine.parameters.whole(engine.parameters.gradients)) for engine in (found, plain))
    for name, gradient in theirs.items():
        bound = (0.05 if is_coarse else 1e-4) * float(gradient.abs().max())
        torch.testing.assert_close(mine[name], gradient, rtol=0, atol=bound, msg=name)
    unrounded = make(model, **overrides)
    unrounded.import_weights(found.export_weights())
    assert abs(unrounded.eval_step(batch).loss_sum - held_out[0]) > 3e-5 * held_out[0], "rounding matters"


@pytest.mark.hf
@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_model_of_transformers_rounds_what_compress_quantises(scheme: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    from vorox.backends.torch_engine.low_precision import quantization

    directory = hub.write_model(tmp_path / "model", name)
    (tmp_path / "small").mkdir()
    quantization.quantize(directory, tmp_path / "small", scheme)
    small = quantization.load_quantized(tmp_path / "small", "cpu")
    engine = hub.engine_of(directory, f"train.quantization_aware={scheme}")
    plain = hub.engine_of(directory)
    rounded = {name for name, layer in engine._network.module.named_modules() if "forward" in vars(layer)}
    quantised = {
        name for name, layer in small.named_modules()
        if type(layer).__name__ == "_CpuInt4Linear" or type(getattr(layer, "weight", None)).__name__ == "Int8Tensor"
    }  # fmt: skip
    divisible = {name for name in rounded if not (scheme == "int4" and name.endswith("down_proj"))}  # of 48 inputs
    assert divisible == quantised
    assert len(quantised) >= 12
    batch = hub.batch_of(0)
    losses = [one.eval_step(batch).loss_sum for one in (engine, plain)]
    theirs = quantization.TransformersModel(tmp_path / "small", "cpu").eval_step(batch).loss_sum
    distance = abs(losses[0] - losses[1])
    # bf16 with int4; and the input of largest magnitude lies between two values, so rounding decides it (int8-dynamic).
    assert abs(losses[0] - theirs) < max((0.1 if scheme == "int8-weight-only" else 0.5) * distance, 1e-5 * theirs)


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["train.quantization_aware=int8-dynamic", "log.matmul_peak=false"]
    whole, resumed = tiny_runs.whole_and_resumed(tmp_path, monkeypatch, TorchEngine, overrides)
    keys = ("fingerprint", "chain", "eval_losses")
    assert {key: resumed[key] for key in keys} == {key: whole[key] for key in keys}
    plain = tiny_runs.result(tiny_runs.run(tiny_runs.configuration(tmp_path / "plain", overrides[1:])))
    assert plain["losses"] != whole["losses"]


@pytest.mark.hf
def test_transposed_matrices_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="no linear layer to quantise"):
        hub.engine_of(hub.write_model(tmp_path / "model", "gpt2"), "train.quantization_aware=int4")


def test_a_teacher_is_not_rounded() -> None:
    from vorox.backends.torch_engine.networks.teacher import open_teacher

    plain = make(LLAMA)
    outputs: list[np.ndarray] = []
    for settings in ({}, {KEY: "int4"}):
        teacher, _ = open_teacher(configuration(LLAMA, **settings), plain._spec, plain.export_weights())
        outputs.append(teacher.top_logits(batch_of(random_rows(2)), 0, 5)[1])
    assert np.array_equal(*outputs)


def test_it_is_part_of_the_digest_only_where_it_is_set() -> None:
    key = "train.quantization_aware"
    settings = [], [f"{key}=null"], [f"{key}=int4"], [f"{key}=int8-dynamic"]
    assert len({config_digest(load_config("quickstart", overrides)) for overrides in settings}) == 3
