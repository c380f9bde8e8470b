"""``optimizer``, ``schedule`` and ``loss``: how a step changes the parameters."""

from __future__ import annotations

from typing import Literal, NamedTuple

from vorox.core.schema.section import ImportPath, Section
from vorox.core.schema.setting import FUNCTION, Need, setting


class OptimizerFacts(NamedTuple):
    """What is known of an optimizer wherever it is not computed.

    Attributes:
        orthogonalises: Matrices of the blocks have a rule of their own, with one moment and ``optimizer.muon_lr``.
        held_moment_bytes: Memory of both moments of an element that is decayed; of the others, they are fp32.
    """

    orthogonalises: bool = False
    held_moment_bytes: int = 8

    @property
    def rates(self) -> tuple[str, ...]:
        """The settings of ``optimizer`` that are peak learning rates."""
        return ("lr", "muon_lr") if self.orthogonalises else ("lr",)


BUILT_IN_OPTIMIZERS = {
    "adamw": OptimizerFacts(),
    "adamw_8bit": OptimizerFacts(held_moment_bytes=2),
    "muon": OptimizerFacts(orthogonalises=True),
}


class ScheduleFacts(NamedTuple):
    """What is known of a schedule of the learning rate.

    Attributes:
        falls: Whether the rate falls from its peak to ``min_lr_fraction`` of it.
        starts_low: Whether the warm-up rises to ``min_lr_fraction`` of the peak only.
    """

    falls: bool = False
    starts_low: bool = False


BUILT_IN_SCHEDULES = {
    "cosine": ScheduleFacts(falls=True),
    "linear": ScheduleFacts(falls=True),
    "wsd": ScheduleFacts(falls=True),
    "constant": ScheduleFacts(),
    "hold": ScheduleFacts(starts_low=True),
}

_BUILT_IN = Need("name", never=(FUNCTION,), remedy="a built-in optimizer")
_WITH_MINIMUM = tuple(name for name, facts in BUILT_IN_SCHEDULES.items() if any(facts))


class ParameterGroup(Section):
    match: str = setting(
        min_length=1,
        description="Pattern of canonical parameter names, as for file names: blocks.0.*, *.norm.weight. The first "
        "group that matches a parameter applies.",
    )
    lr_scale: float = setting(
        default=1.0,
        gt=0,
        description="Factor of the learning rate of these parameters.",
        needs=Need("frozen", (False,)),
    )
    frozen: bool = setting(
        default=False, description="Do not train these parameters: no gradient, no optimizer state, no weight decay."
    )


class OptimizerConfig(Section):
    name: Literal["adamw", "adamw_8bit", "muon"] | ImportPath = setting(
        default="adamw",
        description="adamw_8bit (torch): moments of 8 bits. muon: orthogonalises the updates of hidden matrices and "
        "uses AdamW for all other parameters. Or (torch) a user function or class like those of torch.optim: "
        "f(groups, lr=...).",
        resume="refused",
        engines={"adamw_8bit": ("torch",), FUNCTION: ("torch",)},
    )
    lr: float = setting(default=6e-4, gt=0, description="Peak learning rate.", synonyms=("lr", "learning_rate"))
    beta1: float = setting(
        default=0.9,
        ge=0,
        lt=1,
        description="AdamW: decay of the first moment.",
        needs=_BUILT_IN,
        synonyms=("beta1",),
    )
    beta2: float = setting(
        default=0.95,
        ge=0,
        lt=1,
        description="AdamW: decay of the second moment.",
        needs=_BUILT_IN,
        synonyms=("beta2",),
    )
    eps: float = setting(
        default=1e-8,
        gt=0,
        description="AdamW: epsilon added to the root of the second moment.",
        needs=_BUILT_IN,
    )
    weight_decay: float = setting(
        default=0.1, ge=0, description="Decoupled decay per unit of learning rate.", synonyms=("weight_decay",)
    )
    decay_embeddings: bool = setting(
        default=True, description="Apply weight decay to embeddings too; norms and biases are never decayed."
    )
    clip_norm: float | None = setting(
        default=1.0,
        gt=0,
        description="Clip the global gradient norm to this value. None: no clipping.",
        synonyms=("grad_clip", "max_grad_norm"),
    )
    in_backward: bool = setting(
        default=False,
        description="torch, one device: update each parameter in the backward pass as soon as its gradient is "
        "complete, and free the gradient, so that the gradients never exist together. Needs one micro-batch per step, "
        "clip_norm=null and train.max_nonfinite_steps=0.",
        engines=("torch",),
    )
    muon_lr: float = setting(
        default=0.02,
        gt=0,
        description="Peak learning rate of the matrices that muon updates.",
        needs=Need("name", ("muon",)),
    )
    muon_momentum: float = setting(
        default=0.95, ge=0, lt=1, description="Momentum of muon.", needs=Need("name", ("muon",))
    )
    groups: tuple[ParameterGroup, ...] = setting(
        default=(), description="Learning rates of some parameters, and parameters that are frozen, by name."
    )
    layer_lr_decay: float = setting(
        default=1.0,
        gt=0,
        le=1,
        description="Scale the learning rate of block l of L by this number to the power of L - l, and of embeddings "
        "to the power of L + 1; final norm and head keep theirs. For fine-tuning.",
    )

    @property
    def facts(self) -> OptimizerFacts:
        """Facts about the configured optimizer; a user-defined one is assumed to be like AdamW."""
        return BUILT_IN_OPTIMIZERS["adamw" if ":" in self.name else self.name]


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "wsd", "constant", "hold"] | ImportPath = setting(
        default="cosine",
        description="Learning-rate schedule after the warm-up; wsd is warmup-stable-decay; hold stays at "
        "min_lr_fraction, which trains a finished run further without a jump. Or a user function: "
        "f(step, total_steps, warmup_steps) returns a fraction of the peak; steps count from 0.",
    )
    warmup_steps: int | None = setting(
        default=None,
        ge=0,
        description="Length of the warm-up in steps. Set at most one of warmup_steps, warmup_tokens and "
        "warmup_fraction.",
        resume="length",
        alternatives=("warmup_tokens", "warmup_fraction"),
        synonyms=("warmup_steps", "warmup_iters"),
    )
    warmup_tokens: int | None = setting(
        default=None,
        ge=0,
        description="Length of the warm-up in tokens.",
        resume="length",
        alternatives=("warmup_steps", "warmup_fraction"),
    )
    warmup_fraction: float | None = setting(
        default=None,
        ge=0,
        le=1,
        description="Length of the warm-up as a fraction of one epoch of the full dataset (estimated).",
        resume="length",
        alternatives=("warmup_steps", "warmup_tokens"),
    )
    min_lr_fraction: float = setting(
        default=0.1,
        ge=0,
        le=1,
        description="Final learning rate as a fraction of the peak.",
        needs=Need("name", _WITH_MINIMUM, remedy="a falling schedule"),
    )
    decay_fraction: float = setting(
        default=0.2,
        ge=0,
        le=1,
        description="wsd: fraction of all steps in the final decay.",
        needs=Need("name", ("wsd",)),
    )
    weight_decay: Literal["constant", "linear", "cosine"] | ImportPath = setting(
        default="constant",
        description="Schedule of the weight decay, or a user function with the signature described at name.",
    )
    final_weight_decay_fraction: float = setting(
        default=0.0,
        ge=0,
        description="linear and cosine: final weight decay as a fraction of the initial one.",
        needs=Need("weight_decay", ("linear", "cosine")),
    )

    @property
    def facts(self) -> ScheduleFacts:
        """What is known of the schedule; of a user's, nothing."""
        return ScheduleFacts() if ":" in self.name else BUILT_IN_SCHEDULES[self.name]

    @property
    def top_fraction(self) -> float:
        """Share of the peak that the warm-up rises to."""
        return self.min_lr_fraction if self.facts.starts_low else 1.0


class LossConfig(Section):
    name: Literal["cross_entropy", "dpo"] | ImportPath = setting(
        default="cross_entropy",
        description="Training objective. dpo (torch): direct preference optimization on sources with preference_pairs; "
        "the reference is the model that the run starts from. Or a user function: f(logits, labels) returns the loss "
        "summed over the positions of a chunk; labels are -100 where there is no target.",
        engines={"dpo": ("torch",)},
    )
    dpo_beta: float = setting(
        default=0.1,
        gt=0,
        description="dpo: factor of the rewards; a larger one keeps the model nearer to the reference.",
        needs=Need("name", ("dpo",)),
    )
    dpo_label_smoothing_fraction: float = setting(
        default=0.0,
        ge=0,
        lt=0.5,
        description="dpo: probability that a preference is labelled the wrong way round.",
        needs=Need("name", ("dpo",)),
    )
    chunk_tokens: int = setting(
        default=1024,
        ge=1,
        description="Positions whose logits are materialised together; the full logits never are.",
        needs=Need("model.kind", ("decoder",), remedy="model.kind=decoder, whose loss has chunks"),
    )
    z_loss_weight: float = setting(
        default=0.0,
        ge=0,
        description="Weight of the z-loss, the squared log of the softmax normaliser.",
        needs=Need("name", ("cross_entropy",)),
    )
    label_smoothing_fraction: float = setting(
        default=0.0,
        ge=0,
        lt=1,
        description="Probability mass spread evenly over the vocabulary.",
        needs=Need("name", ("cross_entropy",)),
    )
    load_balancing_weight: float = setting(
        default=0.01,
        ge=0,
        description="Weight of the load-balancing loss of a mixture of experts (Switch), summed over layers: 1 for "
        "each if all experts get equally many tokens of a micro-batch.",
        needs=Need("model.num_experts"),
    )
    router_z_loss_weight: float = setting(
        default=0.0,
        ge=0,
        description="Weight of the z-loss of routers, the squared log of their softmax normaliser, summed over layers.",
        needs=Need("model.num_experts"),
    )
