"""Describe a checkpoint for its passport: data, recipe, parents, versions, metrics, from the records of its run.

A run directory and a checkpoint of it go in; a ``Passport`` comes out, which the documents only render. Everything is
counted or read from the record; what no run can know comes from the facts, and is ``None`` if it is not stated.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json
from vorox.core.files.json_lines import read_lines, valid_records
from vorox.core.files.json_reader import mapping, read_json
from vorox.core.platform.installation import install_command
from vorox.core.redaction import redact_value
from vorox.core.run_layout import RunLayout
from vorox.core.schema.train import Weights
from vorox.experiments.task_results import checkpoint_sha256, task_metrics
from vorox.models.huggingface.adapter_spec import AdapterSpec
from vorox.models.huggingface.config import CONFIG_NAME
from vorox.models.stored.spec import spec_from_json
from vorox.records.executed_steps import STEPS_NOTE
from vorox.records.run_lookup import notes_of_attempts, run_attempts, run_id_of
from vorox.training.checkpoints.origins import WEIGHTS_NOTE, CheckpointOrigin
from vorox.training.checkpoints.signature import recorded_key_ids
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.reports.training_record import training_record

_RECIPE = ("model", "adapter", "tokenizer", "optimizer", "schedule", "loss", "train", "precision", "parallel")
"""Sections of the configuration that are listed as a whole."""
_RECIPE_KEYS = {
    "data": ("sequence_length_tokens", "packing", "document_mask", "shuffle", "transform_seed"),
    "eval": ("weights",),
    "run": ("seed",),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A value on record.

    Attributes:
        name: Its name, such as ``validation loss``.
        value: Finite.
        step: The step whose weights were measured.
    """

    name: str
    value: float
    step: int


@dataclass(frozen=True, slots=True)
class Parent:
    """Weights that the run started from.

    Attributes:
        location: Where they were: a path, or ``hf://OWNER/NAME@COMMIT``.
        fingerprint: Of these weights; empty if it is not on record.
        checkpoints: The checkpoints of runs that they are of; empty for weights of no run.
    """

    location: str
    fingerprint: str
    checkpoints: tuple[CheckpointOrigin, ...]


@dataclass(frozen=True, slots=True)
class Passport:
    """What is known of a checkpoint.

    Attributes:
        name: Name of the model if it is stated, else the id of the run.
        run_id: Id of the run.
        step: Step of the checkpoint.
        record: The record of the training content up to the step (``reports/training_record.py``).
        started_at: When the run started, as recorded.
        weights: Which weights of it: the parameters, or their moving average.
        fingerprint: Of the state of the checkpoint.
        num_parameters: Trained and frozen parameters; of an adapter, its own.
        model_type: Architecture in terms of transformers; ``None`` without one.
        adapter: Kind of the adapter, such as ``lora``; ``None`` without one.
        tokenizer: Fingerprint of the tokenizer.
        recipe: Settings in force at the step, by dotted key; without those that are null.
        metrics: Evaluations of the step, or of the last one before it.
        parents: Weights that the run started from; empty if it started from random ones.
        versions: Versions of the libraries that computed the step, by name.
        vorox: Version of Vorox.
        commit: Commit of the code; ``None`` if it is not on record.
        has_local_changes: Whether the code differed from the commit.
        signed_by: Ids of the keys that signed the checkpoint (``vorox checkpoints sign``).
    """

    name: str
    run_id: str
    step: int
    record: Mapping[str, Any]
    started_at: str
    weights: Weights
    fingerprint: str
    num_parameters: int
    model_type: str | None
    adapter: str | None
    tokenizer: str
    recipe: Mapping[str, str]
    metrics: tuple[Metric, ...]
    parents: tuple[Parent, ...]
    versions: Mapping[str, str]
    vorox: str | None
    commit: str | None
    has_local_changes: bool
    signed_by: tuple[str, ...]

    @property
    def digest(self) -> str:
        """SHA-256 of everything that the documents say about the checkpoint."""
        return hashlib.sha256(canonical_json(asdict(self))).hexdigest()

    @property
    def software(self) -> Mapping[str, str]:
        """Versions of the libraries and of Vorox, by name."""
        return {**self.versions, **({"vorox": self.vorox} if self.vorox else {})}

    @property
    def time(self) -> datetime:
        """Time in documents that need one: the start of the run, so that they depend on the run alone."""
        return datetime.fromisoformat(self.started_at).replace(microsecond=0)


Files = Mapping[str, tuple[int, str]]
"""Size in bytes and SHA-256 of each file of the checkpoint or of its export, by name."""


def describe(
    run_directory: Path, checkpoint: Checkpoint, facts_file: Path | None = None, weights: Weights = "model"
) -> Passport:
    """Describe a checkpoint of a run.

    Args:
        run_directory: The run.
        checkpoint: A verified checkpoint.
        facts_file: Facts that no run knows, as of ``training_record``.
        weights: The parameters, or their moving average.

    Raises:
        ConfigError: The facts are invalid.
        DataError: A record or a cache of the run is missing or damaged.
    """
    record = redact_value(training_record(run_directory, checkpoint.step, facts_file))
    spec = spec_from_json(checkpoint.metadata["spec"])
    adapter = spec.adapter.kind if isinstance(spec, AdapterSpec) else None
    attempt = _attempt_of(run_directory, checkpoint.step)
    environment, code = mapping(attempt.get("environment")), mapping(attempt.get("code"))
    python = mapping(environment.get("python")).get("version")
    packages = {**mapping(environment.get("packages")), "python": python}
    return Passport(
        name=record["general"]["model"] or run_id_of(run_directory),
        run_id=run_id_of(run_directory),
        step=checkpoint.step,
        record=record,
        started_at=_started_at(run_directory, record),
        weights=weights,
        fingerprint=str(checkpoint.metadata["fingerprint"]),
        num_parameters=spec.num_parameters,
        model_type=_model_type(checkpoint.path),
        adapter=adapter,
        tokenizer=str(checkpoint.metadata["tokenizer"]),
        recipe=dict(_recipe(checkpoint.metadata["settings"])),
        metrics=tuple(_metrics(run_directory, checkpoint)),
        parents=tuple(_parents(run_directory, spec)),
        versions={name: str(version) for name, version in sorted(packages.items()) if version},
        vorox=_text(environment.get("vorox")),
        commit=_text(code.get("commit")),
        has_local_changes=bool(code.get("dirty")),
        signed_by=recorded_key_ids(run_directory, checkpoint.step),
    )


def library(name: str) -> Any:
    """Return a module of a library that writes a document of the passport.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"Passports and signatures of models need the package {error.name or name}", where="vorox export",
            saved="nothing was written",
            hint=install_command("passport"),
        ) from error  # fmt: skip


def package_url(name: str, version: str) -> str | None:
    """Return the package URL of a library; ``None`` for Python, which is no package."""
    if name == "python":
        return None
    return library("packageurl").PackageURL(type="pypi", name=name, version=version).to_string()


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _started_at(run_directory: Path, record: Mapping[str, Any]) -> str:
    started_at = str(record["general"]["run_started_at"])
    try:
        datetime.fromisoformat(started_at)
    except ValueError as error:
        raise DataError(
            "The run does not record when it started", where=str(RunLayout(run_directory).record),
            hint="restore the file from a copy of the run", saved="nothing was written",
        ) from error  # fmt: skip
    return started_at


def _attempt_of(run_directory: Path, step: int) -> Mapping[str, Any]:
    """Return the record of the attempt that executed a step: the newest that started before it."""
    for attempt in reversed(run_attempts(run_directory)):
        start = mapping(mapping(attempt.get("notes")).get(STEPS_NOTE)).get("start_step")
        if type(start) is int and start < step:
            return attempt
    return {}


def _model_type(checkpoint: Path) -> str | None:
    path = checkpoint / CONFIG_NAME
    return _text(read_json(path, dict).get("model_type")) if path.exists() else None


def _recipe(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the settings that decide the result, by dotted key, as text."""
    chosen = {name: settings.get(name) for name in _RECIPE}
    for section, keys in _RECIPE_KEYS.items():
        chosen |= {f"{section}.{key}": mapping(settings.get(section)).get(key) for key in keys}
    pending: list[tuple[str, Any]] = sorted(chosen.items(), reverse=True)
    while pending:
        key, value = pending.pop()
        if isinstance(value, dict):
            inner = cast("dict[str, Any]", value)
            pending += sorted(((f"{key}.{name}", part) for name, part in inner.items()), reverse=True)
        elif value is not None:
            yield key, value if isinstance(value, str) else json.dumps(value)


def _metrics(run_directory: Path, checkpoint: Checkpoint) -> Iterator[Metric]:
    """Yield the newest validation up to the checkpoint, and the results of tasks of exactly these weights."""
    step = checkpoint.step
    evaluations = [
        record for record in valid_records(read_lines(RunLayout(run_directory).evaluations)) if record["step"] <= step
    ]
    for name, value in (evaluations[-1] if evaluations else {}).items():
        if isinstance(value, float) and math.isfinite(value):
            yield Metric(f"validation {name.replace('_', ' ')}", value, evaluations[-1]["step"])
    path = RunLayout(run_directory).task_results(step)
    found: Mapping[str, Any] = read_json(path, dict) if path.exists() else {}
    if found.get("checkpoint_sha256") == checkpoint_sha256(checkpoint.path):
        for name, value in task_metrics(mapping(found.get("tasks"))).items():
            if math.isfinite(value):
                yield Metric(name.removeprefix("eval/tasks/"), value, step)


def _parents(run_directory: Path, spec: object) -> Iterator[Parent]:
    note = next((note for note in notes_of_attempts(run_directory) if "from_weights" in note), None)
    if note is None:
        return
    recorded = note.get(WEIGHTS_NOTE)
    of = cast("list[object]", recorded) if isinstance(recorded, list) else []
    fingerprint = spec.adapter.base_fingerprint if isinstance(spec, AdapterSpec) else note.get("fingerprint")
    yield Parent(
        redact_value(str(note["from_weights"])), str(fingerprint or ""),
        tuple(CheckpointOrigin.from_json(value) for value in of),
    )  # fmt: skip
