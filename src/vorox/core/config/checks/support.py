"""Which features work together: one table, computed from features, their classes and rules between those.

A configuration goes in; the pairs of its features that are not supported come out. The checks of a configuration, the
page ``docs/support.md`` and the tests that train pairs read the table. A rule joins features or classes of them; sizes
that must divide, and details of one feature, are no part of it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final

from vorox.core.config.layers.tree import Problem
from vorox.core.schema import RunConfig
from vorox.core.user_code.extensions import is_extension

Holds = Callable[[RunConfig], bool]


@dataclass(frozen=True, slots=True)
class Feature:
    """What a user switches on with a setting.

    Attributes:
        name: In rules and on the page.
        key: The setting.
        is_on: Whether a configuration has it.
        off: What to set to do without.
        classes: Names that rules give to it and features like it.
    """

    name: str
    key: str
    is_on: Holds
    off: str
    classes: tuple[str, ...] = ()

    def shown(self, config: RunConfig) -> str:
        """Return the setting with its value, unless it is a section or a list."""
        value: Any = attrgetter(self.key)(config)
        if not isinstance(value, str | int | float):
            return self.key
        return f"{self.key}={str(value).lower() if isinstance(value, bool) else value}"


@dataclass(frozen=True, slots=True)
class Rule:
    """Two groups of features of which no two work together.

    Attributes:
        one: Names of features or classes.
        other: Names of features or classes.
        why: The reason.
        when: A further condition; ``None``: always.
        condition: The further condition in words, for the page.
    """

    one: tuple[str, ...]
    other: tuple[str, ...]
    why: str
    when: Holds | None = None
    condition: str = ""


def _is_at(key: str, *values: object) -> Holds:
    """Whether a setting has one of some values."""
    get = attrgetter(key)
    return lambda config: get(config) in values


def _is_set(key: str) -> Holds:
    """Whether a setting is neither null nor false, 0 or empty."""
    get = attrgetter(key)
    return lambda config: bool(get(config))


def _is_above_1(key: str) -> Holds:
    get = attrgetter(key)
    return lambda config: isinstance(get(config), int) and get(config) > 1


def _is_own(key: str) -> Holds:
    """Whether a setting names a user function."""
    get = attrgetter(key)
    return lambda config: is_extension(get(config))


def _has_transforms(config: RunConfig) -> bool:
    return bool(config.data.transforms) or any(source.transforms for source in config.data.sources)


def _has_images(config: RunConfig) -> bool:
    sources = (*config.data.sources, *config.data.validation.sources)
    return config.model.kind == "huggingface" and any(source.images_field is not None for source in sources)


def _has_short_rows(config: RunConfig) -> bool:
    return any(stage.sequence_length_tokens is not None for stage in config.data.stages)


def _trains_routers(config: RunConfig) -> bool:
    loss = config.loss
    return config.model.num_experts is not None and (loss.load_balancing_weight, loss.router_z_loss_weight) != (0, 0)


def _size(name: str) -> tuple[str, Holds, str]:
    key = f"parallel.{name}"
    return key, _is_above_1(key), f"{key}=1"


FEATURES: Final = (
    # layouts
    Feature("replicas", *_size("data_parallel_size")),
    Feature("FSDP2", *_size("fsdp_size"), ("layout",)),
    Feature("FSDP2 in host memory", "parallel.fsdp_offload", _is_set("parallel.fsdp_offload"),
            "parallel.fsdp_offload=false", ("layout",)),
    Feature("tensor parallelism", *_size("tensor_parallel_size"), ("layout", "model parallelism")),
    Feature("sequence parallelism", "parallel.sequence_parallel", _is_set("parallel.sequence_parallel"),
            "parallel.sequence_parallel=false"),
    Feature("pipeline parallelism", *_size("pipeline_parallel_size"), ("layout", "model parallelism")),
    Feature("context parallelism", *_size("context_parallel_size"), ("layout", "model parallelism")),
    Feature("ring attention", "parallel.context_parallel_kind",
            lambda c: c.parallel.context_parallel_kind == "ring" and c.parallel.context_parallel_size > 1,
            "parallel.context_parallel_kind=ulysses"),
    Feature("expert parallelism", *_size("expert_parallel_size"), ("layout", "model parallelism")),
    Feature("DeepSpeed", "parallel.kind", _is_at("parallel.kind", "deepspeed"), "parallel.kind=native", ("layout",)),
    # models
    Feature("model of transformers", "model.kind", _is_at("model.kind", "huggingface"), "model.kind=decoder",
            ("foreign model",)),
    Feature("own model", "model.kind", _is_own("model.kind"), "model.kind=decoder or huggingface",
            ("foreign model",)),
    Feature("own block", "model.block", _is_set("model.block"), "model.block=null"),
    Feature("own MLP", "model.mlp", _is_set("model.mlp"), "model.mlp=null"),
    Feature("own activation", "model.activation", _is_own("model.activation"), "a built-in model.activation",
            ("own function",)),
    Feature("own attention", "model.attention_kernel", _is_own("model.attention_kernel"),
            "model.attention_kernel=auto", ("own function",)),
    Feature("chosen attention kernel", "model.attention_kernel",
            lambda c: c.model.attention_kernel in {"sdpa", "reference", "xla", "cudnn", "splash"},
            "model.attention_kernel=auto"),
    Feature("mixture of experts", "model.num_experts", _is_set("model.num_experts"), "model.num_experts=null"),
    Feature("trained routers", "loss.load_balancing_weight", _trains_routers,
            "loss.load_balancing_weight=0 and loss.router_z_loss_weight=0"),
    Feature("layer pattern", "model.layer_pattern", _is_set("model.layer_pattern"), "model.layer_pattern=null"),
    Feature("layer types", "model.layer_types", _is_set("model.layer_types"), "model.layer_types=null"),
    Feature("norms elsewhere", "model.norm_placement", lambda c: c.model.norm_placement != "pre",
            "model.norm_placement=pre"),
    Feature("QK norm over the full width", "model.qk_norm", _is_at("model.qk_norm", "full_width"),
            "another model.qk_norm"),
    Feature("MLP biases", "model.mlp_bias", _is_set("model.mlp_bias"), "model.mlp_bias=false"),
    Feature("tied embeddings", "model.tie_embeddings",
            lambda c: c.model.kind == "decoder" and c.model.tie_embeddings, "model.tie_embeddings=false"),
    Feature("scaled embeddings", "model.scale_embeddings", _is_set("model.scale_embeddings"),
            "model.scale_embeddings=false"),
    Feature("dropout", "model.dropout_fraction", _is_set("model.dropout_fraction"), "model.dropout_fraction=0"),
    Feature("width transfer", "model.mup_base_hidden_size", _is_set("model.mup_base_hidden_size"),
            "model.mup_base_hidden_size=null"),
    Feature("image encoder", "model.vision.num_layers", _is_set("model.vision.num_layers"),
            "model.vision.num_layers=0", ("images",)),
    Feature("images for transformers", "data.sources", _has_images, "sources without images_field", ("images",)),
    # what is trained, and how
    Feature("adapter", "adapter.kind", lambda c: c.adapter.kind != "none", "adapter.kind=none"),
    Feature("DPO", "loss.name", _is_at("loss.name", "dpo"), "loss.name=cross_entropy"),
    Feature("own loss", "loss.name", _is_own("loss.name"), "loss.name=cross_entropy", ("own function",)),
    Feature("distillation", "train.distillation.teacher", _is_set("train.distillation.teacher"),
            "train.distillation.teacher=null", ("teacher",)),
    Feature("stored logits of a teacher", "train.distillation.logits", _is_set("train.distillation.logits"),
            "train.distillation.logits=null", ("teacher",)),
    Feature("own step", "train.forward_backward", _is_set("train.forward_backward"), "train.forward_backward=null"),
    Feature("embedding noise", "train.embedding_noise", _is_set("train.embedding_noise"),
            "train.embedding_noise=null"),
    Feature("kept zeros", "train.keep_zeros", _is_set("train.keep_zeros"), "train.keep_zeros=false"),
    Feature("moving average", "train.ema_decay", _is_set("train.ema_decay"), "train.ema_decay=null"),
    Feature("spike policy", "train.spike_policy", lambda c: c.train.spike_policy != "off", "train.spike_policy=off"),
    Feature("stages of the batch size", "train.batch_stages", _is_set("train.batch_stages"), "train.batch_stages=[]"),
    Feature("saved matrix products", "train.activation_checkpointing",
            _is_at("train.activation_checkpointing", "dots"), "train.activation_checkpointing=block"),
    # optimizers
    Feature("Muon", "optimizer.name", _is_at("optimizer.name", "muon"), "optimizer.name=adamw"),
    Feature("8-bit AdamW", "optimizer.name", _is_at("optimizer.name", "adamw_8bit"), "optimizer.name=adamw",
            ("optimizer with its own state",)),
    Feature("own optimizer", "optimizer.name", _is_own("optimizer.name"), "optimizer.name=adamw",
            ("optimizer with its own state",)),
    Feature("updates in the backward pass", "optimizer.in_backward", _is_set("optimizer.in_backward"),
            "optimizer.in_backward=false"),
    Feature("frozen groups", "optimizer.groups", lambda c: any(group.frozen for group in c.optimizer.groups),
            "groups that are trained"),
    # numbers and execution
    Feature("fp16", "precision.dtype", _is_at("precision.dtype", "fp16"), "precision.dtype=bf16 or fp32"),
    Feature("8-bit floats", "precision.float8", _is_set("precision.float8"), "precision.float8=null",
            ("replaced linear layers",)),
    Feature("quantisation-aware training", "train.quantization_aware", _is_set("train.quantization_aware"),
            "train.quantization_aware=null", ("replaced linear layers",)),
    Feature("compilation", "runtime.compile", _is_set("runtime.compile"), "runtime.compile=false",
            ("execution",)),
    Feature("CUDA graphs", "runtime.cuda_graphs", _is_set("runtime.cuda_graphs"), "runtime.cuda_graphs=false",
            ("execution",)),
    Feature("scanned layers", "runtime.scan_layers", _is_set("runtime.scan_layers"), "runtime.scan_layers=false",
            ("execution",)),
    Feature("bits of any world", "runtime.determinism", _is_at("runtime.determinism", "bitwise-any-world"),
            "runtime.determinism=bitwise"),
    Feature("recomputed steps", "runtime.recompute_every_steps", _is_set("runtime.recompute_every_steps"),
            "runtime.recompute_every_steps=null"),
    Feature("Apple or TPU device", "runtime.device", _is_at("runtime.device", "mps", "tpu"),
            "runtime.device=cpu or cuda"),
    Feature("activation statistics", "log.activation_statistics", _is_set("log.activation_statistics"),
            "log.activation_statistics=false"),
    # data
    Feature("streaming", "data.mode", _is_at("data.mode", "streaming"), "data.mode=cached"),
    Feature("transforms", "data.transforms", _has_transforms, "data without transforms"),
    Feature("concatenated rows", "data.packing", _is_at("data.packing", "concat"), "data.packing=best_fit"),
    Feature("attention between documents", "data.document_mask", _is_at("data.document_mask", False),
            "data.document_mask=true"),
    Feature("stages of the row length", "data.stages", _has_short_rows, "data.stages without sequence_length_tokens"),
)  # fmt: skip
"""All features that some other feature excludes."""


_is_torch, _is_jax = _is_at("backend", "torch"), _is_at("backend", "jax")
_TENSOR, _PIPELINE, _CONTEXT = "tensor parallelism", "pipeline parallelism", "context parallelism"
_NOT_BUILT = "not built yet"
"""Of pairs that nothing but work keeps apart."""

RULES: Final = (
    # layouts
    Rule(("layout",), ("adapter", "DPO"), _NOT_BUILT),
    Rule(("model parallelism", "DeepSpeed"), ("teacher",), _NOT_BUILT),
    Rule(("model parallelism", "DeepSpeed", "FSDP2 in host memory"), ("compilation",), _NOT_BUILT, _is_torch, "torch"),
    Rule((_TENSOR, _PIPELINE, _CONTEXT, "DeepSpeed"), ("mixture of experts",), _NOT_BUILT),
    Rule((_TENSOR, _PIPELINE, _CONTEXT), ("layer pattern",), _NOT_BUILT),
    Rule((_PIPELINE,), (_CONTEXT,), _NOT_BUILT, _is_at("model.kind", "huggingface"), "a model of transformers"),
    Rule(("expert parallelism",), ("FSDP2", _TENSOR, _PIPELINE, _CONTEXT), _NOT_BUILT),
    Rule(("FSDP2 in host memory",), (_TENSOR, _PIPELINE, _CONTEXT, "model of transformers", "Muon", "fp16"),
         _NOT_BUILT),
    Rule((_PIPELINE, "expert parallelism", "FSDP2 in host memory"), ("optimizer with its own state",), _NOT_BUILT),
    Rule(("sequence parallelism",), ("activation statistics", "model of transformers"), _NOT_BUILT),
    Rule(("ring attention",), ("model of transformers", "dropout"), _NOT_BUILT),
    Rule(("ring attention",), ("own attention", "chosen attention kernel"), "it is an attention kernel itself"),
    Rule(("layout",), ("bits of any world",), "the order of sums depends on the number of ranks"),
    Rule(("model parallelism", "FSDP2 in host memory"), ("own model",), "nothing says how its layers are divided"),
    Rule((_TENSOR, _PIPELINE, _CONTEXT), ("own block", "own step"), "nothing says how to divide it"),
    Rule((_TENSOR,), ("own MLP", "own function", "own optimizer"), "a rank has only a part of the values", _is_torch,
         "torch"),
    Rule(("FSDP2",), ("own optimizer",), "a rank has only a part of the values"),
    Rule((_TENSOR,), ("QK norm over the full width",), "a rank has some of the heads only", _is_torch, "torch"),
    Rule((_TENSOR,), ("embedding noise",), "ranks would draw different noise"),
    Rule((_PIPELINE,), ("dropout",), "stages would draw different random numbers"),
    Rule(("DeepSpeed",), ("Muon", "optimizer with its own state"), "the optimizer is DeepSpeed's AdamW"),
    Rule(("DeepSpeed",),
         ("fp16", "moving average", "kept zeros", "spike policy", "stages of the batch size", "frozen groups",
          "embedding noise", "recomputed steps", "images", "replaced linear layers"),
         "parameters and step are DeepSpeed's"),
    Rule(("DeepSpeed",), ("Apple or TPU device",), "DeepSpeed runs on CPUs and NVIDIA GPUs"),
    # what replaces or reads layers
    Rule(("replaced linear layers",),
         ("model parallelism", "own model", "own block", "own MLP", "adapter", "layer pattern", "mixture of experts",
          "image encoder"),
         "only whole linear layers of attention and MLP are replaced"),
    Rule(("quantisation-aware training",), ("FSDP2",), _NOT_BUILT),
    Rule(("quantisation-aware training",), ("DPO",), "the reference would be rounded as well"),
    Rule(("8-bit floats",), ("quantisation-aware training",), "both replace the linear layers"),
    Rule(("8-bit floats",), ("fp16",), "both scale the gradients"),
    Rule(("8-bit floats",), ("images for transformers",), _NOT_BUILT),
    Rule(("embedding noise",), ("own model",), "nothing says which layer is its embedding"),
    Rule(("embedding noise",), ("DPO",), "both answers of a pair would get different noise"),
    Rule(("DPO",), ("own model",), _NOT_BUILT),
    Rule(("adapter",), ("Muon",), "Muon updates whole matrices of blocks"),
    Rule(("adapter",), ("kept zeros",), "no pruned weight is trained"),
    Rule(("foreign model",), ("compilation", "activation statistics", "saved matrix products", "teacher"), _NOT_BUILT),
    Rule(("model of transformers",), ("own attention",), _NOT_BUILT),
    Rule(("own loss", "DPO"), ("teacher",), "the teacher's predictions are part of the cross-entropy"),
    Rule(("saved matrix products",), ("compilation",), "the compiler chooses what is saved", _is_torch,
         "torch"),
    Rule(("mixture of experts",), ("own MLP", "own block", "MLP biases"), "the experts are the MLP of a block"),
    Rule(("mixture of experts",), ("image encoder",), _NOT_BUILT),
    Rule(("trained routers",), ("DPO",), "it does not train routers"),
    Rule(("layer pattern",),
         ("norms elsewhere", "layer types", "own MLP", "own block", "width transfer", "mixture of experts",
          "image encoder"),
         "each layer has one norm before one built-in mixer"),
    Rule(("layer pattern",), ("compilation",), "the scan of Mamba-2 is not compiled",
         lambda c: "M" in (c.model.layer_pattern or ""), "M in the pattern"),
    Rule(("layer pattern",), ("scanned layers",), "the scan needs equal layers"),
    Rule(("own attention",), ("dropout",), "the function gets no dropout", _is_jax, "jax"),
    Rule(("width transfer",),
         ("tied embeddings", "scaled embeddings", "image encoder", "own MLP", "own block", "mixture of experts", "Muon",
          "own optimizer"),
         "it has no rule for their initial values or learning rates"),
    # updates within the backward pass
    Rule(("updates in the backward pass",), ("replicas", "layout", "bits of any world"),
         "the gradients of several devices are summed before the update"),
    Rule(("updates in the backward pass",), ("optimizer with its own state", "adapter"), _NOT_BUILT),
    Rule(("updates in the backward pass",), ("spike policy", "kept zeros", "fp16", "own step", "recomputed steps"),
         "parameters have changed before the step is complete"),
    # whole rows
    Rule(("images",),
         ("streaming", "transforms", _TENSOR, _PIPELINE, _CONTEXT, "DPO", "own step", "teacher"), _NOT_BUILT),
    Rule(("images",), ("concatenated rows", "stages of the row length"), "an image stays whole in its row"),
    Rule(("image encoder",), ("FSDP2",), _NOT_BUILT),
    Rule(("DPO",), ("concatenated rows", "attention between documents", "stages of the row length"),
         "both answers of a pair stay in one row, apart"),
    Rule(("DPO",), ("own step",), "the function gets rows, not pairs"),
    Rule(("stored logits of a teacher",), ("own step", "stages of the row length"), "they cover whole rows"),
    # CUDA graphs
    Rule(("CUDA graphs",),
         ("replicas", "layout", "foreign model", "own block", "own MLP", "own attention", "mixture of experts",
          "layer pattern", "image encoder", "dropout", "embedding noise", "DPO", "own loss", "teacher", "own step",
          "updates in the backward pass", "replaced linear layers", "activation statistics"),
         "a graph repeats one pass, without random numbers, exchanges and work of the host"),
)  # fmt: skip


@functools.cache
def members(name: str) -> tuple[Feature, ...]:
    """Return the feature of a name, or those of a class.

    Raises:
        KeyError: There is none.
    """
    found = tuple(feature for feature in FEATURES if feature.name == name or name in feature.classes)
    if not found:
        raise KeyError(name)
    return found


@functools.cache
def exclusions() -> Mapping[frozenset[str], tuple[Rule, ...]]:
    """Return the table: the rules of each pair of features that does not work together, whatever their conditions."""
    table: dict[frozenset[str], list[Rule]] = {}
    for rule in RULES:
        for one, other in itertools.product(rule.one, rule.other):
            for left, right in itertools.product(members(one), members(other)):
                rules = table.setdefault(frozenset((left.name, right.name)), [])
                if left is not right and rule not in rules:
                    rules.append(rule)
    return {pair: tuple(rules) for pair, rules in table.items() if rules}


def gives_way(key: str) -> bool:
    """Whether a setting decides only how a step is executed, so that a preset's choice yields to other settings."""
    return any(feature.key == key for feature in members("execution"))


def _data_parallelism(one: Feature, other: Feature) -> str:
    """Return the layouts without parts of a row that a feature works with, if another layout is excluded."""
    for layout, feature in ((one, other), (other, one)):
        if "layout" in layout.classes and "layout" not in feature.classes:
            names = [name for name in ("replicas", "FSDP2") if frozenset((name, feature.name)) not in exclusions()]
            return f"; {' and '.join(names)} are supported" if names else ""
    return ""


def support_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the pairs of features that a configuration has, and that do not work together."""
    active = [feature for feature in FEATURES if feature.is_on(config)]
    for one, other in itertools.combinations(active, 2):
        rules = exclusions().get(frozenset((one.name, other.name)), ())
        rule = next((rule for rule in rules if rule.when is None or rule.when(config)), None)
        if rule is not None:
            yield Problem(
                f"{other.shown(config)} is not supported with {one.shown(config)}: {rule.why}; set {other.off}, or "
                f"{one.off}{_data_parallelism(one, other)}",
                keys=(other.key, one.key),
            )


def support_page() -> str:
    """Return the table as a page in Markdown."""
    lines = [
        "# What works together",
        "",
        "Every feature that some other excludes, with those and the reason. All other pairs of them train, if sizes",
        "divide. A configuration with an excluded pair is refused when it is read, with both settings.",
        "`vorox config support` writes this page.",
        "",
        "| feature | setting | not with |",
        "|---|---|---|",
    ]
    for feature in FEATURES:
        partners: dict[Rule, list[str]] = {}
        for other in FEATURES:
            for rule in exclusions().get(frozenset((feature.name, other.name)), ())[:1]:
                partners.setdefault(rule, []).append(other.name)
        cells = (
            f"{', '.join(names)}{f' ({rule.condition})' if rule.condition else ''}: {rule.why}"
            for rule, names in partners.items()
        )
        lines.append(f"| {feature.name} | `{feature.key}` | {'; '.join(cells)} |")
    return "\n".join((*lines, ""))
