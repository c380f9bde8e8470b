"""Checks across settings; all violations are reported together.

Only contradictions within the configuration are checked here. Limits of the machine, the engine, the tokenizer file or
the text are checked by the modules that know them.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping

from vorox.core.config.checks.batch import batch_problems
from vorox.core.config.checks.model import model_problems
from vorox.core.config.checks.parallel import parallel_problems
from vorox.core.config.checks.sources import (
    bucket_names,
    keyed_sources,
    list_problems,
    path_problems,
    source_lists,
    weight_problems,
)
from vorox.core.config.checks.support import support_problems
from vorox.core.config.checks.training import preference_problems, training_problems
from vorox.core.config.checks.vision import vision_problems
from vorox.core.config.digest import flat_values
from vorox.core.config.layers.tree import Problem
from vorox.core.config.schema_fields import LENGTHS, WARM_UPS, given_keys, schema_fields
from vorox.core.redaction import redact
from vorox.core.schema import RunConfig, SourceConfig
from vorox.core.schema.setting import FUNCTION
from vorox.core.schema.train import FOLDERS, OBJECT_STORES
from vorox.core.user_code.extensions import is_extension

_ONLY_FOR_TRAINING = ("weight", "max_epochs", "on_exhausted", "split_by", "split_quantiles", "split_names")


def find_problems(config: RunConfig) -> list[Problem]:
    """Return all contradictions, in the order of the sections."""
    return [problem for check in _CHECKS for problem in check(config)]


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Refuse values that the engine does not support."""
    for key, value in flat_values(config).items():
        field = schema_fields().get(key)
        if field is None or not isinstance(field.facts.engines, Mapping):
            continue
        name = FUNCTION if is_extension(value) else value
        engines = field.facts.engines.get(name) if isinstance(name, str) else None
        if engines is not None and config.backend not in engines:
            needed = " or ".join(f"backend={engine}" for engine in engines)
            yield Problem(f"{key}={value} is not supported by the {config.backend} engine; it needs {needed}",
                          keys=(key, "backend"))  # fmt: skip


def _is_text_encoding(name: str) -> bool:
    try:
        "".encode(name)
        codecs.getincrementaldecoder(name)
    except (LookupError, ValueError, TypeError):
        return False
    return True


def _sources(config: RunConfig) -> Iterator[Problem]:
    for key, sources in source_lists(config):
        yield from list_problems(key, sources)
    for key, source in keyed_sources(config):
        yield from path_problems(key, source)
        yield from _source(config, key, source)


def _source(config: RunConfig, key: str, source: SourceConfig) -> Iterator[Problem]:
    if source.has_tokens and source.tokenizer is None and config.tokenizer.kind != "none":
        yield Problem(
            f"{key} ({source.name}) has token shards, but their tokenizer is not set; set "
            f"{key}.tokenizer to the tokenizer.path or the fingerprint of this run's tokenizer, or tokenizer.kind=none "
            "with tokenizer.vocab_size if it is unknown",
            keys=(f"{key}.tokenizer", f"{key}.format"),
        )
    if not source.has_tokens and config.tokenizer.kind == "none":
        yield Problem(
            f"{key} ({source.name}) has text, but tokenizer.kind=none reads token shards only",
            keys=("tokenizer.kind", f"{key}.format"),
        )
    if source.has_tokens and config.tokenizer.kind in {"bpe", "char"}:
        yield Problem(
            f"{key} ({source.name}) has token shards, which a newly trained tokenizer (tokenizer.kind="
            f"{config.tokenizer.kind}) cannot match; use the tokenizer that wrote them",
            keys=("tokenizer.kind", f"{key}.format"),
        )
    if source.format == "bin" and source.ids_dtype in {"int32", "int64"}:
        yield Problem(
            f"{key}.ids_dtype={source.ids_dtype} is for format mds; the ids of token shards are uint16 or uint32",
            keys=(f"{key}.ids_dtype", f"{key}.format"),
        )
    for name in ("tokenizer", "end_of_text_id", "ids_dtype"):
        if source.format == "mds" and not source.has_tokens and getattr(source, name) is not None:
            yield Problem(
                f"{key}.{name} applies to token ids, but {key} ({source.name}) is read as text; set "
                f"{key}.tokens_field to the column of the ids, or remove {name}",
                keys=(f"{key}.{name}", f"{key}.tokens_field"),
            )
    if source.tokens_field is not None and source.text_field != SourceConfig.model_fields["text_field"].default:
        yield Problem(
            f"{key} ({source.name}) sets both tokens_field and text_field; remove one of them",
            keys=(f"{key}.tokens_field", f"{key}.text_field"),
        )
    if source.chat_fields and source.text_field != SourceConfig.model_fields["text_field"].default:
        yield Problem(
            f"{key} ({source.name}) sets both chat_fields and text_field; remove one of them",
            keys=(f"{key}.chat_fields", f"{key}.text_field"),
        )
    if not _is_text_encoding(source.encoding):
        yield Problem(
            f"{key}.encoding={source.encoding} is no encoding of text that Python knows; write utf-8, latin-1, cp1252, "
            "utf-16 or another name of its documentation (codecs)",
            keys=(f"{key}.encoding",),
        )
    if source.preference_pairs and source.history_field is not None:
        yield Problem(
            f"{key}.history_field has no place in preference pairs; write earlier turns into the prompt",
            keys=(f"{key}.history_field", f"{key}.preference_pairs"),
        )
    if source.tokens_field is not None and source.metadata_fields:
        yield Problem(
            f"{key} ({source.name}) sets metadata_fields with token ids; only text has metadata",
            keys=(f"{key}.metadata_fields", f"{key}.tokens_field"),
        )


def _validation(config: RunConfig) -> Iterator[Problem]:
    for index, source in enumerate(config.data.validation.sources):
        for name in _ONLY_FOR_TRAINING:
            if getattr(source, name) != SourceConfig.model_fields[name].default:
                key = f"data.validation.sources.{index}.{name}"
                yield Problem(
                    f"{key} has no effect: it configures sampling, and validation reads the whole source; remove it",
                    keys=(key,),
                )


def _buckets(config: RunConfig) -> Iterator[Problem]:
    for index, source in enumerate(config.data.sources):
        key = f"data.sources.{index}"
        if source.split_by is None:
            continue
        bounds, names = source.split_quantiles, source.split_names
        if list(bounds) != sorted(set(bounds)) or not all(0 < bound < 1 for bound in bounds):
            yield Problem(
                f"{key}.split_quantiles={list(bounds)} must increase, from above 0 to below 1",
                keys=(f"{key}.split_quantiles",),
            )
        if len(names) != len(bounds) + 1 or len(set(names)) < len(names):
            yield Problem(
                f"{key}.split_names={list(names)} must be {len(bounds) + 1} different names, one more than the "
                "quantiles between them",
                keys=(f"{key}.split_names", f"{key}.split_quantiles"),
            )


def _stages(config: RunConfig) -> Iterator[Problem]:
    known = {source.name for source in config.data.sources}
    known |= {name for source in config.data.sources for name in bucket_names(source)}
    before = -1
    for index, stage in enumerate(config.data.stages):
        key = f"data.stages.{index}"
        if stage.start_tokens <= before:
            yield Problem(
                f"{key}.start_tokens={stage.start_tokens} is not larger than that of the previous stage",
                keys=(f"{key}.start_tokens",),
            )
        before = stage.start_tokens
        for name, weight in stage.weights.items():
            if name not in known:
                yield Problem(
                    f"{key}.weights has no source {name!r}; known are {', '.join(sorted(known))}",
                    keys=(f"{key}.weights",),
                )
            yield from weight_problems(f"{key}.weights.{name}", weight, f"{key}.weights")
        length, whole = stage.sequence_length_tokens, config.data.sequence_length_tokens
        if length is not None and whole % length:
            yield Problem(
                f"{key}.sequence_length_tokens={length} does not divide data.sequence_length_tokens={whole}",
                keys=(f"{key}.sequence_length_tokens", "data.sequence_length_tokens"),
            )


def _growth(config: RunConfig) -> Iterator[Problem]:
    growth = config.data.growth
    if config.data.mode == "streaming" and (growth.mode, growth.later_passes) != ("strict", "segments"):
        yield Problem(
            f"data.mode=streaming keeps only some segments on disk, so it needs data.growth.mode=strict and "
            f"data.growth.later_passes=segments, not {growth.mode} and {growth.later_passes}",
            keys=("data.mode", "data.growth.mode", "data.growth.later_passes"),
        )
    if config.data.mode == "streaming" and not growth.build:
        yield Problem(
            "data.growth.build=false relies on another process to build, but with data.mode=streaming each process "
            "builds what it reads; set data.growth.build=true",
            keys=("data.growth.build", "data.mode"),
        )
    if growth.mode == "strict" and growth.on_starve == "repeat":
        yield Problem(
            "data.growth.on_starve=repeat makes the order depend on build speed, which mode=strict excludes; set "
            "data.growth.mode=elastic, or on_starve=wait",
            keys=("data.growth.on_starve", "data.growth.mode"),
        )
    if growth.mode == "strict" and growth.first_segment_units > growth.max_segment_units:
        yield Problem(
            f"data.growth.first_segment_units={growth.first_segment_units} is more than "
            f"data.growth.max_segment_units={growth.max_segment_units}",
            keys=("data.growth.first_segment_units", "data.growth.max_segment_units"),
        )


def _secrets(config: RunConfig) -> Iterator[Problem]:
    """Refuse credentials, because the configuration is copied into every run directory and checkpoint."""
    locations: dict[str, tuple[str, ...]] = {
        "tokenizer.path": (config.tokenizer.path or "",),
        "data.cache.directory": (config.data.cache.directory or "",),
        "run.directory": (config.run.directory,),
        "run.name": (config.run.name or "",),
        "checkpoint.mirror": (config.checkpoint.mirror or "",),
        "train.from_weights": (config.train.from_weights or "",),
    }
    for key, source in keyed_sources(config):
        locations |= {f"{key}.paths": source.paths, f"{key}.fallback": source.fallback}
    for key, texts in locations.items():
        if any(redact(text) != text for text in texts):
            yield Problem(
                f"{key} contains a password or token, which would be copied into every run directory; "
                "pass credentials through the environment or the credentials file of the store",
                keys=(key,),
            )


def _tokenizer(config: RunConfig) -> Iterator[Problem]:
    needed = {
        "file": "the tokenizer.json to use",
        "huggingface": "a directory or OWNER/NAME",
        "tiktoken": "an encoding, a .tiktoken file or a vocab.bpe",
    }.get(config.tokenizer.kind)
    if needed is not None and config.tokenizer.path is None:
        yield Problem(
            f"tokenizer.kind={config.tokenizer.kind} needs tokenizer.path, {needed}",
            keys=("tokenizer.path", "tokenizer.kind"),
        )
    smallest, section = {"bpe": 257, "none": 1}.get(config.tokenizer.kind, 0), config.tokenizer
    if section.vocab_size < smallest:
        yield Problem(
            f"tokenizer.vocab_size={section.vocab_size} is less than {smallest}, the bytes and end of text of a BPE",
            keys=("tokenizer.vocab_size", "tokenizer.kind"),
        )
    if section.end_of_text_id is not None and section.end_of_text_id >= section.vocab_size:
        yield Problem(
            f"tokenizer.end_of_text_id={section.end_of_text_id} is not below tokenizer.vocab_size={section.vocab_size}",
            keys=("tokenizer.end_of_text_id", "tokenizer.vocab_size"),
        )
    if config.tokenizer.end_of_text == "":
        yield Problem("tokenizer.end_of_text is empty", keys=("tokenizer.end_of_text",))


def _length(config: RunConfig) -> Iterator[Problem]:
    given = given_keys(config, LENGTHS)
    if len(given) != 1:
        what = (
            f"{' and '.join(given)} {_quantifier(given)} set the length of the run"
            if given
            else "the run has no length"
        )
        kind = "" if given else "missing"
        yield Problem(f"{what}; set exactly one of {', '.join(LENGTHS)}", keys=LENGTHS, kind=kind)
    warm_ups = given_keys(config, WARM_UPS)
    if len(warm_ups) > 1:
        yield Problem(f"{' and '.join(warm_ups)} {_quantifier(warm_ups)} set the warm-up; keep one", keys=WARM_UPS)


def _quantifier(keys: list[str]) -> str:
    return "both" if len(keys) == 2 else "all"


def _evaluation(config: RunConfig) -> Iterator[Problem]:
    evaluation = config.eval
    if evaluation.prompts and not evaluation.validates:
        yield Problem(
            "eval.prompts are completed at every validation, but eval.every_steps=null and eval.at_end=false disable "
            "validation",
            keys=("eval.prompts", "eval.every_steps", "eval.at_end"),
        )
    if evaluation.tasks and evaluation.tasks_every_steps is None and not evaluation.at_end:
        yield Problem(
            "eval.tasks are never evaluated with eval.tasks_every_steps=null and eval.at_end=false; set "
            "eval.tasks_every_steps",
            keys=("eval.tasks", "eval.tasks_every_steps", "eval.at_end"),
        )
    positions = config.model.max_positions_tokens or config.data.sequence_length_tokens
    if evaluation.prompts and evaluation.sample_tokens >= positions:
        yield Problem(
            f"eval.sample_tokens={evaluation.sample_tokens} leaves no room for a prompt within {positions} positions",
            keys=("eval.sample_tokens", "model.max_positions_tokens", "data.sequence_length_tokens"),
        )
    if any(not prompt for prompt in evaluation.prompts):
        yield Problem(
            "eval.prompts contains an empty text; a completion needs at least one token", keys=("eval.prompts",)
        )


def _checkpoints(config: RunConfig) -> Iterator[Problem]:
    checkpoint = config.checkpoint
    folder = rf"({'|'.join(OBJECT_STORES)})://[^/\s]+(/.*)?"
    if checkpoint.mirror is not None and not re.fullmatch(folder, checkpoint.mirror):
        yield Problem(
            f"checkpoint.mirror={redact(checkpoint.mirror)} is not a folder in an object store; "
            f"write {', '.join(FOLDERS[:-1])} or {FOLDERS[-1]}",
            keys=("checkpoint.mirror",),
        )
    if checkpoint.keep_best and config.eval.every_steps is None:
        yield Problem(
            f"checkpoint.keep_best={checkpoint.keep_best} needs validations to compare; set eval.every_steps",
            keys=("checkpoint.keep_best", "eval.every_steps"),
        )
    every, keep = checkpoint.every_steps, checkpoint.keep_every_steps
    if keep is not None and every is None:
        yield Problem(
            f"checkpoint.keep_every_steps={keep} keeps nothing without checkpoint.every_steps",
            keys=("checkpoint.keep_every_steps", "checkpoint.every_steps"),
        )
    elif keep is not None and every is not None and keep % every:
        yield Problem(
            f"checkpoint.keep_every_steps={keep} is not a multiple of checkpoint.every_steps={every}, "
            "so those checkpoints would never exist",
            keys=("checkpoint.keep_every_steps", "checkpoint.every_steps"),
        )


_CHECKS: tuple[Callable[[RunConfig], Iterator[Problem]], ...] = (
    _engine_problems,
    support_problems,
    model_problems,
    parallel_problems,
    vision_problems,
    training_problems,
    _sources,
    _validation,
    _tokenizer,
    _length,
    batch_problems,
    _buckets,
    _stages,
    _growth,
    _evaluation,
    _checkpoints,
    preference_problems,
    _secrets,
)
