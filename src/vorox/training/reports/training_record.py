"""The record of a run's training content, in the sections of the EU's public summary.

A run directory and facts go in; a JSON value comes out. What the run knows is counted up to a step: files, documents,
tokens and shares by source, filters, skipped steps, and the hashes that prove it. What it cannot know comes from the
facts and is null if it is not stated. Steps without an update (rolled back, skipped, not finite) are not counted.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from vorox.core.config import load_config
from vorox.core.errors import ConfigError, DataError
from vorox.core.files.atomic import canonical_json
from vorox.core.run_layout import RunLayout
from vorox.core.schema.data import SourceConfig
from vorox.data.order.plan import DataPlan
from vorox.data.provenance.contamination import MOSTLY_FRACTION, NGRAM_TOKENS, find_contamination
from vorox.data.provenance.evaluation_records import read_evaluation_records
from vorox.data.provenance.run_data_index import RunDataIndex
from vorox.data.provenance.training_content import SourceContent, training_content
from vorox.data.tokenizers.loading import load
from vorox.experiments.artifacts import list_checkpoints
from vorox.records.replay_chain import RecordedChain, examine_chain, number
from vorox.records.run_context import recorded_config
from vorox.records.run_lookup import attempt_notes, read_run_record
from vorox.training.reports.record_facts import Facts, SourceFacts, read_facts

FORMAT = "vorox-training-record/1"


def training_record(
    directory: Path, step: int | None = None, facts_file: Path | None = None, evaluation_sets: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the record of a run.

    Args:
        directory: The run directory.
        step: The last step that counts. ``None``: that of the newest checkpoint, else the last step.
        facts_file: YAML file with what the run cannot know.
        evaluation_sets: Files, folders, globs or URLs; count the records of each that the run saw.

    Raises:
        ConfigError: A step up to this one was not executed, or the facts or an evaluation set are invalid.
        DataError: The plan, a cache, a chunk, a record of the run or an evaluation set is missing or damaged.
    """
    with RunDataIndex.open(directory) as run_data:
        names = list(dict.fromkeys(source.configured_name for source in run_data.plan.sources))
        facts = Facts() if facts_file is None else read_facts(facts_file, names)
        applied, skipped = run_data.applied_steps(), run_data.skipped_steps()
        step = _last_step(directory, step, np.union1d(applied, skipped))
        chain = examine_chain(directory, step)
        nonfinite = [known for known, entry in chain.entries.items() if not _is_finite(entry.loss, entry.grad_norm)]
        applied = np.setdiff1d(applied[applied <= step], nonfinite)
        content = training_content(run_data, applied)
        contamination = [_contamination(run_data, applied, path) for path in evaluation_sets]
    configs = _source_configs(directory, names)
    total = sum(source.tokens for source in content)
    sources = [
        _source(source, total, configs.get(source.name), facts.sources.get(source.name, SourceFacts()))
        for source in content
    ]
    return {
        "format": FORMAT,
        "run": directory.resolve().name,
        "step": step,
        "steps": {
            "applied": len(applied),
            "loss_spikes_skipped": int(np.count_nonzero(skipped <= step)),
            "not_finite": sum(known <= step for known in nonfinite),
            "not_known_to_be_finite": len(np.setdiff1d(applied, list(chain.entries))),
        },
        "general": _general(directory, content, facts),
        "sources": sources,
        "shares": {key: _shares(sources, key) for key in ("kind", "licence")},
        "processing": {"copyright": facts.copyright, "illegal_content": facts.illegal_content, "other": facts.other},
        "contamination": contamination,
        "proof": _proof(directory, step, chain, run_data.plan),
    }


def _last_step(directory: Path, step: int | None, executed: npt.NDArray[np.int64]) -> int:
    if not len(executed):
        raise ConfigError(
            "No step of this run is on record", where=str(directory), hint="train at least one step first"
        )
    if step is None:
        saved = [entry.step for entry in list_checkpoints(directory) if entry.state == "unverified"]
        step = max((known for known in saved if known > 0), default=int(executed[-1]))
    missing = np.setdiff1d(np.arange(1, step + 1), executed)
    if len(missing):
        raise ConfigError(
            f"Step {missing[0]:,} of this run is not on record as executed", where="--step",
            hint=f"the last step is {executed[-1]:,}",
        )  # fmt: skip
    return step


def _is_finite(*values: str) -> bool:
    return all(math.isfinite(number(value)) for value in values)


def _source_configs(directory: Path, names: Sequence[str]) -> dict[str, SourceConfig]:
    """Return the newest recorded configuration of each source; a source may have been removed from the run."""
    found = {source.name: source for source in recorded_config(directory).data.sources}
    for _, path in sorted(RunLayout(directory).configs_by_step().items(), reverse=True):
        if all(name in found for name in names):
            break
        found = {source.name: source for source in load_config(path).data.sources} | found
    return found


def _general(directory: Path, content: Sequence[SourceContent], facts: Facts) -> dict[str, Any]:
    distinct_tokens = sum(source.distinct_tokens for source in content)
    attempts, weights = _attempts(directory), attempt_notes(directory, "from_weights")
    return {
        "provider": facts.provider,
        "model": facts.model,
        "modalities": ["text"],
        "size_range": size_range(distinct_tokens),
        "tokens": sum(source.tokens for source in content),
        "distinct_tokens": distinct_tokens,
        "documents": sum(source.documents for source in content),
        "languages": list(facts.languages),
        "run_started_at": attempts[0].get("started_at") if attempts else None,
        "run_ended_at": attempts[-1].get("ended_at") if attempts else None,
        "initial_weights": weights[-1] if weights else None,
    }


def _attempts(directory: Path) -> list[dict[str, Any]]:
    """Return the attempts in ``run.json``; without it, nothing says which weights the run started from."""
    try:
        return read_run_record(directory)["attempts"]
    except FileNotFoundError:
        raise DataError(
            f"{RunLayout.record.name} of the run is missing; it has the weights that the run started from",
            where=str(RunLayout(directory).record), saved="nothing was written",
            hint="restore it from a copy of the run",
        ) from None  # fmt: skip


def size_range(num_tokens: int) -> str:
    """Return the range of the template that a number of tokens is in."""
    if num_tokens < 10**9:
        return "less than 1 billion tokens"
    return "1 billion to 10 trillion tokens" if num_tokens <= 10**13 else "more than 10 trillion tokens"


def _source(
    content: SourceContent, total_tokens: int, config: SourceConfig | None, facts: SourceFacts
) -> dict[str, Any]:
    files = [asdict(file) for file in content.files]
    hosts: Counter[str] = Counter()
    for file in content.files:
        address = urlsplit(file.uri)
        if address.scheme in {"http", "https"} and address.hostname:
            hosts[address.hostname] += file.tokens
    counts = {int(key.split("/")[0]): asdict(count) for key, count in content.transforms.items()}
    transforms: Any = content.recipe["transforms"]
    return {
        "name": content.name,
        **facts.model_dump(),
        "location": None if config is None else _location(config),
        "share": content.tokens / max(total_tokens, 1),
        "tokens": content.tokens,
        "distinct_tokens": content.distinct_tokens,
        "documents": content.documents,
        "rows": content.rows,
        "epochs": content.epochs,
        "hosts": dict(hosts.most_common()),
        "num_source_files": content.source_files,
        "files": files,
        "files_sha256": hashlib.sha256(canonical_json([[file["uri"], file["version"]] for file in files])).hexdigest(),
        "quarantined_records": content.quarantined,
        "held_out": content.recipe["split"],
        "transforms": [
            {"name": str(transform["function"]).rpartition(":")[2], **transform, "counts": counts.get(index)}
            for index, transform in enumerate(transforms)
        ],
        "recipe_sha256": content.recipe_sha256,
        "content_sha256": content.content_sha256,
    }


def _location(config: SourceConfig) -> dict[str, Any]:
    keys = {"preset", "format", "paths", "fallback", "hf_config", "hf_split", "revision"}
    return {key: value for key, value in config.model_dump(mode="json", include=keys).items() if value}


def _shares(sources: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    tokens: Counter[str | None] = Counter()
    for source in sources:
        tokens[source[key]] += source["tokens"]
    total = max(sum(tokens.values()), 1)
    return [{key: name, "tokens": count, "share": count / total} for name, count in tokens.most_common()]


def _contamination(run_data: RunDataIndex, steps: npt.NDArray[np.int64], path: str) -> dict[str, Any]:
    tokenizer = load(RunLayout(run_data.directory).tokenizer)
    found = find_contamination(run_data, read_evaluation_records([path], tokenizer), steps=steps)
    return {
        "evaluation_set": path,
        "records": found.num_records,
        "short_records": found.num_short_records,
        "ngram_tokens": NGRAM_TOKENS,
        "contaminated": len(found.records),
        "mostly_contaminated": sum(record.fraction >= MOSTLY_FRACTION for record in found.records),
    }


def _proof(directory: Path, step: int, chain: RecordedChain, plan: DataPlan) -> dict[str, Any]:
    saved = [entry for entry in list_checkpoints(directory) if entry.step == step and entry.state == "unverified"]
    entry = chain.entries.get(step)
    return {
        "plan_sha256": plan.digest,
        "plan_events": plan.num_events,
        "chain_head": None if entry is None else entry.chain,
        "chain_damage": chain.damage(step) or None,
        "checkpoint": saved[-1].name if saved else None,
        "checkpoint_fingerprint": saved[-1].metadata.get("fingerprint") if saved else None,
    }
