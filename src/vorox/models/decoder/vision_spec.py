"""The image encoder of a decoder: dimensions and parameter table, without tensors.

A vision transformer (patches, learned positions, pre-norm blocks, as SigLIP, arXiv 2303.15343), then a projector that
joins ``merge_size`` x ``merge_size`` patches to one token of the decoder (as Qwen2-VL, arXiv 2409.12191).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.schema.vision import VisionConfig
from vorox.models.spec import ParameterSpec

NUM_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """An image encoder with all dimensions resolved. Fields as in ``VisionConfig``."""

    num_layers: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    image_size_pixels: int
    patch_size_pixels: int
    merge_size: int

    @property
    def patches_per_side(self) -> int:
        return self.image_size_pixels // self.patch_size_pixels

    @property
    def patch_width(self) -> int:
        """Numbers of a patch."""
        return NUM_CHANNELS * self.patch_size_pixels**2

    @property
    def merged_width(self) -> int:
        """Width of the patches that become one token."""
        return self.hidden_size * self.merge_size**2

    @property
    def tokens_per_image(self) -> int:
        return (self.patches_per_side // self.merge_size) ** 2

    @property
    def saved_per_image(self) -> int:
        """Elements that the encoder saves for its backward pass, for each image."""
        per_patch = 8 * self.hidden_size + 2 * self.intermediate_size
        return self.patches_per_side**2 * (per_patch * self.num_layers + self.patch_width + 2 * self.hidden_size)

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def parameters(self, width: int, std: float) -> list[ParameterSpec]:
        """Return the rows of the parameter table, for a decoder of this width.

        Their kind is ``tensor``: they do not act on every token, and Muon leaves them to AdamW.
        """
        own = self.hidden_size
        rows: list[ParameterSpec] = []

        def linear(name: str, out: int, into: int) -> None:
            rows.append(ParameterSpec(f"vision.{name}.weight", (out, into), "normal", std, True, "tensor", ("", "")))
            rows.append(ParameterSpec(f"vision.{name}.bias", (out,), "zeros", 0.0, False, "bias", ("",)))

        def norm(name: str) -> None:
            rows.append(ParameterSpec(f"vision.{name}.weight", (own,), "ones", 0.0, False, "norm", ("",)))
            rows.append(ParameterSpec(f"vision.{name}.bias", (own,), "zeros", 0.0, False, "bias", ("",)))

        linear("patch_embedding", own, self.patch_width)
        shape = (self.patches_per_side**2, own)
        rows.append(ParameterSpec("vision.positions.weight", shape, "normal", std, False, "tensor", ("", "")))
        for layer in range(self.num_layers):
            norm(f"blocks.{layer}.attention_norm")
            for name in ("query", "key", "value", "output"):
                linear(f"blocks.{layer}.attention.{name}", own, own)
            norm(f"blocks.{layer}.mlp_norm")
            linear(f"blocks.{layer}.mlp_up", self.intermediate_size, own)
            linear(f"blocks.{layer}.mlp_down", own, self.intermediate_size)
        norm("final_norm")
        linear("projector.up", self.merged_width, self.merged_width)
        linear("projector.down", width, self.merged_width)
        return rows


def vision_spec(config: VisionConfig) -> VisionSpec | None:
    """Resolve and check the image encoder of a configuration; ``None`` without one.

    Raises:
        ConfigError: Its dimensions contradict each other.
    """
    if not config.num_layers:
        return None
    side = config.image_size_pixels // config.patch_size_pixels
    if config.image_size_pixels % config.patch_size_pixels or side % config.merge_size:
        raise ConfigError(
            f"Images of {config.image_size_pixels} pixels cannot be divided into patches of "
            f"{config.patch_size_pixels} pixels, joined {config.merge_size} by {config.merge_size}",
            where="model.vision.image_size_pixels",
            hint=f"choose a multiple of {config.patch_size_pixels * config.merge_size}",
        )
    if config.hidden_size % config.num_heads:
        raise ConfigError(
            f"hidden_size = {config.hidden_size} is not a multiple of num_heads = {config.num_heads}",
            where="model.vision",
        )
    inner = 4 * config.hidden_size if config.intermediate_size is None else config.intermediate_size
    return VisionSpec(**{**config.model_dump(), "intermediate_size": inner})


def stored_vision_spec(value: Mapping[str, Any]) -> VisionSpec:
    """Return the image encoder of a checkpoint."""
    return VisionSpec(**value)
