"""Defaults of training: learning rate, weight decay, warm-up, length and batch, by what a run does.

A configuration tree goes in, after all its layers; the settings that its user leaves open are filled in. ``RULES`` is
the only table: a model from scratch gets a rate by its width, a pretrained one the rates of fine-tuning or continued
pretraining, whatever a preset for training from scratch says. The origin of such a value is ``default for LoRA``.
docs/fine_tuning.md shows the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from vorox.core.config.layers.presets import source_presets
from vorox.core.config.layers.pretrained import Pretrained
from vorox.core.config.layers.tree import ConfigTree
from vorox.core.config.schema_fields import LENGTHS, WARM_UPS
from vorox.core.config.yaml.reader import Json
from vorox.core.user_code.extensions import is_extension


@dataclass(frozen=True, slots=True)
class TrainingRule:
    """The defaults of one kind of training.

    Attributes:
        lr: Peak learning rate; ``None``: by the width of the model.
        weight_decay: Decoupled weight decay.
        warmup: Length of the warm-up as a fraction of the run.
        num_epochs: Length; ``None``: the user sets it.
        source: Where the values come from.
    """

    lr: float | None
    weight_decay: float
    warmup: Fraction
    num_epochs: float | None
    source: str


SCRATCH: Final = "training from scratch"
CONTINUED: Final = "continued pretraining"
FULL: Final = "full fine-tuning"
ADAPTER: Final = "LoRA"
DPO: Final = "DPO"
DPO_ADAPTER: Final = "DPO with LoRA"

RULES: Final[dict[str, TrainingRule]] = {
    SCRATCH: TrainingRule(None, 0.1, Fraction(1, 20), None, "GPT-3 (2005.14165), table 2.1, and muP (2203.03466)"),
    CONTINUED: TrainingRule(2e-5, 0.1, Fraction(1, 20), 1.0, "Ibrahim et al. (2403.08763); Gupta et al. (2308.04014)"),
    FULL: TrainingRule(2e-5, 0.0, Fraction(3, 100), 2.0, "Stanford Alpaca; Tulu 3 (2411.15124); Zephyr (2310.16944)"),
    ADAPTER: TrainingRule(2e-4, 0.0, Fraction(3, 100), 2.0, "QLoRA (2305.14314), table 9; LoRA Without Regret (2025)"),
    DPO: TrainingRule(1e-6, 0.0, Fraction(1, 10), 1.0, "DPO (2305.18290), appendix B; Tulu 3; Zephyr; TRL"),
    DPO_ADAPTER: TrainingRule(5e-6, 0.0, Fraction(1, 10), 1.0, "alignment-handbook, zephyr-7b-dpo-qlora"),
}
"""What a run does to its defaults; the numbers in brackets are arXiv identifiers."""

BASE_PEAK_FRACTION: Final = 0.3
"""Continued pretraining of a run's weights: its peak learning rate as a fraction of that of the run."""

_LARGEST_LR, _LR_TIMES_WIDTH = 3e-3, 0.4
_MUON_LR = 0.02
"""Peak of Muon from scratch, where AdamW has ``_LARGEST_LR``; other rates keep their ratio."""
_LONGEST_WARMUP_STEPS = 2_000
_GLOBAL_BATCH_ROWS, _FEWEST_ROWS, _STEPS_OF_AN_EPOCH = 16, 2, 32
"""Rows of a step with pretrained weights; fewer for a small text, so that an epoch has some steps."""
_MICRO_BATCH_TOKENS = 4_096
"""Tokens of a forward pass with pretrained weights, whose size no preset knows."""

_ADAPTER_NAMES = {"lora": "LoRA", "dora": "DoRA", "qlora": "QLoRA"}


def is_pretrained(get: Callable[[str], Json]) -> bool:
    """Whether a run starts from trained weights, given its settings by key."""
    if get("train.from_weights") is not None:
        return True
    return get("model.kind") == "huggingface" and get("model.pretrained") is True


def width_lr(hidden_size: int) -> float:
    """Return the peak learning rate of a model from scratch: inversely proportional to its width."""
    return float(f"{min(_LARGEST_LR, _LR_TIMES_WIDTH / hidden_size):.1e}")


def kind_of_training(get: Callable[[str], Json]) -> tuple[TrainingRule, str]:
    """Return the rule of a run and its name for messages, given its settings by key."""
    if not is_pretrained(get):
        return RULES[SCRATCH], SCRATCH
    adapter = _ADAPTER_NAMES.get(str(get("adapter.kind")))
    if get("loss.name") == "dpo":
        return (RULES[DPO], DPO) if adapter is None else (RULES[DPO_ADAPTER], f"DPO with {adapter}")
    if adapter is not None:
        return RULES[ADAPTER], adapter
    return (RULES[FULL], FULL) if any(_has_conversations(get)) else (RULES[CONTINUED], CONTINUED)


def _has_conversations(get: Callable[[str], Json]) -> Iterator[bool]:
    sources = get("data.sources")
    for entry in sources if isinstance(sources, list) else []:
        if isinstance(entry, dict):
            preset = source_presets().get(str(entry.get("preset")), {})
            yield bool(entry.get("chat_fields", preset.get("chat_fields")))


def fill_training_defaults(tree: ConfigTree, base: Pretrained | None = None) -> None:
    """Fill in what a configuration leaves open about the training.

    Args:
        tree: The configuration, after its last layer.
        base: Its pretrained model, if it has been found.
    """
    rule, name = kind_of_training(tree.get)
    defaults = _Defaults(tree, f"default for {name}", replaces_presets=rule is not RULES[SCRATCH])
    if defaults.replaces_presets:
        defaults.reset_schedule()
        if tree.get("optimizer.name") == "muon":
            defaults.reset("optimizer.name")
        if tree.get("model.kind") == "huggingface":
            defaults.reset("model.vocab_size")  # of the model that a preset describes: it would resize the embedding
        defaults.fill("optimizer.weight_decay", rule.weight_decay)
        defaults.fill_batch(base)
    _fill_lr(defaults, rule, base)
    _fill_length(defaults, rule)
    _fill_warmup(defaults, rule)


class _Defaults:
    """Sets keys that are open: set by nobody, or only by a preset for another kind of training."""

    def __init__(self, tree: ConfigTree, origin: str, *, replaces_presets: bool) -> None:
        self.tree, self.origin, self.replaces_presets = tree, origin, replaces_presets

    def is_open(self, *keys: str) -> bool:
        is_set = self.tree.is_set_by_user if self.replaces_presets else self.tree.is_explicit
        return not any(map(is_set, keys))

    def fill(self, key: str, value: Json, origin: str | None = None) -> None:
        if self.is_open(key):
            self.tree.set_default(key, value, origin or self.origin)

    def reset(self, *keys: str) -> None:
        for key in keys:
            if self.is_open(key):
                self.tree.reset(key)

    def reset_schedule(self) -> None:
        """Forget the shape of the schedule that a preset chose."""
        schedule = self.tree.get("schedule")
        self.reset(*(f"schedule.{key}" for key in (list(schedule) if isinstance(schedule, dict) else [])))

    def fill_batch(self, base: Pretrained | None) -> None:
        """Set rows of moderate number; a micro-batch is small, because no preset knows the size of the model."""
        if base is not None and base.row_tokens is not None:
            origin = "fitted to the conversations" if any(_has_conversations(self.tree.get)) else None
            self.fill("data.sequence_length_tokens", base.row_tokens, origin)
        rows_key, micro_key = "train.global_batch_sequences", "train.micro_batch_sequences"
        parts = _row_parts(self.tree)
        if self.tree.get("train.batch_stages"):
            return
        length, wanted = self.tree.get("data.sequence_length_tokens"), _GLOBAL_BATCH_ROWS
        if base is not None and base.train_tokens is not None and isinstance(length, int) and length > 0:
            while wanted > _FEWEST_ROWS and wanted * length * _STEPS_OF_AN_EPOCH > base.train_tokens:
                wanted //= 2
        self.fill(rows_key, -(-wanted // parts) * parts)
        rows = self.tree.get(rows_key)
        if isinstance(rows, int) and isinstance(length, int) and rows > 0 and length > 0 and rows % parts == 0:
            most = max(1, min(rows // parts, _MICRO_BATCH_TOKENS // length))
            fitting = next(count for count in range(most, 0, -1) if rows // parts % count == 0)
            self.fill(micro_key, fitting)


def _row_parts(tree: ConfigTree) -> int:
    sizes = [tree.get(f"parallel.{key}") for key in ("data_parallel_size", "fsdp_size")]
    return math.prod(size for size in sizes if isinstance(size, int) and size > 0)


def _fill_lr(defaults: _Defaults, rule: TrainingRule, base: Pretrained | None) -> None:
    tree, origin = defaults.tree, None
    if rule.lr is None:
        width = tree.get("model.hidden_size")
        if tree.get("model.kind") != "decoder":  # its width is not that of the section
            width = None if base is None else base.hidden_size
        if not isinstance(width, int) or width < 1:
            return
        lr, origin = width_lr(width), f"fitted to model.hidden_size={width}"
    else:
        lr = rule.lr
        if rule is RULES[CONTINUED] and base is not None and base.peak_lr is not None:
            lr = float(f"{BASE_PEAK_FRACTION * base.peak_lr:.1e}")
            origin = f"{defaults.origin}: {BASE_PEAK_FRACTION:g} of the peak that the weights were trained with"
    defaults.fill("optimizer.lr", lr, origin)
    if rule.lr is not None and tree.get("optimizer.name") == "muon":
        defaults.fill("optimizer.muon_lr", float(f"{_MUON_LR * lr / _LARGEST_LR:.1e}"))


def _fill_length(defaults: _Defaults, rule: TrainingRule) -> None:
    if rule.num_epochs is None or not defaults.is_open(*LENGTHS):
        return
    defaults.reset(*LENGTHS)
    defaults.fill("train.num_epochs", rule.num_epochs)


def _fill_warmup(defaults: _Defaults, rule: TrainingRule) -> None:
    """Set the warm-up in the unit of the length, so that it is a fraction of the run."""
    tree = defaults.tree
    if not defaults.is_open(*WARM_UPS) or is_extension(tree.get("schedule.name")):
        return
    latest = max(LENGTHS, key=lambda key: (tree.get(key) is not None, tree.origin(key).layer))
    length = tree.get(latest)
    if not isinstance(length, int | float) or isinstance(length, bool) or not 0 < length < float("inf"):
        return
    if latest == "train.num_steps":
        steps = min(math.ceil(rule.warmup * Fraction(length)), _LONGEST_WARMUP_STEPS)
        defaults.fill("schedule.warmup_steps", steps)
    elif latest == "train.num_tokens":
        defaults.fill("schedule.warmup_tokens", math.ceil(rule.warmup * Fraction(length)))
    else:
        share = tree.get("train.epoch_dataset_fraction")
        epochs = length * share if isinstance(share, int | float) else length
        defaults.fill("schedule.warmup_fraction", min(1.0, float(f"{float(rule.warmup) * epochs:.4g}")))


def default_rules(key: str) -> tuple[str, ...]:
    """Return how the default of a key follows from what is trained, a line for each rule; empty for other keys."""
    names = RULES.items()
    match key:
        case "optimizer.lr":
            scratch = f"{_LR_TIMES_WIDTH:g} / model.hidden_size, at most {_LARGEST_LR:g}, for {SCRATCH}"
            base = f", or {BASE_PEAK_FRACTION:g} of the peak of the run that trained the weights"
            rates = (f"{rule.lr:g} for {name}{base if name == CONTINUED else ''}" for name, rule in names if rule.lr)
            return (scratch, *rates)
        case "optimizer.weight_decay":
            return tuple(f"{rule.weight_decay:g} for {name}" for name, rule in names)
        case "train.num_epochs":
            return tuple(f"{rule.num_epochs:g} for {name}" for name, rule in names if rule.num_epochs is not None)
        case "schedule.warmup_steps":
            return tuple(f"{float(rule.warmup):.0%} of the run for {name}" for name, rule in names)
        case "optimizer.muon_lr":
            return (f"optimizer.lr x {_MUON_LR / _LARGEST_LR:.3g} for trained weights",)
        case "train.global_batch_sequences":
            return (f"{_GLOBAL_BATCH_ROWS} for trained weights, fewer for a small text",)
        case "train.micro_batch_sequences":
            return (f"rows of {_MICRO_BATCH_TOKENS:,} tokens together for trained weights",)
        case "loss.load_balancing_weight":
            return ("what config.json or the run asks for, for trained weights; nothing without output_router_logits",)
        case "data.sequence_length_tokens":
            return ("the longest conversation, or 2048 for text, within the positions of trained weights",)
        case _:
            return ()
