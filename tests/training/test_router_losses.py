"""Load-balancing losses of trained mixtures of experts: as ``config.json`` asks, with transformers as the oracle."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrained_models import VOCAB, reference, write_pretrained
from tiny_runs import configuration
from vorox.cli.settings.training_settings import training_settings
from vorox.core.batch import Batch, DataCursor
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.planned_run import resolve_model
from vorox.run import train
from vorox.training.origin.configuration import load_resolved
from vorox.training.origin.model_origin import ModelOrigin
from vorox.training.weights.init_from import init_from_weights

pytest.importorskip("transformers")
pytestmark = [pytest.mark.torch, pytest.mark.hf]

LENGTH, COEFFICIENT = 16, 0.5
NATIVE, TRANSFORMERS = "decoder", "huggingface"


def words_of(directory: Path, kind: str) -> list[str]:
    place = f"train.from_weights={directory}" if kind == NATIVE else f"model.name_or_path={directory}"
    return [
        place, f"model.kind={kind}", "backend=torch", "runtime.device=cpu", f"data.sequence_length_tokens={LENGTH}",
        "train.global_batch_sequences=2", "train.micro_batch_sequences=2", "train.num_steps=2", "optimizer.name=adamw",
        "optimizer.clip_norm=1000", "eval.prompts=[]",
    ]  # fmt: skip


def batch_of() -> Batch:
    """Two rows without padding, with a target at every position."""
    tokens = np.random.default_rng(3).integers(2, VOCAB, (1, 2, LENGTH + 1), np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (1, 2, LENGTH)).copy()
    return Batch(
        0, tokens[..., :-1].copy(), tokens[..., 1:].copy(), np.ones((1, 2, LENGTH), np.int32), positions,
        np.ones((1, 2), np.uint64), 2 * LENGTH, DataCursor("", 0, 1, 0, 0),
    )  # fmt: skip


def gradient_norm(directory: Path, kind: str, *extra: str) -> float:
    from vorox.backends.torch_engine.engine import create

    config = load_resolved("quickstart", [*words_of(directory, kind), *extra]).config
    spec = resolve_model(config, VOCAB)
    engine = create(config, spec, DistributedContext())
    init_from_weights(config, spec, engine)
    return engine.train_step(batch_of(), lr=1e-4, weight_decay=0.0).fetch().grad_norm


def expected_norm(directory: Path) -> float:
    """The gradient of the loss of transformers: cross entropy, and what ``output_router_logits`` adds."""
    import torch

    module, _ = reference(directory)
    batch = batch_of()
    tokens, labels = (torch.from_numpy(array[0]).long() for array in (batch.tokens_ABT, batch.labels_ABT))
    output: Any = module.train()(input_ids=tokens, labels=tokens, shift_labels=labels, use_cache=False)
    output.loss.backward()
    squares = (value.grad.double().square().sum() for value in module.parameters() if value.grad is not None)
    return float(sum(squares, torch.zeros((), dtype=torch.float64)).sqrt())


def write(directory: Path, model_type: str, *, asks: bool, num_layers: int) -> Path:
    values: dict[str, Any] = {"output_router_logits": asks, "router_aux_loss_coef": COEFFICIENT}
    return write_pretrained(directory, model_type, num_hidden_layers=num_layers, **values)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("asks", [False, True])
def test_both_paths_have_the_gradient_of_transformers(model_type: str, asks: bool, tmp_path: Path) -> None:
    """With one layer, where the loss over all layers of transformers is that of a layer."""
    place = write(tmp_path / "base", model_type, asks=asks, num_layers=1 if asks else 2)
    expected = expected_norm(place)
    for kind in (NATIVE, TRANSFORMERS):
        assert gradient_norm(place, kind) == pytest.approx(expected, rel=1e-4), kind
    before = gradient_norm(place, NATIVE, "loss.load_balancing_weight=2.5")
    assert before != pytest.approx(expected, rel=1e-3), "it would show"


def test_the_weight_and_its_place_are_shown(tmp_path: Path) -> None:
    silent = write(tmp_path / "silent", "mixtral", asks=False, num_layers=2)
    found = load_resolved("quickstart", words_of(silent, NATIVE))
    place = f"train.from_weights={silent}: config.json"
    assert found.config.loss.load_balancing_weight == 0
    assert f"no load-balancing loss ({place})" in training_settings(found.config, found.origin)
    asking = write(tmp_path / "asking", "mixtral", asks=True, num_layers=2)
    found = load_resolved("quickstart", words_of(asking, NATIVE))
    assert found.config.loss.load_balancing_weight == COEFFICIENT * 2 / 2, "two experts a token, two layers"
    typed = load_resolved("quickstart", [*words_of(asking, NATIVE), "loss.load_balancing_weight=0.01"])
    assert typed.config.loss.load_balancing_weight == 0.01
    for directory, said in ((silent, "no load-balancing loss"), (asking, "a load-balancing loss of weight 0.5")):
        known = load_resolved("quickstart", words_of(directory, TRANSFORMERS)).pretrained
        assert known is not None
        assert any(said in note and "config.json" in note for note in known.notes), known.notes


def test_weights_of_a_run_keep_what_the_run_had(tmp_path: Path) -> None:
    experts = ("model.num_experts=4", "loss.load_balancing_weight=0.02", "loss.router_z_loss_weight=0.003")
    run = train(configuration(tmp_path, ["backend=torch", "runtime.num_threads=1", *experts])).run_directory
    words = [word for word in words_of(run, NATIVE) if not word.startswith("data.")]
    found = load_resolved("quickstart", words)
    assert (found.config.loss.load_balancing_weight, found.config.loss.router_z_loss_weight) == (0.02, 0.003)
    assert found.origin("loss.load_balancing_weight") == f"train.from_weights={run}: its run"


@pytest.mark.parametrize(
    ("model_type", "values"),
    [
        ("jetmoe", {"aux_loss_coef": COEFFICIENT, "num_local_experts": 4, "kv_channels": 8, "num_key_value_heads": 4}),
    ],
)
def test_other_names_of_the_coefficient_are_read(model_type: str, values: dict[str, Any], tmp_path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(7)
    shared = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
    config = transformers.AutoConfig.for_model(
        model_type, **shared, max_position_embeddings=64, output_router_logits=True, num_experts_per_tok=2, **values
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    from pretrained_models import write_tokenizer

    place = write_tokenizer(tmp_path / "base")
    assert gradient_norm(place, TRANSFORMERS) == pytest.approx(expected_norm(place), rel=1e-4)


def origin_of(values: dict[str, Any]) -> ModelOrigin:
    return ModelOrigin("base", None, None, values, None, None, {}, {})


@pytest.mark.parametrize("key", ["num_routed_experts", "moe_num_experts", "num_local_experts"])
def test_experts_under_any_name_are_reported(key: str) -> None:
    assert "no load-balancing loss" in (origin_of({"model_type": "other", key: 4}).router_note() or "")
    assert origin_of({"model_type": "other"}).router_note() is None


def test_the_softmax_loss_of_bamba_is_adopted() -> None:
    values = {"model_type": "bamba", "z_loss_coefficient": 0.25}
    origin = origin_of(values)
    assert origin.losses()[0] == {"z_loss_weight": 0.25}
    assert dataclasses.replace(origin, values={"model_type": "bamba"}).losses()[0] == {}
