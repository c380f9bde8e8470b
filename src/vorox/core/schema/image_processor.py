"""``model.image_processor``: how a transformers model reads images, adopted from its directory."""

from __future__ import annotations

from vorox.core.schema.section import Section
from vorox.core.schema.setting import Need, setting

_FOREIGN = Need("model.kind", ("huggingface",))


class ImageProcessorConfig(Section):
    """The image processor of Qwen-VL models: images of any size, divided into patches (Qwen2-VL, arXiv 2409.12191)."""

    patch_size_pixels: int | None = setting(
        default=None,
        ge=1,
        description="Side of a patch. Adopted from the model, as all of this section, if a source has images_field. "
        "None: the model reads text only.",
        needs=_FOREIGN,
    )
    temporal_patch_size: int = setting(
        default=2, ge=1, description="Frames of a patch; an image is repeated.", needs=_FOREIGN
    )
    merge_size: int = setting(
        default=2,
        ge=1,
        description="This many patches in each direction become one token of the decoder.",
        needs=_FOREIGN,
    )
    min_pixels: int = setting(
        default=3136,
        ge=1,
        description="Smaller images are enlarged to this many pixels. May differ from the model's.",
        needs=_FOREIGN,
    )
    max_pixels: int = setting(
        default=1003520,
        ge=1,
        description="Larger images are reduced to this many pixels: an image takes at most max_pixels / "
        "(patch_size_pixels x merge_size)^2 tokens. May differ from the model's.",
        needs=_FOREIGN,
    )
    mean: tuple[float, float, float] = setting(
        default=(0.48145466, 0.4578275, 0.40821073),
        description="Subtracted from each colour, scaled to 0 to 1.",
        needs=_FOREIGN,
    )
    std: tuple[float, float, float] = setting(
        default=(0.26862954, 0.26130258, 0.27577711), description="Each colour is divided by this.", needs=_FOREIGN
    )
    image_token_id: int = setting(
        default=151655, ge=0, description="The id at the positions of an image.", needs=_FOREIGN
    )
    start_token_id: int = setting(default=151652, ge=0, description="The id before an image.", needs=_FOREIGN)
    end_token_id: int = setting(default=151653, ge=0, description="The id after an image.", needs=_FOREIGN)

    @property
    def unit_pixels(self) -> int:
        """Side of the square that becomes one token; 0 if the model reads text only."""
        return (self.patch_size_pixels or 0) * self.merge_size
