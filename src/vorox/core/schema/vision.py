"""``model.vision``: the image encoder in front of the native decoder."""

from __future__ import annotations

from vorox.core.schema.section import Section
from vorox.core.schema.setting import FUNCTION, Need, setting

IMAGE_TOKEN = "<|image|>"  # noqa: S105
"""The special token that a model sees at the positions of an image."""

QWEN_IMAGE_TOKEN = "<|image_pad|>"  # noqa: S105
"""The same in Qwen-VL transformers models."""

_ENCODER = Need("num_layers", remedy="an image encoder (model.vision.num_layers)")


class VisionConfig(Section):
    """A vision transformer whose patches take the place of tokens (Qwen2-VL, arXiv 2409.12191; SigLIP, 2303.15343)."""

    num_layers: int = setting(
        default=0,
        ge=0,
        description="Blocks of the image encoder. 0: the model reads text only.",
        engines=("torch",),
        needs=Need("model.kind", ("decoder", FUNCTION)),
    )
    hidden_size: int = setting(default=384, ge=1, description="Width of the image encoder.", needs=_ENCODER)
    num_heads: int = setting(default=6, ge=1, description="Attention heads of the image encoder.", needs=_ENCODER)
    intermediate_size: int | None = setting(
        default=None, ge=1, description="Width of the image encoder's MLP. None: 4 x hidden_size.", needs=_ENCODER
    )
    image_size_pixels: int = setting(
        default=224, ge=1, description="Images are resized to squares with sides of this length.", needs=_ENCODER
    )
    patch_size_pixels: int = setting(
        default=14, ge=1, description="Side of a patch, the unit of the image encoder.", needs=_ENCODER
    )
    merge_size: int = setting(
        default=2,
        ge=1,
        description="This many patches in each direction become one token of the decoder: an image takes "
        "(image_size_pixels / patch_size_pixels / merge_size)^2 tokens.",
        needs=_ENCODER,
    )

    @property
    def tokens_per_image(self) -> int:
        """Tokens of the decoder for an image; 0 without an image encoder."""
        side = self.image_size_pixels // self.patch_size_pixels // self.merge_size
        return side * side if self.num_layers else 0
