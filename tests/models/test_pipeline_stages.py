"""Stages of a pipeline and their memory, against counts by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from small_configurations import POSITIONS, VOCAB, configuration
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.divisibility import check_divisible
from vorox.models.huggingface.spec import HuggingFaceSpec
from vorox.models.module_spec import Row
from vorox.models.pipeline_stages import StagePlacement, parameters_of, tied_embedding
from vorox.models.spec import Kind
from vorox.planning.memory_estimate import memory_per_device


def config_of(schedule: str = "1f1b", size: int = 2, **settings: Any) -> tuple[RunConfig, DecoderSpec]:
    config = configuration(
        {"num_layers": 5}, parallel__pipeline_parallel_size=size, train__micro_batch_sequences=2,
        **({"parallel__pipeline_schedule": schedule} if size > 1 else {}), **settings,
    )  # fmt: skip
    return config, decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)


@pytest.mark.parametrize(
    ("num_layers", "num_devices", "per_device", "expected"),
    [
        (4, 2, 1, [[[0, 1]], [[2, 3]]]),
        (5, 2, 2, [[[0, 1], [3]], [[2], [4]]]),
        (7, 3, 1, [[[0, 1, 2]], [[3, 4]], [[5, 6]]]),
    ],
)
def test_blocks_are_divided_evenly_in_order(
    num_layers: int, num_devices: int, per_device: int, expected: list[list[list[int]]]
) -> None:
    schedule = "1f1b" if per_device == 1 else "interleaved"
    config, _ = config_of(schedule, num_devices)
    placement = StagePlacement.of(num_layers, config.parallel)
    found = placement.devices
    assert [[list(stage.layers) for stage in stages] for stages in found] == expected
    assert [stage.is_first for stage in found[0]] == [True] + [False] * (per_device - 1)
    assert [stage.is_last for stage in found[-1]] == [False] * (per_device - 1) + [True]
    assert [placement.device_of(index) for index in range(num_devices * per_device)] == [
        *range(num_devices)
    ] * per_device


def test_the_embedding_is_on_the_first_and_with_a_tied_head_on_the_last_device() -> None:
    config, spec = config_of()
    devices = StagePlacement.of(5, config.parallel).devices
    first, last = ({row.name for row in parameters_of(spec, stages)} for stages in devices)
    assert first & last == {"embedding.weight"}
    assert first | last == {row.name for row in spec.parameters}
    assert "final_norm.weight" in last
    assert "blocks.2.mlp.down.weight" in first
    untied = replace(spec, tie_embeddings=False)
    own_head = {row.name for row in parameters_of(untied, devices[1])}
    assert own_head == last - {"embedding.weight"} | {"head.weight"}


def transformers_spec(model_type: str = "gpt2", **values: object) -> HuggingFaceSpec:
    """A table with the names of GPT-2: a tied embedding, positions, four blocks, the final norm."""
    rows = [("transformer.wte.weight", "embedding"), ("transformer.wpe.weight", "embedding")]
    rows += [(f"transformer.h.{layer}.mlp.c_fc.weight", "tensor") for layer in range(4)]
    rows.append(("transformer.ln_f.weight", "norm"))
    table = tuple(Row(name, (4, 4), cast("Kind", kind), decay=True, trainable=True) for name, kind in rows)
    return HuggingFaceSpec({"model_type": model_type, **values}, table, 4, 4, 4, 64)


def test_parameters_of_a_model_of_transformers_are_found_by_number_and_role() -> None:
    spec, (config, _) = transformers_spec(), config_of()
    devices = StagePlacement.of(4, config.parallel).devices
    first, last = ([row.name for row in parameters_of(spec, stages)] for stages in devices)
    assert tied_embedding(spec) == "transformer.wte.weight"
    blocks = [f"transformer.h.{layer}.mlp.c_fc.weight" for layer in range(4)]
    assert first == ["transformer.wte.weight", "transformer.wpe.weight", *blocks[:2]]
    assert last == ["transformer.wte.weight", *blocks[2:], "transformer.ln_f.weight"]


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        (transformers_spec(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0), ""),
        (transformers_spec(), "resid_pdrop of config.json = 0.1"),
        (transformers_spec("mamba"), "the mamba model"),
        (transformers_spec("mixtral"), "the mixtral model"),
        (transformers_spec(resid_pdrop=0.1), "resid_pdrop of config.json = 0.1"),
    ],
    ids=["supported", "dropout by default", "mamba", "experts", "dropout"],
)
def test_a_model_of_transformers_that_a_pipeline_cannot_divide_is_refused(spec: HuggingFaceSpec, what: str) -> None:
    config = configuration(
        {"kind": "huggingface", "name_or_path": "x"}, parallel__pipeline_parallel_size=2, train__micro_batch_sequences=2
    )
    if not what:
        check_divisible(config, spec)
        return
    with pytest.raises(ConfigError, match=f"A pipeline does not support {what}") as caught:
        check_divisible(config, spec)
    assert "gpt2, llama, mistral, olmo2, phi3, qwen2, qwen3" in str(caught.value.hint)


def test_memory_is_that_of_the_device_that_needs_most() -> None:
    """Four micro-batches: the first of two devices has three of five blocks and keeps two micro-batches."""
    (config, spec), (one, _) = config_of(), config_of(size=1)
    found, whole = memory_per_device(spec, config), memory_per_device(spec, one)
    here = [row for row in spec.parameters if row.name.startswith(("embedding", "blocks.0.", "blocks.1.", "blocks.2."))]
    assert found.parameter_bytes == pytest.approx(4 * sum(row.num_elements for row in here), abs=2)
    assert found.optimizer_bytes == pytest.approx(2 * found.parameter_bytes, abs=4)
    assert found.logits_bytes == 0
    row = spec.saved_activations(POSITIONS, 4)
    received = 4 * row.block_input_bytes  # the gradients of its output
    assert found.activation_bytes == pytest.approx(
        2 * (2 * 3 * row.largest_block_bytes + 2 * row.block_input_bytes + received), abs=2
    )
    assert found.saved_moment_bytes == whole.saved_moment_bytes
    interleaved, spec = config_of("interleaved")
    kept = (2 - 1) * 2 + 2 * (2 - 0 - 1) + 1  # passes through a stage of at most two blocks
    received = 3 * 4 * row.block_input_bytes  # an input and two gradients
    assert memory_per_device(spec, interleaved).activation_bytes == pytest.approx(
        2 * (kept * 2 * row.largest_block_bytes + 2 * row.block_input_bytes + received), abs=2
    )


def test_tensor_and_sequence_parallelism_divide_the_memory_of_a_stage() -> None:
    """Four ranks: each has half of a stage's state, and with sequence parallelism half of the inputs of its blocks."""
    settings: dict[str, Any] = {"train__activation_checkpointing": "block"}
    (whole, spec), (tensor, _) = config_of(**settings), config_of(parallel__tensor_parallel_size=2, **settings)
    sequence, _ = config_of(parallel__tensor_parallel_size=2, parallel__sequence_parallel=True, **settings)
    stage, divided = memory_per_device(spec, whole), memory_per_device(spec, tensor)
    assert divided.parameter_bytes == pytest.approx(stage.parameter_bytes / 2, abs=1)
    assert divided.optimizer_bytes == pytest.approx(stage.optimizer_bytes / 2, abs=1)
    assert divided.activation_bytes == stage.activation_bytes
    row = spec.saved_activations(POSITIONS, 4)
    streams = 2 * 3 + 2 + 4  # inputs of three blocks of two micro-batches, the ends, and four received gradients
    assert stage.activation_bytes - memory_per_device(spec, sequence).activation_bytes == pytest.approx(
        2 * streams * row.block_input_bytes / 2, abs=2
    )
