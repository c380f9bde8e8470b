"""How many positions of a row an image takes, and the tokens around it: part of the recipe of a cache.

The native encoder takes a fixed number (``model.vision``). Transformers models keep the aspect ratio, so the number
follows from the size of the image (``model.image_processor``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.schema.model import ModelConfig
from vorox.data.images.tokens import ADDRESS_IDS, image_ids

_MAX_ASPECT_RATIO = 200


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """The size of resized images, as ``smart_resize`` of transformers' Qwen2-VL: multiples of ``merge_size`` patches.

    Attributes: see ``core/schema/image_processor.py``.
    """

    patch_size_pixels: int
    merge_size: int
    min_pixels: int
    max_pixels: int

    def patches(self, width: int, height: int) -> tuple[int, int]:
        """Return the rows and columns of patches of an image.

        Raises:
            ValueError: It is too narrow, or has too few tokens.
        """
        if max(width, height) > _MAX_ASPECT_RATIO * min(width, height):
            raise ValueError(f"{width} x {height} pixels have an aspect ratio above {_MAX_ASPECT_RATIO}")
        unit = self.patch_size_pixels * self.merge_size
        rows, columns = round(height / unit) * unit, round(width / unit) * unit
        if rows * columns > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows = max(unit, math.floor(height / scale / unit) * unit)
            columns = max(unit, math.floor(width / scale / unit) * unit)
        elif rows * columns < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = math.ceil(height * scale / unit) * unit, math.ceil(width * scale / unit) * unit
        if rows * columns < ADDRESS_IDS * unit * unit:
            raise ValueError(
                f"{width} x {height} pixels take {rows * columns // unit**2} tokens, fewer than {ADDRESS_IDS}: "
                "increase model.image_processor.min_pixels and max_pixels"
            )
        return rows // self.patch_size_pixels, columns // self.patch_size_pixels


@dataclass(frozen=True, slots=True)
class ImageLayout:
    """How images are placed in rows.

    Attributes:
        tokens_per_image: Positions of an image; 0 if they follow from its size.
        grid: The size of resized images; ``None`` for a fixed number of positions.
        start_ids: Ids before an image.
        end_ids: Ids after an image.
    """

    tokens_per_image: int = 0
    grid: PatchGrid | None = None
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()

    def num_tokens(self, size: tuple[int, int]) -> int:
        """Return the positions that an image takes, without the ids around it.

        Args:
            size: Its width and height in pixels.

        Raises:
            ValueError: The model does not read images of this size.
        """
        if self.grid is None:
            return self.tokens_per_image
        rows, columns = self.grid.patches(*size)
        return rows * columns // self.grid.merge_size**2

    def ids(self, digest: int, num_tokens: int) -> npt.NDArray[np.uint32]:
        """Return the ids of an image in a row, with those around it."""
        before, after = (np.array(ids, np.uint32) for ids in (self.start_ids, self.end_ids))
        return np.concatenate([before, image_ids(digest, num_tokens), after])

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"start_ids": list(self.start_ids), "end_ids": list(self.end_ids)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ImageLayout:
        """Return the layout that ``to_json`` described."""
        grid = value["grid"]
        ids = {name: tuple(value[name]) for name in ("start_ids", "end_ids")}
        return cls(value["tokens_per_image"], None if grid is None else PatchGrid(**grid), **ids)


def image_layout(model: ModelConfig) -> ImageLayout | None:
    """Return how the images of a model are placed in rows; ``None`` if it reads text only."""
    processor = model.image_processor
    if processor.patch_size_pixels is not None:
        grid = PatchGrid(
            processor.patch_size_pixels, processor.merge_size, processor.min_pixels, processor.max_pixels
        )  # fmt: skip
        return ImageLayout(0, grid, (processor.start_token_id,), (processor.end_token_id,))
    return ImageLayout(model.vision.tokens_per_image) if model.vision.num_layers else None
