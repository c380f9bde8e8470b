"""The image encoder: images to vectors at the positions of their tokens (``models/decoder/vision_spec.py``).

Shape legend: I images, S side in pixels, G patches per side, P = G x G patches, E width of the encoder, N heads,
H head width, M positions of a micro-batch, K positions of images, D width of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vorox.backends.torch_engine.device.device_copy import to_device
from vorox.backends.torch_engine.layers.kernels import Kernels
from vorox.core.batch import AnyImages, BatchImages, Int32Array
from vorox.core.errors import DataError
from vorox.models.decoder.vision_spec import NUM_CHANNELS, VisionSpec

_NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The images of a micro-batch on the device.

    Attributes:
        pixels_ISSC: RGB, uint8.
        positions_K: Positions of all images, in their order, among those of the micro-batch.
    """

    pixels_ISSC: Tensor
    positions_K: Tensor


def images_to_device(images: AnyImages, tokens_BT: Int32Array, device: torch.device) -> ImageInputs | None:
    """Copy the images of a micro-batch to the device; ``None`` if it has none."""
    assert isinstance(images, BatchImages), "the encoder reads images of one size"
    positions_K = np.flatnonzero(tokens_BT.reshape(-1) == images.token_id)
    if not len(images.pixels_ISSC) and not positions_K.size:
        return None
    return ImageInputs(to_device(images.pixels_ISSC, device), to_device(positions_K, device))


class ImageEncoder(nn.Module):
    """Encodes images and writes them into the residual stream.

    Args:
        spec: The encoder.
        parameters: Parameters of the modules by name.
        kernels: The operations.
    """

    def __init__(self, spec: VisionSpec, parameters: Mapping[str, nn.Parameter], kernels: Kernels) -> None:
        super().__init__()
        self._spec, self._linear_kernel = spec, kernels.linear
        self._names: dict[str, str] = {}
        for name, parameter in parameters.items():
            if name.startswith("vision."):
                own = name.removeprefix("vision.")
                self._names[own] = own.replace(".", "_")
                self.register_parameter(self._names[own], parameter)

    def forward(self, x_MD: Tensor, images: ImageInputs) -> Tensor:
        """Return the residual stream with the images at their positions.

        Raises:
            DataError: The micro-batch has other positions of images than its images take.
        """
        num_images, spec = len(images.pixels_ISSC), self._spec
        if num_images * spec.tokens_per_image != len(images.positions_K):
            raise DataError(
                f"The batch has {num_images} images of {spec.tokens_per_image} tokens, but {len(images.positions_K)} "
                "positions of images",
                where="data.sources.images_field", hint="no text may spell the image token",
            )  # fmt: skip
        return x_MD.index_put((images.positions_K.long(),), self.encode(images.pixels_ISSC).to(x_MD.dtype))

    def encode(self, pixels_ISSC: Tensor) -> Tensor:
        """Return images as vectors of the decoder, ``[I * tokens_per_image, D]``, row by row of each image."""
        spec, num_images, side = self._spec, len(pixels_ISSC), self._spec.patches_per_side
        patch = spec.patch_size_pixels
        scaled_ISSC = pixels_ISSC.to(self._get("patch_embedding.weight").dtype) / 127.5 - 1.0
        patches = scaled_ISSC.view(num_images, side, patch, side, patch, NUM_CHANNELS).permute(0, 1, 3, 5, 2, 4)
        x_IPE = self._linear("patch_embedding", patches.reshape(-1, spec.patch_width))
        x_IPE = x_IPE.view(num_images, side * side, -1) + self._get("positions.weight")
        for layer in range(spec.num_layers):
            name = f"blocks.{layer}"
            x_IPE = x_IPE + self._attention(f"{name}.attention", self._norm(f"{name}.attention_norm", x_IPE))
            hidden = F.gelu(self._linear(f"{name}.mlp_up", self._norm(f"{name}.mlp_norm", x_IPE)), approximate="tanh")
            x_IPE = x_IPE + self._linear(f"{name}.mlp_down", hidden)
        return self._project(self._norm("final_norm", x_IPE))

    def _attention(self, name: str, x_IPE: Tensor) -> Tensor:
        num_images, num_patches, width = x_IPE.shape
        qkv = self._linear(f"{name}.qkv", x_IPE).view(num_images, num_patches, 3, self._spec.num_heads, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind()
        mixed_INPH = F.scaled_dot_product_attention(query, key, value)
        return self._linear(f"{name}.output", mixed_INPH.transpose(1, 2).reshape(num_images, num_patches, width))

    def _project(self, x_IPE: Tensor) -> Tensor:
        """Join squares of ``merge_size`` x ``merge_size`` patches, and map them to the width of the decoder."""
        merge, side, num_images = self._spec.merge_size, self._spec.patches_per_side, len(x_IPE)
        squares = x_IPE.view(num_images, side // merge, merge, side // merge, merge, -1).permute(0, 1, 3, 2, 4, 5)
        hidden = F.gelu(self._linear("projector.up", squares.reshape(-1, self._spec.merged_width)))
        return self._linear("projector.down", hidden)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = self._linear_kernel(x.reshape(-1, x.shape[-1]), self._get(f"{name}.weight"), self._get(f"{name}.bias"))
        return y.view(*x.shape[:-1], -1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._get(f"{name}.weight")
        return F.layer_norm(x, weight.shape, weight, self._get(f"{name}.bias"), _NORM_EPS)

    def _get(self, name: str) -> nn.Parameter:
        return getattr(self, self._names[name])
