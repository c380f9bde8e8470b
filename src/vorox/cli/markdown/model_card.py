"""The model card of a passport: what it says in words, after the metadata that the Hugging Face Hub reads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from vorox.cli.markdown.training_record import code, escaped, markdown, table
from vorox.cli.terminal import humanize
from vorox.training.export.checkpoint import Target
from vorox.training.passport.description import Files, Passport, library
from vorox.training.passport.documents import DOCUMENT_NAMES

NOT_RECORDED = "not recorded"
_LIBRARIES = {"hf": "transformers", "peft": "peft", "gguf": None, None: None}
_MAIN_SETTINGS = (
    "optimizer.name", "optimizer.lr", "optimizer.weight_decay", "schedule.name", "train.num_steps",
    "train.global_batch_sequences", "data.sequence_length_tokens", "precision.dtype", "adapter.kind", "run.seed",
)  # fmt: skip


def model_card(passport: Passport, files: Files, to: Target | None) -> bytes:
    """Return the card.

    Args:
        passport: What is known of the checkpoint.
        files: The files of the model that it travels with.
        to: The format of the export; ``None`` for a passport without the model.
    """
    lines = [
        f"# {escaped(passport.name)}",
        "",
        f"The weights after step {passport.step:,} of run {code(passport.run_id)}. Everything here is computed from "
        f"the records of the run, and what they lack is *{NOT_RECORDED}* or *not stated*. For programs, the same is in "
        f"{', '.join(code(name) for name in DOCUMENT_NAMES)}.",
        *_model(passport),
        *_parents(passport),
        *_metrics(passport),
        *_recipe(passport),
        *_files(files),
        "",
        markdown(passport.record),
    ]
    header = str(_metadata(passport, to))
    return f"---\n{header}\n---\n\n".encode() + "\n".join(lines).encode() + b"\n"


def _metadata(passport: Passport, to: Target | None) -> Any:
    """Return the metadata of the Hub; licence and identifiers of data sets are not known, so they are left out."""
    names = (re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@.*)?", parent.location) for parent in passport.parents)
    bases = [match[1] for match in names if match is not None]
    return library("huggingface_hub").ModelCardData(
        base_model=bases or None,
        language=list(passport.record["general"]["languages"]) or None,
        library_name=_LIBRARIES[to],
        pipeline_tag="text-generation",
        tags=["vorox"],
    )


def _model(passport: Passport) -> list[str]:
    changed = " with local changes" if passport.has_local_changes else ""
    rows = [
        ["Licence of the model", NOT_RECORDED],
        ["Architecture", escaped(passport.model_type or NOT_RECORDED)],
        ["Parameters", f"{passport.num_parameters:,}"],
        *([["Adapter", passport.adapter]] if passport.adapter else []),
        ["Weights", "moving average of the parameters" if passport.weights == "ema" else "parameters"],
        ["Fingerprint of the state", code(passport.fingerprint)],
        ["Fingerprint of the tokenizer", code(passport.tokenizer)],
        ["Signed in the run by key", ", ".join(map(code, passport.signed_by)) or "none"],
        ["Code", f"{code(passport.commit)}{changed}" if passport.commit else NOT_RECORDED],
        ["Software", escaped(", ".join(f"{name} {version}" for name, version in passport.software.items()))],
    ]
    return ["", "## Model", *table(["", ""], rows)]


def _parents(passport: Passport) -> Iterator[str]:
    for parent in passport.parents:
        rows = [
            ["Location", escaped(parent.location)],
            ["Fingerprint of the weights", code(parent.fingerprint) if parent.fingerprint else NOT_RECORDED],
            *(
                ["Checkpoint", f"{code(one.run) if one.run else 'of an unknown run'}, step {one.step:,}"]
                for one in parent.checkpoints
            ),
        ]
        yield from ("", "## Trained from", *table(["", ""], rows))


def _metrics(passport: Passport) -> list[str]:
    rows = [[escaped(one.name), f"{one.value:.6g}", f"{one.step:,}"] for one in passport.metrics]
    found = table(["Metric", "Value", "Step"], rows) if rows else ["", f"Evaluations: {NOT_RECORDED}."]
    return ["", "## Evaluation", *found]


def _recipe(passport: Passport) -> list[str]:
    rows = [[code(key), escaped(passport.recipe[key])] for key in _MAIN_SETTINGS if key in passport.recipe]
    return ["", "## Recipe", *table(["Setting", "Value"], rows), "", f"All settings are in {code(DOCUMENT_NAMES[0])}."]


def _files(files: Files) -> list[str]:
    rows = [[escaped(name), humanize.size(size_bytes), code(sha256)] for name, (size_bytes, sha256) in files.items()]
    return ["", "## Files of the model", *table(["File", "Size", "SHA-256"], rows)]
