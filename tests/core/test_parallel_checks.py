"""Configurations that context, sequence and expert parallelism do not support, rows and heads that do not divide."""

from __future__ import annotations

from typing import Any

import pytest

from small_configurations import POSITIONS, VOCAB, configuration
from vorox.core.config import load_config
from vorox.core.config.checks.cross_checks import find_problems
from vorox.core.errors import ConfigError
from vorox.core.schema import RunConfig
from vorox.models.decoder.spec import decoder_spec
from vorox.models.divisibility import check_divisible
from vorox.models.huggingface.spec import HuggingFaceSpec

SIZE = "parallel.context_parallel_size"
TRANSFORMERS = {"kind": "huggingface", "name_or_path": "somewhere"}
EXPERTS = {"num_experts": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def config_of(model: dict[str, Any] | None = None, size: int = 2, **settings: Any) -> RunConfig:
    return configuration(model or {}, parallel__context_parallel_size=size, **settings)


def named_keys(config: RunConfig) -> set[str]:
    return {key for problem in find_problems(config) for key in problem.keys}


def test_what_fits_has_no_problem() -> None:
    assert SIZE not in named_keys(config_of())
    assert "model.kind" not in named_keys(config_of(TRANSFORMERS))
    assert SIZE not in named_keys(config_of({"dropout_fraction": 0.1}, parallel__fsdp_size=2))
    assert SIZE not in named_keys(config_of(TRANSFORMERS, parallel__tensor_parallel_size=2))
    assert SIZE not in named_keys(config_of(parallel__pipeline_parallel_size=2, parallel__tensor_parallel_size=2))


@pytest.mark.parametrize(
    "config",
    [
        config_of(TRANSFORMERS, parallel__pipeline_parallel_size=2), config_of(runtime__compile=True),
        config_of(train__forward_backward="step.py:run"),
        config_of(runtime__determinism="bitwise-any-world"), config_of({"block": "block.py:Block"}),
        config_of({"num_experts": 4}), config_of({"kind": "model.py:Model"}),
        config_of(loss__name="dpo"), config_of(train__distillation={"teacher": "run"}), config_of(size=5),
    ],
    ids=["transformers pipeline", "compile", "step", "any world", "block", "experts", "kind", "dpo", "teacher", "rows"],
)  # fmt: skip
def test_what_is_not_supported_is_refused(config: RunConfig) -> None:
    assert SIZE in named_keys(config)
    alone = config.parallel.model_copy(update={"context_parallel_size": 1})
    assert SIZE not in named_keys(config.model_copy(update={"parallel": alone}))


def test_rows_that_do_not_divide_are_refused_with_ones_that_do() -> None:
    texts = [problem.what for problem in find_problems(config_of(size=5))]
    assert f"data.sequence_length_tokens=24 is not divisible by {SIZE}=5; set data.sequence_length_tokens=20" in texts


def test_heads_that_do_not_divide_are_refused_with_sizes_that_do() -> None:
    for size in (1, 2, 4):
        check_divisible(config_of(size=size), spec_of(config_of({"num_kv_heads": 1})))
    with pytest.raises(ConfigError, match="num_heads = 4 is not divisible by context_parallel_size = 3") as caught:
        check_divisible(config_of(size=3), spec_of(config_of()))
    assert "1, 2, 4" in str(caught.value.hint)
    both = config_of({"num_heads": 6, "hidden_size": 24}, parallel__tensor_parallel_size=2)
    with pytest.raises(ConfigError, match=r"num_heads = 6 is not .* x context_parallel_size = 4") as caught:
        check_divisible(both, spec_of(both))
    assert "choose sizes whose product is one of 1, 2, 3, 6" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("values", "model", "what"),
    [
        ({}, {}, ""),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, {}, ""),
        ({"model_type": "mamba"}, {}, "does not support the mamba model"),
        ({"model_type": "nemotron_h"}, {}, "does not support the nemotron_h model"),
        ({"model_type": "mixtral"}, {}, ""),
        ({"model_type": "mixtral", "output_router_logits": True}, {}, "output_router_logits of config.json = True"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, {}, "router_jitter_noise of config.json = 0.1"),
        ({"model_type": "gpt_oss"}, {}, "does not support the gpt_oss model"),
        ({"model_type": "qwen2_vl"}, {}, "does not support the qwen2_vl model"),
        ({"attention_dropout": 0.1}, {}, "attention_dropout of config.json = 0.1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {}, "type of config.json = dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}}}, {}, "rope_type of config.json = longrope"),
        ({"model_type": "phi3", "rope_scaling": {"type": "yarn"}}, {}, "type of config.json = yarn"),
        ({"model_type": "gpt2"}, {}, "resid_pdrop of config.json = 0.1"),
        ({"model_type": "gpt2", **NO_DROPOUT, "reorder_and_upcast_attn": True}, {}, ""),
        (
            {"model_type": "gpt2", **NO_DROPOUT, "reorder_and_upcast_attn": True}, {"attention_kernel": "reference"},
            "reorder_and_upcast_attn of config.json = True",
        ),
        ({"num_attention_heads": 3}, {}, "number of heads of the llama model = 3 is not divisible"),
        (
            {"model_type": "gpt2", **NO_DROPOUT, "num_attention_heads": None, "n_head": 3}, {},
            "number of heads of the gpt2 model = 3",
        ),
        ({"model_type": "gemma2", "num_attention_heads": None}, {}, "gemma2 model has no num_attention_heads"),
    ],
)  # fmt: skip
def test_transformers_models_that_context_parallelism_cannot_divide_are_refused(
    values: dict[str, Any], model: dict[str, Any], what: str
) -> None:
    given = {"model_type": "llama", "num_attention_heads": 4, **values}
    spec = HuggingFaceSpec({key: value for key, value in given.items() if value is not None}, (), 2, 32, 97, 64)
    config = config_of(TRANSFORMERS | model)
    if not what:
        check_divisible(config, spec)
        return
    with pytest.raises(ConfigError, match=what) as caught:
        check_divisible(config, spec)
    if "does not support" in what:
        assert "gpt2, gpt_neox, llama, mistral, mixtral, olmo2, olmo3, phi3, qwen2" in str(caught.value.hint)
    check_divisible(config_of(TRANSFORMERS | model, size=1), spec)


def test_ring_attention_needs_even_shares_of_rows_and_no_share_of_heads() -> None:
    kind = "parallel.context_parallel_kind"

    def ring(model: dict[str, Any] | None = None, size: int = 3) -> RunConfig:
        return config_of(model, size, parallel__context_parallel_kind="ring")

    assert kind not in named_keys(ring())
    check_divisible(ring(), spec_of(ring()))
    assert named_keys(ring({"dropout_fraction": 0.1})) >= {kind, "model.dropout_fraction"}
    assert named_keys(ring(TRANSFORMERS)) >= {kind, "model.kind"}
    assert named_keys(ring({"attention_kernel": "reference"})) >= {kind, "model.attention_kernel"}
    (problem,) = [problem for problem in find_problems(ring(size=8)) if SIZE in problem.keys]
    assert "24 is not divisible by 2 x parallel.context_parallel_size=16" in problem.what
    assert "set data.sequence_length_tokens=16" in problem.what


def test_sequence_parallelism_needs_rows_that_divide_and_no_statistics() -> None:
    name = "parallel.sequence_parallel"

    def config(tensor: int, **settings: Any) -> RunConfig:
        return configuration({}, parallel__tensor_parallel_size=tensor, parallel__sequence_parallel=True, **settings)

    assert name not in named_keys(config(4))
    assert name in named_keys(config(4, log__activation_statistics=True))
    (problem,) = [problem for problem in find_problems(config(5)) if name in problem.keys]
    assert "set data.sequence_length_tokens=20" in problem.what
    (problem,) = [
        problem for problem in find_problems(config(4, parallel__context_parallel_size=4)) if name in problem.keys
    ]
    assert "tensor_parallel_size=4 x parallel.context_parallel_size=4, which" in problem.what
    assert "set data.sequence_length_tokens=16" in problem.what


@pytest.mark.parametrize(
    ("settings", "key"),
    [
        ({"parallel__fsdp_size": 2}, "parallel.fsdp_size"),
        ({"parallel__tensor_parallel_size": 2}, "parallel.tensor_parallel_size"),
        ({"parallel__pipeline_parallel_size": 2}, "parallel.pipeline_parallel_size"),
        ({"parallel__context_parallel_size": 2}, "parallel.context_parallel_size"),
        ({"parallel__data_parallel_size": 3}, "parallel.data_parallel_size"),
        ({"model": EXPERTS | {"num_experts": 5}}, "model.num_experts"),
        ({"optimizer__name": "adamw_8bit"}, "optimizer.name"),
        ({"runtime__compile": True}, "runtime.compile"),
        ({"runtime__determinism": "bitwise-any-world"}, "runtime.determinism"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_expert_parallelism_does_not_support_is_refused(settings: dict[str, Any], key: str) -> None:
    def named(**settings: Any) -> set[str]:
        problems = find_problems(configuration(**{"model": EXPERTS, **settings}))
        return {key for problem in problems if "expert_parallel_size" in problem.what for key in problem.keys}

    assert {key, "parallel.expert_parallel_size"} <= named(**settings, parallel__expert_parallel_size=2)
    assert named(**settings) == set()
    assert named(parallel__expert_parallel_size=2) == set()


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_experts"):
        load_config("quickstart", ["parallel.expert_parallel_size=2"])


def test_expert_parallelism_of_other_models() -> None:
    """Whether a transformers model has experts is known from its config.json only."""
    words = ["backend=torch", "parallel.expert_parallel_size=2"]
    load_config("quickstart", [*words, "model.kind=huggingface", "model.name_or_path=x"])
    with pytest.raises(ConfigError, match=r"set model\.kind=decoder or huggingface"):
        load_config("quickstart", [*words, "model.kind=own.py:build"])
    with pytest.raises(ConfigError, match=r"set adapter\.kind=none"):
        load_config("quickstart", [*words, "model.kind=huggingface", "model.name_or_path=x", "adapter.kind=lora"])


def spec_of(config: RunConfig) -> Any:
    return decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
