"""``adapter``: train small matrices beside the frozen weights of a pretrained model."""

from __future__ import annotations

from typing import Literal, get_args

from vorox.core.schema.section import Section
from vorox.core.schema.setting import Need, setting

AdapterKind = Literal["lora", "dora", "qlora"]

_ADAPTER = Need("kind", get_args(AdapterKind))


class AdapterConfig(Section):
    kind: Literal["none", AdapterKind] = setting(
        default="none",
        description="none: train all weights. lora: freeze them, and add a trained product of two low-rank matrices to "
        "linear layers. dora: also train the norm of each row. qlora: as lora, with the frozen linear layers in 4 "
        "bits (NF4). Needs model.kind=huggingface.",
    )
    rank: int = setting(default=8, ge=1, description="Rank of the two matrices.", needs=_ADAPTER)
    alpha: float = setting(default=16.0, gt=0, description="The product is multiplied by alpha / rank.", needs=_ADAPTER)
    dropout_fraction: float = setting(
        default=0.0, ge=0, lt=1, description="Dropout on the input of the product.", needs=_ADAPTER
    )
    target_modules: tuple[str, ...] | None = setting(
        default=None,
        min_length=1,
        description="Linear layers that are adapted, by full name or its last parts (q_proj, self_attn.q_proj). None: "
        "all linear layers of the blocks.",
        needs=_ADAPTER,
    )
