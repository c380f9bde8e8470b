"""Features that exclude each other are refused with both settings; all others are accepted."""

from __future__ import annotations

import itertools

import pytest

from vorox.core.config import load_config
from vorox.core.config.checks.support import FEATURES, RULES, exclusions, members, support_page
from vorox.core.errors import ConfigError
from vorox.core.schema.optimizer import BUILT_IN_OPTIMIZERS

TRANSFORMERS = "model.kind=huggingface model.name_or_path=somewhere"
IN_BACKWARD = "optimizer.in_backward=true optimizer.clip_norm=null train.max_nonfinite_steps=0 "
IN_BACKWARD += "train.micro_batch_sequences=8 train.global_batch_sequences=8"
CHAT = "data.sources.0.format=jsonl data.sources.0.paths=[somewhere] data.sources.0.preference_pairs=true"
DPO = f"loss.name=dpo {CHAT} data.sources.0.chat_fields=[prompt,chosen,rejected]"
FLOAT8 = "precision.float8=tensorwise precision.float8_emulate=true"
TENSOR, PIPELINE = "parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2 train.micro_batch_sequences=1"
CONTEXT, DEEPSPEED, FSDP = "parallel.context_parallel_size=2", "parallel.kind=deepspeed", "parallel.fsdp_size=2"
EXPERTS, OFFLOAD = "model.num_experts=4", "parallel.fsdp_size=2 parallel.fsdp_offload=true"
HYBRID = "model.layer_pattern=M*-"
HELD_OUT_IMAGES = '{"name":"held_out","paths":["somewhere"],"format":"jsonl","images_field":"images"}'
IMAGES = f"{TRANSFORMERS} data.sources.0.format=jsonl data.sources.0.paths=[somewhere] "
IMAGES += "data.sources.0.images_field=images"
ANY_WORLD = "runtime.determinism=bitwise-any-world"
QAT = "train.quantization_aware=int4"

REFUSED = {
    (TENSOR, other): words
    for other, words in {
        "model.qk_norm=full_width": "some of the heads", EXPERTS: "", "runtime.compile=true": "", ANY_WORLD: "",
        "optimizer.name=torch.optim:SGD": "", "loss.name=own:loss": "", "model.mlp=own:mlp": "",
        "model.block=own:block": "", "model.kind=own:Model": "", "train.forward_backward=own:step": "",
        "train.embedding_noise=5": "", HYBRID: "", QAT: "", FLOAT8: "", f"{TRANSFORMERS} adapter.kind=lora": "",
        "train.distillation.teacher=somewhere": "", DPO: "", OFFLOAD: "", IN_BACKWARD: "",
    }.items()
} | {
    (FSDP, f"{TRANSFORMERS} adapter.kind=lora"): "", (FSDP, DPO): "", (FSDP, QAT): "", (FSDP, IN_BACKWARD): "",
    (FSDP, ANY_WORLD): "order of sums", (FSDP, f"parallel.expert_parallel_size=2 {EXPERTS}"): "",
    (FSDP, "optimizer.name=torch.optim:SGD"): "part of the values",
    (PIPELINE, "model.dropout_fraction=0.1"): "random numbers", (PIPELINE, "optimizer.name=adamw_8bit"): "",
    (PIPELINE, EXPERTS): "", (PIPELINE, HYBRID): "", (CONTEXT, HYBRID): "",
    (CONTEXT, f"{TRANSFORMERS} {PIPELINE}"): "",
    (f"{TENSOR} parallel.sequence_parallel=true", TRANSFORMERS): "",
    (f"{TENSOR} parallel.sequence_parallel=true", "log.activation_statistics=true"): "",
    (DEEPSPEED, "train.ema_decay=0.9"): "", (DEEPSPEED, "precision.dtype=fp16"): "", (DEEPSPEED, QAT): "",
    (DEEPSPEED, "optimizer.name=muon"): "DeepSpeed's AdamW", (DEEPSPEED, "train.embedding_noise=5"): "",
    (DEEPSPEED, "train.spike_policy=skip"): "", (DEEPSPEED, "runtime.recompute_every_steps=5"): "",
    (OFFLOAD, TRANSFORMERS): "", (OFFLOAD, "optimizer.name=muon"): "",
    ("train.embedding_noise=5", "model.kind=own:Model"): "", ("train.embedding_noise=5", DPO): "different noise",
    (QAT, "model.kind=own:Model"): "", (QAT, EXPERTS): "", (QAT, HYBRID): "", (QAT, DPO): "reference",
    (QAT, f"{TRANSFORMERS} adapter.kind=lora"): "", (QAT, FLOAT8): "", (FLOAT8, "precision.dtype=fp16"): "",
    (FLOAT8, EXPERTS): "", (FLOAT8, HYBRID): "", (FLOAT8, "model.kind=own:Model"): "",
    (TRANSFORMERS, "runtime.compile=true"): "", (TRANSFORMERS, "log.activation_statistics=true"): "",
    (TRANSFORMERS, "train.activation_checkpointing=dots"): "", (TRANSFORMERS, "model.attention_kernel=own:attend"): "",
    ("model.kind=own:Model", "runtime.compile=true"): "",
    ("model.kind=own:Model", "log.activation_statistics=true"): "",
    ("train.activation_checkpointing=dots", "runtime.compile=true"): "the compiler chooses",
    (HYBRID, "runtime.compile=true"): "Mamba-2", (HYBRID, "model.norm_placement=post"): "one norm",
    (HYBRID + " backend=jax", "runtime.scan_layers=true"): "equal layers",
    (HYBRID + " backend=jax", TENSOR): "",
    ("backend=jax model.attention_kernel=own:attend", "model.dropout_fraction=0.1"): "no dropout",
    (EXPERTS, "model.mlp=own:mlp"): "the experts are the MLP", (EXPERTS + " loss.load_balancing_weight=0.1", DPO): "",
    ("model.mup_base_hidden_size=64 model.tie_embeddings=false", "optimizer.name=muon"): "no rule",
    (IN_BACKWARD, "precision.dtype=fp16"): "", (IN_BACKWARD, "parallel.data_parallel_size=2"): "",
    ("runtime.cuda_graphs=true runtime.compile=true", EXPERTS): "one pass",
    ("runtime.cuda_graphs=true runtime.compile=true", "model.dropout_fraction=0.1"): "random numbers",
    ("runtime.cuda_graphs=true runtime.compile=true", "log.activation_statistics=true"): "",
    (DPO, "data.packing=concat"): "one row", (DPO, "data.document_mask=false"): "apart",
    ("train.distillation.logits=somewhere", "train.forward_backward=own:step"): "whole rows",
    (TENSOR, f"{TRANSFORMERS} data.validation.sources=[{HELD_OUT_IMAGES}]"): "",
    (IMAGES, 'data.sources.0.transforms=[{"name":"length","args":{"min_characters":2}}]'): "",
}  # fmt: skip
"""Pairs that were tried, or that physics forbids, and a part of the reason."""

ACCEPTED = [
    (FSDP, TENSOR), (FSDP, PIPELINE), (TENSOR, PIPELINE), (TENSOR, CONTEXT), (FSDP, TRANSFORMERS),
    (TENSOR, TRANSFORMERS), (PIPELINE, TRANSFORMERS), (CONTEXT, TRANSFORMERS), (FSDP, "runtime.compile=true"),
    (FSDP, EXPERTS), (FSDP, HYBRID), (FSDP, FLOAT8), (FSDP, "train.distillation.teacher=somewhere"),
    (TENSOR, "optimizer.name=adamw_8bit"), (TENSOR, "optimizer.name=muon"), (TENSOR, "model.dropout_fraction=0.1"),
    (f"parallel.expert_parallel_size=2 {EXPERTS}", "parallel.data_parallel_size=2"),
    (f"{TRANSFORMERS} adapter.kind=lora", "train.embedding_noise=5"), (DPO, f"{TRANSFORMERS} adapter.kind=lora"),
    (DPO, "parallel.data_parallel_size=2"), (HYBRID, "optimizer.name=muon"), (EXPERTS, "runtime.compile=true"),
    (DEEPSPEED, TRANSFORMERS), (IN_BACKWARD, "optimizer.name=muon"), ("backend=jax", TENSOR),
    ("backend=jax runtime.compile=true", "train.activation_checkpointing=dots"),
    ("model.attention_kernel=own:attend", "model.dropout_fraction=0.1"), (QAT, "parallel.data_parallel_size=2"),
    (EXPERTS + " loss.load_balancing_weight=0 loss.router_z_loss_weight=0", DPO),
]  # fmt: skip
"""Pairs that practitioners use, each with a numeric test in ``tests/ranks`` or beside its engine."""


def refusal(*settings: str) -> str:
    overrides = [override for text in settings for override in text.split()]
    try:
        load_config("quickstart", ["train.num_epochs=null", "train.num_steps=8", *overrides])
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("one", "other"), REFUSED, ids=lambda text: text.split(".")[-1].partition(" ")[0])
def test_a_pair_that_does_not_work_is_refused_with_both_settings(one: str, other: str) -> None:
    text = refusal(one, other)
    assert "is not supported with" in text, text
    assert REFUSED[one, other] in text
    assert "; set " in text


@pytest.mark.parametrize(("one", "other"), ACCEPTED, ids=lambda text: text.split(".")[-1].partition(" ")[0])
def test_a_pair_that_works_is_accepted(one: str, other: str) -> None:
    assert "is not supported with" not in refusal(one, other)


def test_a_preset_that_compiles_gives_way_to_a_model_that_it_cannot_compile() -> None:
    """What a preset chose for speed is no wish of the user's; what the user wrote is refused."""
    asked = ["model.kind=huggingface", "model.name_or_path=somewhere"]
    assert load_config("rtx4090").runtime.compile
    assert not load_config("rtx4090", asked).runtime.compile
    with pytest.raises(ConfigError, match=r"runtime\.compile=true is not supported with model\.kind=huggingface"):
        load_config("rtx4090", [*asked, "runtime.compile=true"])


def test_updates_in_the_backward_pass_need_one_micro_batch_in_every_stage_of_the_batch() -> None:
    stage = 'train.batch_stages=[{"start_step":5,"global_batch_sequences":%d}]'
    assert "train.micro_batch_sequences=16: one micro-batch per step" in refusal(IN_BACKWARD, stage % 16)
    assert not refusal(IN_BACKWARD, stage % 8)


def test_every_rule_joins_features_that_exist_and_every_feature_has_a_rule() -> None:
    names = {feature.name for feature in FEATURES}
    classes = {name for feature in FEATURES for name in feature.classes}
    assert len(names) == len(FEATURES)
    assert not names & classes, "a rule would mean both"
    for rule in RULES:
        assert (rule.when is None) == (not rule.condition), "the page says under which condition a rule holds"
        for name in (*rule.one, *rule.other):
            assert members(name)
    used = {name for rule in RULES for name in (*rule.one, *rule.other)}
    assert classes - {"execution"} <= used
    assert names == {name for pair in exclusions() for name in pair}


def test_the_page_has_each_pair_in_both_rows() -> None:
    rows = {line.split(" | ")[0][2:]: line for line in support_page().splitlines() if line.startswith("| ")}
    for one, other in itertools.permutations((feature.name for feature in FEATURES), 2):
        listed = rows[one].split(" | ", 2)[2]
        named = {name for part in listed.split("; ") for name in part.partition(":")[0].split(" (")[0].split(", ")}
        assert (other in named) == (frozenset((one, other)) in exclusions()), (one, other)


def test_every_optimizer_but_the_plain_one_is_a_feature() -> None:
    """So that a rule says where it cannot be computed; the engine would refuse late, or compute another one."""
    for name in BUILT_IN_OPTIMIZERS.keys() - {"adamw"}:
        config = load_config("quickstart", [f"optimizer.name={name}"])
        assert [one for one in FEATURES if one.key == "optimizer.name" and one.is_on(config)], name
