"""What decides the result of an arm besides its settings and its seed: data, weights, code, environment; as digests.

A configuration or a run goes in; plain values come out, which a claim fixes before anything is trained, and their first
difference from the registered ones. Settings name files by their place; here their bytes count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from vorox.core.batch import IGNORED_LABEL
from vorox.core.config import config_values
from vorox.core.files.atomic import canonical_json
from vorox.core.files.json_reader import mapping
from vorox.core.platform.environment import code_record, environment_record
from vorox.core.redaction import redact_value
from vorox.core.schema import RunConfig
from vorox.core.user_code.trusted_code import file_digest, function_names
from vorox.data.corpus.corpus import Corpus, plan_start, prepare_recorded
from vorox.data.order.plan_events import encode_event
from vorox.records.run_lookup import run_attempts
from vorox.run import with_states
from vorox.training.materialize import StateNotices
from vorox.training.steps.dataloading import validation_set
from vorox.training.steps.teacher_logits import LOGITS_FILES
from vorox.training.weights.init_from import files_digest, weights_digest, with_recorded_weights
from vorox.training.weights.teacher import as_initial

_NAMES = {
    "tokenizer": "The tokenizer", "vocab_size": "The vocabulary", "evaluation": "The evaluation text",
    "evaluation_rows": "The division of the evaluation text into rows and images", "training": "The training text",
    "order": "The data order", "weights": "The file of initial weights", "teacher": "The file of the teacher",
    "code": "The code of a user function",
}  # fmt: skip
_VARIABLES = frozenset(
    {
        "ATEN_CPU_CAPABILITY", "JAX_DEFAULT_MATMUL_PRECISION", "JAX_ENABLE_X64", "JAX_PLATFORMS", "MKL_CBWR",
        "MKL_ENABLE_INSTRUCTIONS", "MKL_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS",
        "ONEDNN_MAX_CPU_ISA", "OPENBLAS_CORETYPE", "OPENBLAS_NUM_THREADS", "TORCH_BLAS_PREFER_CUBLASLT", "XLA_FLAGS",
    }
)  # fmt: skip
"""Recorded variables that can change bits, and that Vorox does not set itself."""


def arm_inputs(config: RunConfig, corpus: Corpus) -> dict[str, Any]:
    """Return what decides the result of a run: the rows it reads, their order, its first weights and its code.

    Raises:
        ConfigError: There are no weights where the configuration names some.
        CheckpointError: They are damaged.
    """
    order = {key: value for key, value in encode_event(plan_start(config, corpus)).items() if key != "seed"}
    training = {source.name: source.train.content_digest(0, len(source.train.units)) for source in corpus.sources}
    text, rows = _evaluation_digests(config, corpus)
    return {
        "tokenizer": corpus.tokenizer.fingerprint, "vocab_size": corpus.tokenizer.vocab_size, "training": training,
        "evaluation": text, "evaluation_rows": rows, "order": hashlib.sha256(canonical_json(order)).hexdigest(),
        "weights": weights_digest(config), "teacher": _teacher_digest(config), "code": code_digests(config),
    }  # fmt: skip


def inputs_of_run(directory: Path, config: RunConfig) -> dict[str, Any]:
    """Return ``arm_inputs`` of a run with this configuration, as its files are now."""
    return with_states(lambda: _inputs_of_run(directory, config), StateNotices())


def _inputs_of_run(directory: Path, config: RunConfig) -> dict[str, Any]:
    corpus = prepare_recorded(directory, config)
    try:
        return arm_inputs(with_recorded_weights(config, directory), corpus)
    finally:
        corpus.close()


def input_difference(registered: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Return which input is not the registered one; empty if none."""
    for key, name in _NAMES.items():
        then, now = registered.get(key), found.get(key)
        if then != now:
            parts = sorted({*then, *now}) if isinstance(then, dict) and isinstance(now, dict) else []
            changed = [part for part in parts if mapping(then).get(part) != mapping(now).get(part)]
            return name + (f" ({changed[0]})" if changed and key == "code" else "")
    return ""


def code_digests(config: RunConfig) -> dict[str, str]:
    """Return the SHA-256 of the files of every function that a configuration names, imports from its folder included.

    A declared version is not enough: the code may change while the version stays.
    """
    found = {name: file_digest(name) for name in function_names(config_values(config))}
    return {name: digest for name, digest in found.items() if digest is not None}


def environment_facts() -> dict[str, str]:
    """Return what a claim fixes of the environment: versions, processor, and variables that can change bits."""
    record = {**environment_record(), "code": code_record()}
    return _flat_environment(cast("Mapping[str, Any]", redact_value(record)))


def environments_of_run(directory: Path) -> Iterator[dict[str, str]]:
    """Yield the same of every attempt of a run, as recorded."""
    for attempt in run_attempts(directory):
        yield _flat_environment({**mapping(attempt.get("environment")), "code": attempt.get("code")})


def environment_difference(registered: Mapping[str, str], found: Mapping[str, str]) -> str:
    """Return the first difference of an environment from the registered one; empty if there is none."""
    for key in sorted({*registered, *found}):
        if registered.get(key) != found.get(key):
            return f"{key} was {registered.get(key, 'absent')}, is {found.get(key, 'absent')}"
    return ""


def _flat_environment(record: Mapping[str, Any]) -> dict[str, str]:
    code, machine, variables = (mapping(record.get(key)) for key in ("code", "platform", "variables"))
    facts: dict[str, Any] = {
        "Vorox": record.get("vorox"), "commit of Vorox": code.get("commit"),
        "changes of Vorox": code.get("diff_sha256"), "Python": mapping(record.get("python")).get("version"),
        "machine": machine.get("machine"), "processor": machine.get("processor"),
        **mapping(record.get("packages")), **{key: value for key, value in variables.items() if key in _VARIABLES},
    }  # fmt: skip
    return {key: str(value) for key, value in facts.items() if value}


def _teacher_digest(config: RunConfig) -> str | None:
    distillation = config.train.distillation
    if distillation.logits is not None:
        return files_digest(Path(distillation.logits), LOGITS_FILES)
    return None if distillation.teacher is None else weights_digest(as_initial(config))


def _evaluation_digests(config: RunConfig, corpus: Corpus) -> tuple[str, str]:
    """Return the digests of the tokens and targets of the validation, and of documents, positions and images."""
    batches, text, rows = validation_set(config, corpus), hashlib.sha256(), hashlib.sha256()
    for batch in () if batches is None else batches():
        is_row_AB = (batch.labels_ABT != IGNORED_LABEL).any(axis=2)  # rows pad the last batch, by micro-batch
        for array in (batch.tokens_ABT, batch.labels_ABT):
            text.update(array[is_row_AB].tobytes())
        for array in (batch.segment_ids_ABT, batch.position_ids_ABT):
            rows.update(b"" if array is None else array[is_row_AB].tobytes())
        for images in batch.images_A or ():
            for name, pixels in images.arrays():
                rows.update(f"{name} {pixels.shape}".encode() + pixels.tobytes())
    return text.hexdigest(), rows.hexdigest()
