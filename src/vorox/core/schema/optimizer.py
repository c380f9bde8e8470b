"""``optimizer``, ``schedule`` and ``loss``: how a step changes the parameters."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import ImportPath, Section


class OptimizerConfig(Section):
    name: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="muon orthogonalises the updates of hidden matrices and uses adamw for everything else.",
    )
    lr: float = Field(default=6e-4, gt=0, description="Peak learning rate.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="AdamW: decay of the first moment.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="AdamW: decay of the second moment.")
    eps: float = Field(default=1e-8, gt=0, description="AdamW: added to the root of the second moment.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decoupled decay per unit of learning rate.")
    decay_embeddings: bool = Field(
        default=True, description="Decay embeddings too; norms and biases are never decayed."
    )
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest global gradient norm. None: no clipping.")
    muon_lr: float = Field(default=0.02, gt=0, description="Peak learning rate of the matrices under muon.")
    muon_momentum: float = Field(default=0.95, ge=0, lt=1, description="Momentum of muon.")


class ScheduleConfig(Section):
    name: Literal["cosine", "linear", "wsd", "constant"] | ImportPath = Field(
        default="cosine",
        description="Shape after the warm-up; wsd is warm-up, stable, decay. Or a function of your own: "
        "f(step, total_steps, warmup_steps) returns the share of the peak, for steps from 0.",
    )
    warmup_steps: int | None = Field(default=None, ge=0, description="Warm-up in steps. Give at most one of the three.")
    warmup_tokens: int | None = Field(default=None, ge=0, description="Warm-up in tokens.")
    warmup_fraction: float | None = Field(
        default=None, ge=0, le=1, description="Warm-up as a share of one pass over the full dataset (estimated)."
    )
    min_lr_fraction: float = Field(default=0.1, ge=0, le=1, description="Final learning rate relative to the peak.")
    decay_fraction: float = Field(default=0.2, ge=0, le=1, description="wsd: share of all steps in the final decay.")
    weight_decay: Literal["constant", "linear", "cosine"] | ImportPath = Field(
        default="constant",
        description="Shape of the weight decay over the run, or a function of your own like that of name.",
    )
    final_weight_decay_fraction: float = Field(
        default=0.0, ge=0, description="linear and cosine: final weight decay relative to the first."
    )


class LossConfig(Section):
    chunk_tokens: int = Field(
        default=1024, ge=1, description="Positions whose logits exist at once; the full logits never stand."
    )
    z_loss_weight: float = Field(default=0.0, ge=0, description="Weight of the squared log-partition penalty.")
    label_smoothing_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Probability spread over the vocabulary."
    )
