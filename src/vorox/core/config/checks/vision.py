"""Checks of ``model.vision`` and of sources with images (see ``cross_checks.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vorox.core.config.checks.sources import keyed_sources
from vorox.core.config.layers.tree import Problem
from vorox.core.schema import RunConfig, SourceConfig
from vorox.core.schema.image_processor import ImageProcessorConfig
from vorox.core.schema.vision import IMAGE_TOKEN

_LEAST_TOKENS_PER_IMAGE = 4


def vision_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions between the image encoder and the data, and what it does not support."""
    vision, switch = config.model.vision, "model.vision.num_layers"
    sources = list(keyed_sources(config))
    if config.model.kind == "huggingface":
        if any(source.images_field is not None for _, source in sources):
            yield from _image_processor(config)
            yield from _pairs(sources)
        elif config.model.image_processor != ImageProcessorConfig():
            key = "model.image_processor"
            yield Problem(f"{key} has no effect: no source has images_field; remove the section", keys=(key,))
        return
    if not vision.num_layers:
        for key, source in sources:
            if source.images_field is not None:
                yield Problem(
                    f"{key} ({source.name}) has images, but the model reads text only; set {switch} to the layers of "
                    "an image encoder, or remove images_field",
                    keys=(f"{key}.images_field", switch),
                )
        return
    side, unit = vision.image_size_pixels, vision.patch_size_pixels * vision.merge_size
    if side % unit:
        key = "model.vision.image_size_pixels"
        yield Problem(f"{key}={side} is not a multiple of patch_size_pixels x merge_size = {unit}", keys=(key,))
    elif vision.tokens_per_image < _LEAST_TOKENS_PER_IMAGE:
        yield Problem(
            f"An image takes {vision.tokens_per_image} tokens, fewer than {_LEAST_TOKENS_PER_IMAGE}; use larger images "
            "or smaller patches",
            keys=("model.vision.image_size_pixels", "model.vision.patch_size_pixels"),
        )
    elif vision.tokens_per_image + 2 > config.data.sequence_length_tokens:
        yield Problem(
            f"An image takes {vision.tokens_per_image} tokens, which a row of {config.data.sequence_length_tokens} "
            "cannot hold beside text; increase data.sequence_length_tokens",
            keys=("data.sequence_length_tokens", "model.vision.image_size_pixels"),
        )
    if vision.hidden_size % vision.num_heads:
        yield Problem(
            f"model.vision.hidden_size={vision.hidden_size} is not divisible by model.vision.num_heads="
            f"{vision.num_heads}",
            keys=("model.vision.hidden_size", "model.vision.num_heads"),
        )
    if IMAGE_TOKEN not in config.tokenizer.special_tokens and config.tokenizer.kind not in {"file", "huggingface"}:
        key = "tokenizer.special_tokens"
        yield Problem(f"{switch} needs the token of images; set {key}=['{IMAGE_TOKEN}']", keys=(switch, key))
    yield from _pairs(sources)


def _pairs(sources: Sequence[tuple[str, SourceConfig]]) -> Iterator[Problem]:
    for key, source in sources:
        if source.preference_pairs and source.images_field is not None:
            keys = (f"{key}.preference_pairs", f"{key}.images_field")
            yield Problem(f"{key} ({source.name}) has preference pairs, which cannot have images", keys=keys)


def _image_processor(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions of images with a transformers model, whose settings may not be adopted yet."""
    processor, name = config.model.image_processor, "model.image_processor"
    area, length = processor.unit_pixels**2, config.data.sequence_length_tokens
    if not area:
        return
    if processor.min_pixels > processor.max_pixels:
        keys = (f"{name}.min_pixels", f"{name}.max_pixels")
        yield Problem(f"{keys[0]}={processor.min_pixels} is more than {keys[1]}={processor.max_pixels}", keys=keys)
    if processor.min_pixels < _LEAST_TOKENS_PER_IMAGE * area:
        yield Problem(
            f"{name}.min_pixels={processor.min_pixels} allows images of fewer than {_LEAST_TOKENS_PER_IMAGE} tokens; "
            f"set it to at least {_LEAST_TOKENS_PER_IMAGE * area}",
            keys=(f"{name}.min_pixels",),
        )
    least = processor.min_pixels // area + 4  # the ids around it, and some text
    if least > length:
        yield Problem(
            f"An image takes at least {least} tokens, which a row of {length} cannot hold; increase "
            f"data.sequence_length_tokens, or reduce {name}.min_pixels",
            keys=("data.sequence_length_tokens", f"{name}.min_pixels"),
        )
