"""``optimizer``, ``schedule`` and ``loss``: how a step changes the parameters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import ImportPath, Section


class ParameterGroup(Section):
    match: str = Field(
        min_length=1,
        description="Pattern of canonical parameter names, as for file names: blocks.0.*, *.norm.weight. The first "
        "group that matches a parameter applies.",
    )
    lr_scale: float = Field(default=1.0, gt=0, description="Factor of the learning rate of these parameters.")
    frozen: bool = Field(
        default=False, description="Do not train these parameters: no gradient, no optimizer state, no weight decay."
    )


class OptimizerConfig(Section):
    name: Literal["adamw", "adamw_8bit", "muon"] | ImportPath = Field(
        default="adamw",
        description="adamw_8bit (torch): moments of 8 bits. muon: orthogonalises the updates of hidden matrices and "
        "uses AdamW for all other parameters. Or (torch) a user function or class like those of torch.optim: "
        "f(groups, lr=...).",
    )
    lr: float = Field(default=6e-4, gt=0, description="Peak learning rate.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW: decay of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW: decay of the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW: epsilon added to the root of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled decay per unit of learning rate.")
    decay_embeddings: bool = Field(
        default=True, description="Apply weight decay to embeddings too; norms and biases are never decayed."
    )
    clip_norm: float | None = Field(
        default=1.0, gt=0, description="Clip the global gradient norm to this value. None: no clipping."
    )
    in_backward: bool = Field(
        default=False,
        description="torch, one device: update each parameter in the backward pass as soon as its gradient is "
        "complete, and free the gradient, so that the gradients never exist together. Needs one micro-batch per step, "
        "clip_norm=null and train.max_nonfinite_steps=0.",
    )
    muon_lr: float = Field(default=0.02, gt=0, description="Peak learning rate of the matrices that muon updates.")
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Momentum of muon.")
    groups: tuple[ParameterGroup, ...] = Field(
        default=(), description="Learning rates of some parameters, and parameters that are frozen, by name."
    )
    layer_lr_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Scale the learning rate of block l of L by this number to the power of L - l, and of embeddings "
        "to the power of L + 1; final norm and head keep theirs. For fine-tuning.",
    )


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "wsd", "constant"] | ImportPath = Field(
        default="cosine",
        description="Learning-rate schedule after the warm-up; wsd is warmup-stable-decay. Or a user function: "
        "f(step, total_steps, warmup_steps) returns a fraction of the peak; steps count from 0.",
    )
    warmup_steps: int | None = Field(
        default=None,
        ge=0,
        description="Length of the warm-up in steps. Set at most one of warmup_steps, warmup_tokens and "
        "warmup_fraction.",
    )
    warmup_tokens: int | None = Field(default=None, ge=0, description="Length of the warm-up in tokens.")
    warmup_fraction: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Length of the warm-up as a fraction of one epoch of the full dataset (estimated).",
    )
    min_lr_fraction: float = Field(
        default=0.1, ge=0, le=1, description="Final learning rate as a fraction of the peak."
    )
    decay_fraction: float = Field(default=0.2, ge=0, le=1, description="wsd: fraction of all steps in the final decay.")
    weight_decay: Literal["constant", "linear", "cosine"] | ImportPath = Field(
        default="constant",
        description="Schedule of the weight decay, or a user function with the signature described at name.",
    )
    final_weight_decay_fraction: float = Field(
        default=0.0, ge=0, description="linear and cosine: final weight decay as a fraction of the initial one."
    )


class LossConfig(Section):
    name: Literal["cross_entropy", "dpo"] | ImportPath = Field(
        default="cross_entropy",
        description="Training objective. dpo (torch): direct preference optimization on sources with preference_pairs; "
        "the reference is the model that the run starts from. Or a user function: f(logits, labels) returns the loss "
        "summed over the positions of a chunk; labels are -100 where there is no target.",
    )
    dpo_beta: float = Field(
        default=0.1,
        gt=0,
        description="dpo: factor of the rewards; a larger one keeps the model nearer to the reference.",
    )
    dpo_label_smoothing_fraction: float = Field(
        default=0.0, ge=0, lt=0.5, description="dpo: probability that a preference is labelled the wrong way round."
    )
    chunk_tokens: int = Field(
        default=1024, ge=1, description="Positions whose logits are materialised together; the full logits never are."
    )
    z_loss_weight: float = Field(
        default=0.0, ge=0, description="Weight of the z-loss, the squared log of the softmax normaliser."
    )
    label_smoothing_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Probability mass spread evenly over the vocabulary."
    )
    load_balancing_weight: float = Field(
        default=0.01,
        ge=0,
        description="Weight of the load-balancing loss of a mixture of experts (Switch), summed over layers: 1 for "
        "each if all experts get equally many tokens of a micro-batch.",
    )
    router_z_loss_weight: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the z-loss of routers, the squared log of their softmax normaliser, summed over layers.",
    )
