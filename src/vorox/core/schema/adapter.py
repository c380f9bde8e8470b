"""``adapter``: train small matrices beside the frozen weights of a pretrained model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import Section


class AdapterConfig(Section):
    kind: Literal["none", "lora", "dora", "qlora"] = Field(
        default="none",
        description="none: train all weights. lora: freeze them, and add a trained product of two low-rank matrices to "
        "linear layers. dora: also train the norm of each row. qlora: as lora, with the frozen linear layers in 4 "
        "bits (NF4). Needs model.kind=huggingface.",
    )
    rank: int = Field(default=8, ge=1, description="Rank of the two matrices.")
    alpha: float = Field(default=16.0, gt=0, description="The product is multiplied by alpha / rank.")
    dropout_fraction: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the input of the product.")
    target_modules: tuple[str, ...] | None = Field(
        default=None,
        min_length=1,
        description="Linear layers that are adapted, by full name or its last parts (q_proj, self_attn.q_proj). None: "
        "all linear layers of the blocks.",
    )
