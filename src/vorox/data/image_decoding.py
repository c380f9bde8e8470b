"""Decoding of images to the pixels that a model reads."""

from __future__ import annotations

import io
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.errors import ConfigError
from vorox.core.installation import install_command

MAX_PIXELS = 1 << 27
"""Larger images are refused: a small file can decode to more than memory holds."""


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How a model reads images.

    Attributes:
        size_pixels: Images are resized to squares of this size.
        token_id: The id at their positions.
    """

    size_pixels: int
    token_id: int


def decode_image(content: bytes, size_pixels: int) -> npt.NDArray[np.uint8]:
    """Return an image as RGB, ``[size, size, 3]``, resized without its aspect ratio (as SigLIP's processor).

    Raises:
        ValueError: It cannot be decoded.
    """
    image_module = import_pillow()
    try:
        with image_module.open(io.BytesIO(content)) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MAX_PIXELS:,}")
            opened.draft("RGB", (size_pixels, size_pixels))
            image = opened.convert("RGB").resize((size_pixels, size_pixels), image_module.Resampling.BICUBIC)
            return np.array(image, np.uint8)
    except image_module.UnidentifiedImageError as error:
        raise ValueError("it has no format that Pillow reads") from error
    except (OSError, SyntaxError, EOFError, image_module.DecompressionBombError) as error:
        raise ValueError(str(error)) from error


def import_pillow() -> Any:
    """Return Pillow's ``Image``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return import_module("PIL.Image")
    except ImportError as error:
        raise ConfigError(
            "Images need Pillow, which is not installed",
            where="data.sources.images_field",
            hint=install_command("vision"),
        ) from error
