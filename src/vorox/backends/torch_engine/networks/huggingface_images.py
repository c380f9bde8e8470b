"""Images of a transformers model: patches, grids and multimodal positions (Qwen2-VL).

See arXiv 2409.12191. A token of text has equal positions in time, height and width. The tokens of an image have one
time, and their row and column; the text after it continues behind the largest position of the image. Positions start
again in each document.

Shape legend: B rows, T positions, I images, P patches, C colours, S side of a patch, F frames of a patch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.networks.module_network import blocks
from vorox.core.batch import AnyImages, BatchPatches, Int32Array
from vorox.core.errors import DataError
from vorox.core.schema.image_processor import ImageProcessorConfig


def image_inputs(
    images: AnyImages, tokens_BT: Int32Array, positions_BT: Int32Array, processor: ImageProcessorConfig,
    device: torch.device,
) -> dict[str, Tensor]:  # fmt: skip
    """Return the inputs of a micro-batch besides its tokens: positions, and patches with their grids if it has images.

    Args:
        images: The images of the micro-batch.
        tokens_BT: Its tokens.
        positions_BT: Position of each token in its document.
        processor: How the model reads images.
        device: Where the inputs are placed.

    Raises:
        DataError: The tokens have other positions of images than the images take.
    """
    assert isinstance(images, BatchPatches), "the model reads images of any size"
    positions_4BT = multimodal_positions(images, tokens_BT, positions_BT, processor.merge_size)
    inputs = {"positions": to_device(positions_4BT, device)}
    if len(images.grids_I2):
        grids_I3 = np.concatenate([np.ones((len(images.grids_I2), 1), np.int64), images.grids_I2], axis=1)
        inputs["pixel_values"] = pixel_values(to_device(images.patches_PCSS, device), processor)
        inputs["image_grid_thw"] = to_device(grids_I3, device)
    return inputs


def vision_tower(module: nn.Module) -> nn.Module | None:
    """Return the part of a model that reads images; ``None`` if it reads text only."""
    return getattr(getattr(module, "model", None), "visual", None)


def language_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks (``module_network.py``) outside of the vision tower."""
    tower = vision_tower(module)
    inside = set() if tower is None else set(tower.modules())
    return [block for block in blocks(module) if block not in inside]


def unused_tower(module: nn.Module) -> Tensor | None:
    """Return 0 with a zero gradient for each trained parameter of the vision tower; ``None`` if it is frozen.

    A rank whose micro-batch has no image adds it to its objective: FSDP2 sums gradients of parameters that have one, so
    ranks must agree which do.
    """
    tower = vision_tower(module)
    trained = [] if tower is None else [value for value in tower.parameters() if value.requires_grad]
    return 0 * torch.stack([value.flatten()[0].float() for value in trained]).sum() if trained else None


def pixel_values(patches_PCSS: Tensor, processor: ImageProcessorConfig) -> Tensor:
    """Return normalised patches, fp32 ``[P, C F S S]``.

    Values are looked up in a table that is computed as transformers' processor computes them, so they have its bits.
    """
    levels_C256 = np.repeat((np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)[None], 3, axis=0)
    mean, std = (np.array(values, np.float32)[:, None] for values in (processor.mean, processor.std))
    table = to_device((levels_C256 - mean) / std, patches_PCSS.device)
    colours = torch.arange(3, device=patches_PCSS.device)[:, None, None]
    values_PCSS = table[colours, patches_PCSS.long()]
    values_PCFSS = values_PCSS[:, :, None].expand(-1, -1, processor.temporal_patch_size, -1, -1)
    return values_PCFSS.reshape(len(patches_PCSS), -1)


def multimodal_positions(
    images: BatchPatches, tokens_BT: Int32Array, positions_BT: Int32Array, merge_size: int
) -> npt.NDArray[np.int64]:
    """Return positions in the document, in time, height and width, ``[4, B, T]``.

    Raises:
        DataError: The tokens have other positions of images than the images take.
    """
    positions_4BT = np.repeat(positions_BT[None].astype(np.int64), 4, axis=0)
    starts, lengths = _runs(tokens_BT == images.token_id)
    grids_I2 = images.grids_I2 // merge_size
    taken = grids_I2.prod(axis=1).tolist()
    if lengths != taken or [row for row, _ in starts] != images.rows_I.tolist():
        raise DataError(
            f"The batch has images of {taken} tokens, but {lengths} positions of images",
            where="data.sources.images_field", hint="no text may spell the image token",
        )  # fmt: skip
    for (row, start), length, (rows, columns) in zip(starts, lengths, grids_I2.tolist(), strict=True):
        end, index = start + length, np.arange(length)
        restarts = np.flatnonzero(positions_BT[row, end:] == 0)
        end_of_document = end + int(restarts[0]) if restarts.size else positions_BT.shape[1]
        first = int(positions_4BT[1, row, start])
        positions_4BT[1, row, start:end] = first
        positions_4BT[2, row, start:end] = first + index // columns
        positions_4BT[3, row, start:end] = first + index % columns
        positions_4BT[1:, row, end:end_of_document] += max(rows, columns) - length
    return positions_4BT


def _runs(is_image_BT: npt.NDArray[np.bool_]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return row and first position of each run of image tokens, and its length."""
    num_rows, num_positions = is_image_BT.shape
    edges = np.zeros((num_rows, num_positions + 2), np.int8)
    edges[:, 1:-1] = is_image_BT
    changes = np.diff(edges, axis=1)
    rows, starts = np.nonzero(changes == 1)
    ends = np.nonzero(changes == -1)[1]
    return list(zip(rows.tolist(), starts.tolist(), strict=True)), (ends - starts).tolist()
