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
