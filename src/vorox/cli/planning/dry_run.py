"""``vorox train --dry-run``: the plan of a run, without building or writing anything.

A valid configuration goes in. Lines of a report come out, or the error and exit code that the run would end with.
Sources are listed and read (to identify them), existing caches and tokenizers are looked up, and the engine validates
the configuration with a model of one small layer. Estimates, needed while a tokenizer or cache is missing, are marked
with "about".
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from vorox import backends
from vorox.cli.planning.data_growth import DataGrowth, find_growth
from vorox.cli.planning.plan import memory_lines
from vorox.cli.settings.training_settings import OriginOf, training_settings
from vorox.cli.terminal import humanize
from vorox.cli.terminal.build_display import BuildDisplay
from vorox.core.batch_sizes import batch_sizes_of
from vorox.core.config import check_recordable, config_digest, model_label
from vorox.core.config.config_for_text import expected_ids
from vorox.core.files.file_holder import lock_holder
from vorox.core.pluralize import pluralize
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import ResumeFrom, RunLayout, step_directories
from vorox.core.schema import RunConfig
from vorox.core.schema.data import Split
from vorox.core.schema.model import ModelConfig
from vorox.data.cache.files.manifest import Manifest
from vorox.data.cache.reader import CacheReader
from vorox.data.corpus.cache_location import cache_root, find_location, recorded_location
from vorox.data.corpus.cache_opener import recipe_for
from vorox.data.corpus.corpus import exact_weights
from vorox.data.corpus.run_views import RunViews
from vorox.data.corpus.source_listing import ListedSources, list_sources
from vorox.data.images.layout import image_layout
from vorox.data.recipe import RECIPE_NAME
from vorox.data.storage import check_writable
from vorox.data.text.holdout_selection import held_out_bytes
from vorox.data.text.sources import Source
from vorox.data.tokenizers.store import configured_untrained, load_run_tokenizer
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.optimizer_groups import optimizer_groups
from vorox.models.spec import ModelSpec
from vorox.planned_run import choose_micro_batch, is_fresh, resolve_model
from vorox.planning.auto_micro_batch import with_micro_batch
from vorox.planning.disk_space import plan_disk, save_interval_seconds
from vorox.planning.flops import flops_per_token
from vorox.records.run_context import expected_directory
from vorox.records.run_lookup import short_path
from vorox.training.loop.scheduled_tasks import check_tasks
from vorox.training.loop.startup import check_resume
from vorox.training.origin.origin_checks import check_origin
from vorox.training.origin.transformers_ids import warn_of_other_ids
from vorox.training.steps.schedule import Horizon, horizon, learning_rate_warnings
from vorox.training.weights.teacher import find_stored_logits, find_teacher

_BYTES_PER_TOKEN = {
    "bpe": 3.6,
    "file": 4.0,
    "huggingface": 4.0,
    "tiktoken": 4.0,
    "byte": 1.0,
    "char": 1.0,
    "none": 2.0,
    "tokens": 2.0,
}
"""Estimated bytes of text per token by kind of tokenizer, used until the cache exists."""


_ENGINE_FACTS = (*backends.BACKENDS, "device", "num_devices", "dtype", "determinism", "compiled", "num_threads")
"""Facts of an engine that a dry run shows; ``run.json`` has all of them."""


@dataclass(frozen=True, slots=True)
class _Cache:
    """The cache of one split of one source; ``reader`` is ``None`` until it is built."""

    name: str
    reader: CacheReader | None
    estimated_tokens: float

    @property
    def rows(self) -> int | None:
        return None if self.reader is None else self.reader.num_rows


@dataclass(frozen=True, slots=True)
class _Text:
    """What is known about the text of a run before caches are built."""

    listed: ListedSources
    caches: tuple[_Cache, ...]
    vocab_size: int
    num_train_tokens: float
    exact: bool


@dataclass(frozen=True)
class RunPreview:
    """The plan of a run.

    Attributes:
        config: Its configuration.
        resume_from: As ``run.train`` takes it.
        named_keys: Settings given with the command.
        origin: The places that set its values; ``None`` if they are not known.
        restored_to: Directory that the run would be restored to from a store; ``resume_from`` is then a temporary copy.
    """

    config: RunConfig
    resume_from: ResumeFrom
    named_keys: Collection[str] = ()
    origin: OriginOf | None = None
    restored_to: Path | None = None

    @functools.cached_property
    def text(self) -> _Text:
        """The text of the run; the sources are listed when it is first needed."""
        directory, exists = expected_directory(self.config, self.resume_from)
        return _inspect_text(self.config, directory if exists else None)

    @functools.cached_property
    def growth(self) -> DataGrowth | None:
        """How the data grew since the run started, if it did and is cached."""
        directory, exists = expected_directory(self.config, self.resume_from)
        steps = step_directories(directory) if exists else {}
        if not steps or self.config.data.mode == "streaming" or not self.text.exact:
            return None
        readers = [cache.reader for cache in self.text.caches if cache.reader and cache.name.endswith(" train")]
        return find_growth(self.config, steps[max(steps)], readers)

    def lines(self) -> Iterator[str]:
        """Yield the lines of a report.

        Raises:
            VoroxError: The error that would end the run before its first step.
        """
        resume_from = self.resume_from
        micro_batch = choose_micro_batch(self.config, resume_from, DistributedContext())
        config = with_micro_batch(self.config, micro_batch)
        yield f"configuration  {config.run.name or '(unnamed)'}, digest {config_digest(config)[:8]}"
        yield f"run            {_run_line(config, resume_from, self.restored_to)}"
        if config.checkpoint.mirror is not None:
            yield f"mirror         {_mirror_line(config.checkpoint.mirror)}"
        fresh = is_fresh(config, resume_from)
        if fresh:
            check_recordable(config)
            check_origin(config)
            if config.train.from_weights is not None:
                yield f"weights        {short_path(config.train.from_weights)}"
            if (warning := warn_of_other_ids(config)) is not None:
                yield f"tokenizer ids  {warning}"
        directory, exists = expected_directory(config, resume_from)
        if exists:
            checkpoint = resume_from if isinstance(resume_from, Path) and resume_from != directory else None
            check_resume(config, directory, checkpoint, self.named_keys, config.train.num_steps)
        text = self.text
        yield from _text_lines(config, text)
        if fresh and text.listed.tokenizer is not None:
            check_origin(config, tokenizer=text.listed.tokenizer)
        spec, tokenizer = resolve_model(config, text.vocab_size, directory if exists else None), text.listed.tokenizer
        distillation, known = config.train.distillation, None if tokenizer is None else spec
        find_teacher(config, known, tokenizer)
        find_stored_logits(config, known, tokenizer)
        if distillation.is_active:
            yield f"teacher        {distillation.teacher or f'logits in {distillation.logits}'}"
        if config.eval.tasks:
            check_tasks(config)
            yield f"tasks          {', '.join(config.eval.tasks)}"
        yield from _model_lines(config, spec)
        how = training_settings(config, self.origin, warmup_steps=_length(config, text).warmup_steps)
        yield f"training       {how}"
        yield from _batch_lines(config)
        if micro_batch is not None:
            yield f"               {micro_batch.text}"
        yield from _length_lines(config, text)
        if self.growth is not None:
            yield from self.growth.lines()
        yield from _disk_lines(config, spec, text, self.restored_to or directory)
        engine, facts = _probe_engine(config, spec)
        shown = [f"{name} {facts[name]}" for name in _ENGINE_FACTS if name in facts]
        yield f"engine         {engine}: {', '.join(shown)}"
        yield from memory_lines(config, spec, str(facts.get("device_kind", "")))
        yield "Nothing was built or written."


def _run_line(config: RunConfig, resume_from: str | Path, restored_to: Path | None) -> str:
    directory, exists = expected_directory(config, resume_from)
    if not exists:
        return f"{directory} (new)"
    holder = lock_holder(RunLayout(restored_to or directory).lock)
    steps = step_directories(directory)
    if restored_to is not None:
        restored = f"{restored_to} (restore step {max(steps):,} from the mirror, and resume from it)"
        return restored + (f"; IN USE by {holder}" if holder else "")
    state = f"resume from step {max(steps):,}" if steps else "exists without a checkpoint: start from step 0"
    return f"{directory} ({state})" + (f"; IN USE by {holder}" if holder else "")


def _mirror_line(uri: str) -> str:
    check_writable(uri)
    return f"{uri}; checked for write access and newer checkpoints when the run starts"


def _inspect_text(config: RunConfig, run_directory: Path | None = None) -> _Text:
    """List the sources, choose the holdout, and look up the tokenizer and the caches; a run has its own."""
    root, display = cache_root(config.data), BuildDisplay()
    try:
        with ExitStack() as reads:
            weights = exact_weights(config.data)
            tokenizer, views = (None, None) if run_directory is None else _recorded(config, run_directory, root)
            listed = list_sources(
                config, weights, root, display,
                tokenizer=tokenizer, build=False, is_dry=True, reads=reads, views=views,
            )  # fmt: skip
    finally:
        display.close()
    caches: list[_Cache] = []
    num_tokens, exact = 0.0, True
    for source in listed.train:
        held_out = held_out_bytes(source)
        reader = _open_ready(config, source, "train", listed.tokenizer, root, views)
        per_token = _bytes_per_token(config, source)
        guess = (source.size_bytes - held_out) / per_token
        caches.append(_Cache(f"{source.config.name} train", reader, guess))
        num_tokens += guess if reader is None else reader.num_rows * config.data.sequence_length_tokens
        exact = exact and reader is not None
        if held_out and not listed.validation:
            reader = _open_ready(config, source, "validation", listed.tokenizer, root, views)
            caches.append(_Cache(f"{source.config.name} validation", reader, held_out / per_token))
    for source in listed.validation:
        reader = _open_ready(config, source, "validation", listed.tokenizer, root, views)
        tokens = source.size_bytes / _bytes_per_token(config, source)
        caches.append(_Cache(f"{source.config.name} validation", reader, tokens))
    vocab_size = listed.tokenizer.vocab_size if listed.tokenizer is not None else _guessed_vocabulary(config)
    return _Text(listed, tuple(caches), vocab_size, num_tokens, exact)


def _bytes_per_token(config: RunConfig, source: Source) -> float:
    return _BYTES_PER_TOKEN.get("tokens" if source.config.has_tokens else config.tokenizer.kind, 4.0)


def _guessed_vocabulary(config: RunConfig) -> int:
    return config.tokenizer.vocab_size if config.tokenizer.kind == "bpe" else 128


def _recorded(config: RunConfig, run_directory: Path, root: Path) -> tuple[Tokenizer | None, RunViews]:
    """Return the tokenizer and the views of a run."""
    kept = load_run_tokenizer(RunLayout(run_directory).tokenizer, config.tokenizer)
    return kept or configured_untrained(config.tokenizer), RunViews.of_run(run_directory, root, restore=False)


def _open_ready(
    config: RunConfig,
    source: Source,
    split: Split,
    tokenizer: Tokenizer | None,
    root: Path,
    views: RunViews | None = None,
) -> CacheReader | None:
    """Open a complete cache; ``None`` if it is still to be built."""
    if tokenizer is None:
        return None
    recipe = recipe_for(config.data, source, split, tokenizer, images=image_layout(config.model))
    grow = config.data.cache.grow
    recorded = None if views is None else views.directory(source, split)
    if recorded is not None:
        location = recorded_location(root, recorded, source, split, recipe, config.data, grow=grow)
    else:
        location = find_location(root, source, split, recipe, config.data, grow=grow)
    directory = location.directory
    if not (directory / RECIPE_NAME).exists():
        return None
    manifest = Manifest.open(directory)
    if manifest.planned_units == 0 or len(manifest.missing_units()):
        return None
    return CacheReader.open(directory, recipe)


def _text_lines(config: RunConfig, text: _Text) -> Iterator[str]:
    for source in (*text.listed.train, *text.listed.validation):
        size = humanize.size(source.size_bytes)
        files = pluralize(len(source.files), "file")
        yield f"data           {source.config.name}: {files}, {size} ({source.config.format})"
    for note in text.listed.notes:
        yield f"               note: {note.text}"
    yield f"validation     {text.listed.held_out}"
    kind = config.tokenizer.kind
    state = "ready" if text.listed.tokenizer is not None else "not trained yet"
    if text.listed.tokenizer is not None:
        known = f"{text.vocab_size:,} tokens"
    else:
        known = f"at most {text.vocab_size:,} tokens" if kind == "bpe" else "vocabulary from the text"
    yield f"tokenizer      {kind}, {known}: {state}"
    if ids := expected_ids(config.tokenizer):
        yield f"               note: {ids}"
    for cache in text.caches:
        state = f"ready, {pluralize(cache.rows, 'row')}" if cache.rows is not None else "not built yet"
        if config.data.mode == "streaming" and cache.name.endswith(" train"):
            kept = humanize.size(config.data.streaming.retention_bytes)
            state = f"streamed, at most {kept} on disk"
        yield f"cache          {cache.name}: {state}"


def _model_lines(config: RunConfig, spec: ModelSpec) -> Iterator[str]:
    yield (
        f"model          {model_label(config)}: {spec.summary()}, vocabulary {spec.vocab_size:,}, "
        f"{spec.max_positions_tokens:,} positions"
    )
    by_kind: Counter[str] = Counter()
    for parameter in spec.parameters:
        by_kind[parameter.kind] += parameter.num_elements
    width = max(len(kind) for kind in by_kind)
    for kind, number in by_kind.items():
        yield f"                 {kind:<{width}}  {number:>15,}"
    yield f"                 {'total':<{width}}  {spec.num_parameters:>15,}  ({humanize.count(spec.num_parameters)})"
    flops = flops_per_token(spec, config.data.sequence_length_tokens)
    yield f"               {humanize.count(flops)} FLOPs per token (forward and backward)"


def _batch_lines(config: RunConfig) -> Iterator[str]:
    train = config.train
    rows, parts = train.global_batch_sequences, config.parallel.num_row_parts
    micro = config.parallel.micro_batch_sequences(train.micro_batch_rows, rows, parts)
    tokens = rows * config.data.sequence_length_tokens
    times = -(-rows // parts) // micro
    yield (
        f"batch          {pluralize(rows, 'row')} = {times:,} x {pluralize(micro, 'row')} x "
        f"{pluralize(parts, 'device')}; {pluralize(tokens, 'token')} per step"
    )
    for stage in batch_sizes_of(config).stages[1:]:
        yield f"               from step {stage.start_step + 1:,}: {pluralize(stage.rows, 'row')} per step"


def _length(config: RunConfig, text: _Text) -> Horizon:
    num_rows = max(1, round(text.num_train_tokens / config.data.sequence_length_tokens))
    return horizon(config, num_train_rows=num_rows, full_dataset_tokens=round(text.num_train_tokens))


def _disk_lines(config: RunConfig, spec: ModelSpec, text: _Text, directory: Path) -> Iterator[str]:
    """Yield the lines about the disk; a streamed source has its own disk budget.

    Raises:
        DoesNotFitError: The free space is not sufficient.
    """
    steps, total_steps = step_directories(directory), _length(config, text).total_steps
    is_streamed = config.data.mode == "streaming"
    plan = plan_disk(
        config,
        spec,
        directory,
        steps,
        total_steps=total_steps,
        done_steps=min(total_steps, max(steps, default=0)),
        cache_root=cache_root(config.data),
        new_tokens=sum(
            cache.estimated_tokens
            for cache in text.caches
            if cache.rows is None and not (is_streamed and cache.name.endswith(" train"))
        ),
    )
    checkpoints = plan.checkpoints
    yield (
        f"disk           checkpoints: at most {checkpoints.most:,} x {humanize.size(checkpoints.checkpoint_bytes)}, "
        f"{humanize.size(checkpoints.needed_bytes)} needed; {humanize.size(plan.free_bytes)} free"
    )
    if plan.cache_bytes:
        elsewhere = "" if plan.is_shared else f"; {humanize.size(plan.cache_free_bytes)} free"
        yield f"               caches: about {humanize.size(plan.cache_bytes)} needed in {plan.cache_root}{elsewhere}"
    plan.check()


def _length_lines(config: RunConfig, text: _Text) -> Iterator[str]:
    length = _length(config, text)
    about = "" if text.exact or config.train.num_epochs is None else "about "
    tokens = length.total_tokens
    epochs = tokens / max(1.0, text.num_train_tokens)
    yield (
        f"length         {about}{pluralize(length.total_steps, 'step')}, {humanize.count(tokens)} tokens, "
        f"{'' if text.exact else 'about '}{epochs:.2f} epochs"
    )
    for warning in (*learning_rate_warnings(config.optimizer), *length.warnings(text.num_train_tokens)):
        yield f"               note: {warning}"
    saves = [_every(config.checkpoint.every_steps)] if config.checkpoint.every_steps else []
    seconds = save_interval_seconds(config.checkpoint)
    saves += [f"every {humanize.duration(seconds)}"] if seconds else []
    saves += ["at the end"] if config.checkpoint.at_end else []
    every = [_every(config.eval.every_steps)] if config.eval.every_steps else []
    validations = ["at the start"] * config.eval.at_start + every + ["at the end"] * config.eval.at_end
    if not any(cache.name.endswith(" validation") for cache in text.caches):
        validations = []
    yield f"checkpoints    {', '.join(saves) or 'never'}; validation {', '.join(validations) or 'never'}"


def _every(num_steps: int) -> str:
    return "every step" if num_steps == 1 else f"every {num_steps:,} steps"


def _probe_engine(config: RunConfig, spec: ModelSpec) -> tuple[str, Mapping[str, str | int | bool]]:
    """Validate the configuration with the engine, on a model of one small layer."""
    backends.check_divisible(config, spec)  # what one small layer cannot show
    optimizer_groups(spec, config.optimizer)  # names that one layer does not have
    config = config.model_copy(update={"optimizer": config.optimizer.model_copy(update={"groups": ()})})
    if isinstance(spec, DecoderSpec):
        width = spec.head_dim
    else:  # its own settings were checked when its description was resolved
        settings = ModelConfig(num_layers=1, num_heads=1, hidden_size=64)
        spec, width = decoder_spec(settings, tokenizer_vocab_size=256, sequence_length_tokens=64), 64
    small = replace(
        spec, num_layers=1, num_heads=1, num_kv_heads=1, hidden_size=width, intermediate_size=width, vocab_size=256
    )
    if config.parallel.kind == "native":  # a dry run is one process, and plans for all
        config = backends.config_for_one_process(config)
    engine = backends.load(config.backend).create(config, small, DistributedContext())
    return engine.name, {name: value for name, value in engine.environment().items() if name != "engine"}
