"""``train.distillation``: learn from the predictions of a trained model."""

from __future__ import annotations

from pydantic import Field

from vorox.core.schema.section import Section


class DistillationConfig(Section):
    teacher: str | None = Field(
        default=None,
        description="torch: train towards the predictions of these weights as well, which stay frozen: a run, a "
        "checkpoint or a transformers directory; or hf://OWNER/NAME@REVISION. A native architecture with the same "
        "vocabulary.",
    )
    top_k: int | None = Field(
        default=None,
        ge=1,
        description="Keep the K most likely tokens of the teacher at each position, with probabilities that sum to 1. "
        "None: all tokens.",
    )
    logits: str | None = Field(
        default=None,
        description="torch: train towards stored logits instead of a teacher in memory: a directory that `vorox data "
        "teacher-logits` wrote for the rows of this data.",
    )
    temperature: float = Field(
        default=2.0,
        gt=0,
        description="Temperature T of both distributions; a larger one shows more of unlikely tokens.",
    )
    weight: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Weight w of the teacher: the objective is (1 - w) cross entropy + w T^2 KL(teacher || student).",
    )

    @property
    def is_active(self) -> bool:
        """Whether a model learns from a teacher or its stored logits."""
        return self.teacher is not None or self.logits is not None
