"""``train.distillation``: learn from the predictions of a trained model."""

from __future__ import annotations

from vorox.core.schema.section import Section
from vorox.core.schema.setting import setting


class DistillationConfig(Section):
    teacher: str | None = setting(
        default=None,
        description="torch: train towards the predictions of these weights as well, which stay frozen: a run or "
        "any step of one (RUN@STEP), a checkpoint or a transformers directory; or hf://OWNER/NAME@REVISION. A native "
        "architecture with the same vocabulary.",
        resume="refused",
        engines=("torch",),
    )
    top_k: int | None = setting(
        default=None,
        ge=1,
        description="Keep the K most likely tokens of the teacher at each position, with probabilities that sum to 1. "
        "None: all tokens.",
        resume="refused",
    )
    logits: str | None = setting(
        default=None,
        description="torch: train towards stored logits instead of a teacher in memory: a directory that `vorox data "
        "teacher-logits` wrote for the rows of this data.",
        resume="refused",
        engines=("torch",),
    )
    temperature: float = setting(
        default=2.0,
        gt=0,
        description="Temperature T of both distributions; a larger one shows more of unlikely tokens.",
    )
    weight: float = setting(
        default=0.5,
        gt=0,
        le=1,
        description="Weight w of the teacher: the objective is (1 - w) cross entropy + w T^2 KL(teacher || student).",
    )

    @property
    def is_active(self) -> bool:
        """Whether a model learns from a teacher or its stored logits."""
        return self.teacher is not None or self.logits is not None
