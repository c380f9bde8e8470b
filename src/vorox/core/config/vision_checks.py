"""Checks of ``model.vision`` and of sources with images (see ``cross_checks.py``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vorox.core.config.setting_dependencies import SOURCE_LISTS
from vorox.core.config.tree import Problem, unmet_needs
from vorox.core.schema import RunConfig, SourceConfig
from vorox.core.schema.image_processor import ImageProcessorConfig
from vorox.core.schema.vision import IMAGE_TOKEN

_LEAST_TOKENS_PER_IMAGE = 4


def vision_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions between the image encoder and the data, and what it does not support."""
    vision, switch = config.model.vision, "model.vision.num_layers"
    lists = zip(SOURCE_LISTS, (config.data.sources, config.data.validation.sources), strict=True)
    sources = [(f"{name}.{index}", source) for name, found in lists for index, source in enumerate(found)]
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
    yield from _unsupported(config, "An image encoder (model.vision)", switch)
    yield from _pairs(sources)


def _pairs(sources: Sequence[tuple[str, SourceConfig]]) -> Iterator[Problem]:
    for key, source in sources:
        if source.preference_pairs and source.images_field is not None:
            keys = (f"{key}.preference_pairs", f"{key}.images_field")
            yield Problem(f"{key} ({source.name}) has preference pairs, which cannot have images", keys=keys)


def _image_processor(config: RunConfig) -> Iterator[Problem]:
    """Yield the contradictions of images with a transformers model, whose settings may not be adopted yet."""
    processor, name = config.model.image_processor, "model.image_processor"
    yield from _unsupported(config, "A source with images (images_field)", "data.sources")
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


def _unsupported(config: RunConfig, what: str, switch: str) -> Iterator[Problem]:
    is_native = config.model.kind != "huggingface"
    parallel, train = config.parallel, config.train
    is_one = "1; replicas are supported" if is_native else "1; replicas and FSDP2 are supported"
    transforms = [*config.data.transforms, *(t for source in config.data.sources for t in source.transforms or ())]
    needs = (
        ("tokenizer.special_tokens", not is_native or IMAGE_TOKEN in config.tokenizer.special_tokens
            or config.tokenizer.kind in {"file", "huggingface"},
            f"the token of images: tokenizer.special_tokens=['{IMAGE_TOKEN}']"),
        ("data.packing", config.data.packing == "best_fit", "data.packing=best_fit, which keeps an image in one row"),
        ("data.mode", config.data.mode == "cached", "data.mode=cached"),
        ("data.transforms", not transforms, "data without transforms"),
        ("parallel.kind", parallel.kind == "native", "parallel.kind=native"),
        ("parallel.fsdp_size", not is_native or parallel.fsdp_size == 1, f"parallel.fsdp_size={is_one}"),
        ("parallel.tensor_parallel_size", parallel.tensor_parallel_size == 1,
            f"parallel.tensor_parallel_size={is_one}"),
        ("parallel.context_parallel_size", parallel.context_parallel_size == 1,
            f"parallel.context_parallel_size={is_one}"),
        ("parallel.pipeline_parallel_size", parallel.pipeline_parallel_size == 1,
            f"parallel.pipeline_parallel_size={is_one}"),
        ("loss.name", config.loss.name != "dpo", "another loss than dpo"),
        ("train.forward_backward", train.forward_backward is None, "train.forward_backward=null"),
        ("train.distillation.teacher", train.distillation.teacher is None, "train.distillation.teacher=null"),
        ("train.distillation.logits", train.distillation.logits is None, "train.distillation.logits=null"),
    )  # fmt: skip
    yield from unmet_needs(switch, what, needs)
    for index, stage in enumerate(config.data.stages):
        if stage.sequence_length_tokens is not None:
            key = f"data.stages.{index}.sequence_length_tokens"
            yield Problem(f"{what} needs whole rows: shorter ones would cut images; remove {key}", keys=(switch, key))
