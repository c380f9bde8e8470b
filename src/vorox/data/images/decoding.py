"""Decoding of images to the pixels that a model reads."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.batch import BatchImages, BatchPatches
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.data.images.layout import ImageLayout, PatchGrid

MAX_PIXELS = 1 << 27
"""Larger images are refused: a small file can decode to more than memory holds."""

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
"""The formats that are opened. Others of Pillow start programs (EPS) or are read by rarely tested code."""

_BICUBIC = 3
"""Pillow's ``Resampling.BICUBIC``."""


@dataclass(frozen=True, slots=True)
class BlankImage:
    """A black image in the place of one whose document is masked; it has the shape of that one, and no bytes.

    Attributes:
        rows: Rows of its patches; 0 for a model that reads images of one size.
        columns: Columns of its patches.
    """

    rows: int = 0
    columns: int = 0

    @classmethod
    def like(cls, content: bytes, layout: ImageLayout) -> BlankImage:
        """Return a blank image that takes the positions of another.

        Raises:
            ValueError: The other one cannot be opened.
        """
        if layout.grid is None:
            return cls()
        with _opened(content) as opened:
            return cls(*layout.grid.patches(opened.width, opened.height))

    @property
    def address(self) -> int:
        """What stands in a row for the hash of the bytes of an image."""
        return self.rows << 32 | self.columns


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How a model reads images of one size.

    Attributes:
        size_pixels: Images are resized to squares of this size.
        token_id: The id at their positions.
    """

    size_pixels: int
    token_id: int

    def read(self, contents: Sequence[bytes | BlankImage], rows_I: npt.NDArray[np.int64]) -> BatchImages:
        """Decode the images of a micro-batch; one that occurs twice is decoded once.

        Args:
            contents: Their encoded bytes.
            rows_I: Their rows.

        Raises:
            ValueError: One cannot be decoded.
        """
        decoded = {content: decode_image(content, self.size_pixels) for content in dict.fromkeys(contents)}
        pixels_ISSC = np.zeros((len(contents), self.size_pixels, self.size_pixels, 3), np.uint8)
        for index, content in enumerate(contents):
            pixels_ISSC[index] = decoded[content]
        return BatchImages(pixels_ISSC, rows_I, self.token_id)


@dataclass(frozen=True, slots=True)
class PatchInput:
    """How a model reads images of any size, as patches.

    Attributes:
        grid: The size of resized images.
        token_id: The id at their positions.
    """

    grid: PatchGrid
    token_id: int

    def read(self, contents: Sequence[bytes | BlankImage], rows_I: npt.NDArray[np.int64]) -> BatchPatches:
        """As ``ImageInput.read``."""
        decoded = {content: decode_patches(content, self.grid) for content in dict.fromkeys(contents)}
        side = self.grid.patch_size_pixels
        patches = [np.zeros((0, 3, side, side), np.uint8), *(decoded[content][0] for content in contents)]
        grids_I2 = np.array([decoded[content][1] for content in contents], np.int64).reshape(-1, 2)
        return BatchPatches(np.concatenate(patches), grids_I2, rows_I, self.token_id)


def decode_image(content: bytes | BlankImage, size_pixels: int) -> npt.NDArray[np.uint8]:
    """Return an image as RGB, ``[size, size, 3]``, resized without its aspect ratio (as SigLIP's processor).

    Raises:
        ValueError: It cannot be decoded.
    """
    if isinstance(content, BlankImage):
        return np.zeros((size_pixels, size_pixels, 3), np.uint8)
    with _opened(content) as opened:
        opened.draft("RGB", (size_pixels, size_pixels))
        return np.array(opened.convert("RGB").resize((size_pixels, size_pixels), _BICUBIC), np.uint8)


def decode_patches(content: bytes | BlankImage, grid: PatchGrid) -> tuple[npt.NDArray[np.uint8], tuple[int, int]]:
    """Return the patches of an image, RGB ``[patches, 3, side, side]``, with their rows and columns.

    Resized as by transformers' Qwen2-VL processor without torchvision. The patches of a token follow each other.

    Raises:
        ValueError: It cannot be decoded, or the model does not read images of its size.
    """
    side, merge = grid.patch_size_pixels, grid.merge_size
    if isinstance(content, BlankImage):
        rows, columns = content.rows, content.columns
        return np.zeros((rows * columns, 3, side, side), np.uint8), (rows, columns)
    with _opened(content) as opened:
        rows, columns = grid.patches(opened.width, opened.height)
        pixels = np.array(opened.convert("RGB").resize((columns * side, rows * side), _BICUBIC), np.uint8)
    parts = pixels.reshape(rows // merge, merge, side, columns // merge, merge, side, 3)
    return parts.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, side, side), (rows, columns)


def measure_image(content: bytes) -> tuple[int, int]:
    """Return the width and height of an image that can be decoded.

    Raises:
        ValueError: It cannot.
    """
    with _opened(content) as opened:
        size = opened.width, opened.height
        opened.draft("RGB", (1, 1))
        opened.convert("RGB")
    return size


@contextlib.contextmanager
def _opened(content: bytes) -> Generator[Any]:
    """Open an image; errors of Pillow inside the block become ``ValueError``."""
    image_module = import_pillow()
    try:
        with image_module.open(io.BytesIO(content), formats=_FORMATS) as opened:
            if opened.width * opened.height > MAX_PIXELS:
                raise ValueError(f"{opened.width} x {opened.height} pixels are more than {MAX_PIXELS:,}")
            yield opened
    except image_module.UnidentifiedImageError as error:
        raise ValueError(f"it is no {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} image") from error
    except ValueError:
        raise
    except Exception as error:  # the decoders of Pillow raise whatever a damaged file leads them to
        raise ValueError(str(error) or type(error).__name__) from error


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
