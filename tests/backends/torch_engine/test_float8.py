"""Linear layers in 8-bit floats (``precision.float8``), against rounding in float64 and torchao's own modules.

The oracle rounds to 3 or 2 bits of mantissa in numpy and multiplies in float64; the emulated products are fp32, so
values agree within 1e-5 of the largest. ``_Oracle`` puts the same rounding into a whole plain model.

Shape legend: M positions, D inputs, O outputs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_runs
import vorox
from backends.torch_engine import transformers_models as hub
from backends.torch_engine.small_models import GPT2, LLAMA, batch_of, configuration, make, random_rows, randomise, train
from vorox.backends.torch_engine.device import devices
from vorox.backends.torch_engine.engine import TorchEngine
from vorox.backends.torch_engine.layers import kernels
from vorox.backends.torch_engine.layers.model import Linear
from vorox.backends.torch_engine.low_precision import float8_linear
from vorox.backends.torch_engine.low_precision.float8_linear import float8_kernels
from vorox.core.config import config_digest, load_config
from vorox.core.errors import ConfigError

pytestmark = pytest.mark.torch
RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]
EMULATED = {"precision__float8_emulate": True}
E4M3, E5M2 = (3, -6, 448.0), (2, -14, 57344.0)
"""Bits of the mantissa, smallest normal exponent, largest value."""
WIDE = LLAMA | {"intermediate_size": 48}
"""Its MLP has sizes that are multiples of 16, unlike the others (40)."""
has_float8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@pytest.fixture(autouse=True)
def _torchao() -> None:
    pytest.importorskip("torchao")


def rounded(x: np.ndarray, form: tuple[int, int, float], axis: int | None, power_of_two: bool) -> np.ndarray:
    """fp32 numbers rounded to 8-bit floats whose largest, over an axis or all, is the largest of the format."""
    bits, lowest, largest = form
    scale = (largest / np.abs(x).max(axis=axis, keepdims=True).astype(np.float64)).astype(np.float32)
    if power_of_two:
        scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(np.float32)
    scaled = np.clip((x * scale).astype(np.float64), -largest, largest)
    exponents = np.maximum(np.frexp(scaled)[1] - 1, lowest)
    steps = np.exp2((exponents - bits).astype(np.float64))
    return np.round(scaled / steps) * steps / scale.astype(np.float64)


def products(recipe: str, x_MD: np.ndarray, weight_OD: np.ndarray, d_y_MO: np.ndarray) -> tuple[np.ndarray, ...]:
    """Output, and gradients of input and weight, ``[M, O]``, ``[M, D]`` and ``[O, D]``, as torchao documents them."""
    if recipe == "tensorwise":
        x, weight = (rounded(array, E4M3, None, False) for array in (x_MD, weight_OD))
        d_y = rounded(d_y_MO, E5M2, None, False)
        return x @ weight.T, d_y @ weight, d_y.T @ x
    is_rowwise = recipe == "rowwise"
    y = rounded(x_MD, E4M3, 1, True) @ rounded(weight_OD, E4M3, 1, True).T
    d_x = rounded(d_y_MO, E4M3, 1, True) @ rounded(weight_OD, E4M3, 0 if is_rowwise else None, True)
    if is_rowwise:
        return y, d_x, rounded(d_y_MO, E4M3, 0, True).T @ rounded(x_MD, E4M3, 0, True)
    return y, d_x, d_y_MO.astype(np.float64).T @ x_MD


def close(found: torch.Tensor | None, expected: np.ndarray) -> None:
    assert found is not None
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("seed", range(3))
def test_a_linear_layer_equals_one_that_rounds_in_float64(recipe: Any, seed: int) -> None:
    generator = np.random.default_rng([seed, 17])
    shapes = (50, 64), (32, 64), 32, (50, 32)
    x, weight, bias, d_y = (generator.normal(size=shape).astype(np.float32) for shape in shapes)
    x[3] *= 1000  # so that the scales of rows matter
    config = configuration(precision__float8=recipe, **EMULATED)
    compute = devices.prepare(config)
    x_MD, weight_OD, bias_O = (torch.nn.Parameter(torch.from_numpy(array)) for array in (x, weight, bias))
    y_MO = float8_kernels(kernels.select(compute), compute, config.precision).linear(x_MD, weight_OD, bias_O)
    y_MO.backward(torch.from_numpy(d_y))
    y, d_x, d_weight = products(recipe, x, weight, d_y)
    close(y_MO, y + bias)
    close(x_MD.grad, d_x)
    close(weight_OD.grad, d_weight)
    close(bias_O.grad, d_y.astype(np.float64).sum(0))
    assert np.abs(y - x.astype(np.float64) @ weight.T).max() > 0.01, "rounding matters"


def test_a_matrix_of_other_sizes_is_not_rounded() -> None:
    config = configuration(precision__float8="tensorwise", **EMULATED)
    compute = devices.prepare(config)
    x_MD, weight_OD = torch.randn(16, 40), torch.nn.Parameter(torch.randn(32, 40))
    y_MO = float8_kernels(kernels.select(compute), compute, config.precision).linear(x_MD, weight_OD, None)
    torch.testing.assert_close(y_MO, x_MD @ weight_OD.detach().T)


class _Oracle(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MD: torch.Tensor, weight_OD: torch.Tensor, recipe: str) -> torch.Tensor:
        ctx.save_for_backward(x_MD, weight_OD)
        ctx.recipe = recipe
        nothing = np.ones((len(x_MD), len(weight_OD)), np.float32)
        return torch.from_numpy(products(recipe, x_MD.numpy(), weight_OD.detach().numpy(), nothing)[0]).float()

    @staticmethod
    def backward(ctx: Any, d_y_MO: torch.Tensor) -> Any:
        factors = [tensor.numpy() for tensor in (*ctx.saved_tensors, d_y_MO)]
        _, d_x, d_weight = products(ctx.recipe, *factors)
        return torch.from_numpy(d_x).float(), torch.from_numpy(d_weight).float(), None


def use_oracle(engine: TorchEngine, recipe: str) -> int:
    """Replace the products in the blocks of a plain engine; return how many."""
    layers = [
        module for module in engine.model.blocks.modules()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]
        if isinstance(module, Linear) and all(size % 16 == 0 for size in module.weight.shape)
    ]  # fmt: skip

    def linear(x_MD: torch.Tensor, weight_OD: torch.nn.Parameter, bias_O: torch.nn.Parameter | None) -> torch.Tensor:
        y_MO = _Oracle.apply(x_MD, weight_OD, recipe)
        return y_MO if bias_O is None else y_MO + bias_O

    for module in layers:
        module.kernel = linear
    return len(layers)


@pytest.mark.parametrize(
    ("recipe", "model", "num_layers", "overrides"),
    [
        *((recipe, WIDE | {"num_kv_heads": 2, "tie_embeddings": False}, 8, {}) for recipe in RECIPES),
        *((recipe, GPT2, 4, {"train__activation_checkpointing": "dots"}) for recipe in RECIPES),
        pytest.param(
            "rowwise_with_gw_hp",
            WIDE,
            8,
            {"runtime__compile": True},
            marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")],  # of the compiler's own modules
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_loss_and_gradients_are_those_of_the_rounded_products(
    recipe: str, model: dict[str, Any], num_layers: int, overrides: dict[str, Any]
) -> None:
    found = make(model, precision__float8=recipe, train__micro_batch_sequences=4, **EMULATED, **overrides)
    oracle, plain = (make(model, train__micro_batch_sequences=4) for _ in range(2))
    randomise(found)
    for engine in (oracle, plain):
        engine.import_weights(found.export_weights())
    assert use_oracle(oracle, recipe) == num_layers
    batch, engines = batch_of(random_rows(8, 50), 2, step=3), (found, oracle, plain)
    held_out = [engine.eval_step(batch).loss_sum for engine in engines]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    assert abs(held_out[2] - held_out[0]) > 1e-4 * held_out[0], "rounding matters"
    losses = [engine.train_step(batch, lr=0.0, weight_decay=0.0).fetch().loss for engine in engines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    mine, theirs, unrounded = (dict(engine.parameters.whole(engine.parameters.gradients)) for engine in engines)
    scale = max(float(gradient.norm()) for gradient in theirs.values())
    for name, gradient in theirs.items():
        # Elements that lie between two 8-bit numbers may be rounded the other way, which other elements follow.
        effect = float((unrounded[name] - gradient).norm())
        assert float((mine[name] - gradient).norm()) <= 0.1 * effect + 1e-6 * scale, name


def test_bf16_trains_as_without_it() -> None:
    losses = [
        train(make(WIDE, precision__dtype="bf16", **settings), 12)
        for settings in ({}, {"precision__float8": "rowwise", **EMULATED})
    ]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    assert losses[1] != losses[0]


@pytest.mark.hf
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_model_of_transformers_equals_the_one_that_torchao_converts(recipe: str, tmp_path: Path) -> None:
    """Loss and gradients of the plain model in transformers, converted by torchao except for its head."""
    transformers = pytest.importorskip("transformers")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    directory = hub.write_model(tmp_path / "model", "llama")
    overrides = [f"precision.float8={recipe}", "precision.float8_emulate=true", "optimizer.clip_norm=null"]
    engine = hub.engine_of(directory, *overrides, "data.document_mask=false")
    names = {name for name, layer in engine._network.module.named_modules() if "forward" in vars(layer)}
    assert len(names) == 14
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory)
    config = Float8LinearConfig.from_recipe_name(recipe)
    object.__setattr__(config, "emulate", True)
    convert_to_float8_training(theirs, config=config, module_filter_fn=lambda _, name: name != "lm_head")
    tokens = torch.from_numpy(random_rows(3, positions=hub.LENGTH)).long()
    logits_BTV = theirs(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = engine.train_step(batch_of(tokens.int().numpy()), lr=0.0, weight_decay=0.0).fetch()
    assert found.loss == pytest.approx(float(loss.detach()), rel=1e-5)
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, gradient in engine.parameters.whole(engine.parameters.gradients):
        expected = gradients[name]
        assert expected is not None
        assert float((gradient - expected).norm()) <= 1e-3 * float(expected.norm()), name


def test_a_killed_run_resumes_bit_for_bit_from_an_ordinary_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["precision.float8=tensorwise", "precision.float8_emulate=true", "log.matmul_peak=false"]
    whole, resumed = tiny_runs.whole_and_resumed(tmp_path, monkeypatch, TorchEngine, overrides)
    keys = ("fingerprint", "chain", "eval_losses")
    assert {key: resumed[key] for key in keys} == {key: whole[key] for key in keys}
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path / "plain", overrides[2:]))
    plain = tiny_runs.result(outcome)
    assert plain["losses"] != whole["losses"]
    (other,) = (tmp_path / "whole" / "runs").glob("tiny-*")
    names = ("model.safetensors", "optimizer.safetensors")
    for name in names:
        headers = [header(run / "checkpoints" / "step-00000012" / name) for run in (outcome.run_directory, other)]
        assert headers[0] == headers[1]
    assert json.loads((other / "run.json").read_text())["attempts"][0]["notes"]["environment"]["torchao"]


def header(file: Path) -> dict[str, Any]:
    """Names, formats and shapes of the arrays of a safetensors file."""
    content = file.read_bytes()
    values = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    values.pop("__metadata__", None)
    return values


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("backend=jax", "backend=torch"),
        ("model.hidden_size=72", "multiple of 16"),
        ("parallel.kind=deepspeed", "is not supported with"),
    ],
)
def test_what_it_does_not_support_is_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("quickstart", ["precision.float8=tensorwise", override])


def test_a_device_without_float8_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"compute capability 8\.9") as error:
        make(precision__float8="tensorwise")
    assert error.value.exit_code == 2
    assert "precision.float8_emulate=true" in str(error.value.hint)


def test_emulation_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="no effect"):
        load_config("quickstart", ["precision.float8_emulate=true"])


@pytest.mark.hf
def test_transposed_matrices_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    directory = hub.write_model(tmp_path / "model", "gpt2")
    with pytest.raises(ConfigError, match="no linear layer"):
        hub.engine_of(directory, "precision.float8=tensorwise", "precision.float8_emulate=true")


def test_a_teacher_is_not_rounded() -> None:
    from vorox.backends.torch_engine.networks.teacher import open_teacher

    plain = make(LLAMA)
    outputs: list[np.ndarray] = []
    for settings in ({}, {"precision__float8": "tensorwise", **EMULATED}):
        teacher, _ = open_teacher(configuration(LLAMA, **settings), plain._spec, plain.export_weights())
        outputs.append(teacher.top_logits(batch_of(random_rows(2)), 0, 5)[1])
    assert np.array_equal(*outputs)


def test_a_run_is_opened_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a laptop opens what a GPU trained."""
    settings = ["backend=torch", "precision.float8=tensorwise", "precision.float8_emulate=true", "train.num_steps=4"]
    outcome = tiny_runs.run(tiny_runs.configuration(tmp_path, [*settings, "log.matmul_peak=false"]))

    def refuse(*_: object) -> None:
        raise AssertionError("a product in 8-bit floats")

    monkeypatch.setattr(float8_linear, "float8_product", refuse)
    model = vorox.load_model(outcome.run_directory)
    assert np.isfinite(model.logits(np.ones((1, 8), np.int32))).all()


def test_it_is_part_of_the_digest_only_where_it_is_set() -> None:
    key = "precision.float8"
    settings = [], [f"{key}=null"], [f"{key}=tensorwise"], [f"{key}=rowwise"], [f"{key}=rowwise", f"{key}_emulate=true"]
    assert len({config_digest(load_config("quickstart", overrides)) for overrides in settings}) == 4


@pytest.mark.gpu
@pytest.mark.skipif(not has_float8, reason="no GPU with 8-bit floats")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("positions", [24, 23])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")  # of the compiler's own modules
def test_a_gpu_trains_as_the_emulation(recipe: str, positions: int, compiled: bool) -> None:
    settings = {"precision__float8": recipe, "precision__dtype": "bf16", "data__sequence_length_tokens": positions}
    emulated = make(WIDE, **settings, **EMULATED)
    there = make(WIDE, **settings, runtime__device="cuda", runtime__compile=compiled)
    found: list[list[float]] = []
    for engine in (emulated, there):
        batches = [batch_of(random_rows(5, step, positions), step=step) for step in range(8)]
        found.append([engine.train_step(one, lr=3e-3, weight_decay=0.1).fetch().loss for one in batches])
    assert found[1] == pytest.approx(found[0], rel=0.01)
