"""Which rule was chosen to hold out text of a source, remembered: a second start reads nothing to choose it again.

A listed source and ``data.validation`` go in; the source with its rule comes out, as ``text.holdout`` chooses it. The
memory lies beside that of the files' hashes. Invariant: a remembered rule is used only for the very files, definition
and settings that it was chosen for; a lost or damaged memory costs reading, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import replace
from pathlib import Path

from vorox.core.atomic import canonical_json, make_directory, write_file
from vorox.core.schema.data import DataConfig, ValidationConfig
from vorox.data.text.holdout import with_holdout
from vorox.data.text.listing import Note
from vorox.data.text.sources import Source


def with_remembered_holdout(source: Source, data: DataConfig, directory: Path, *, remember: bool = True) -> Source:
    """Return the source with the rule by which its text is held out.

    Args:
        source: The source.
        data: The section ``data``.
        directory: Where rules are remembered.
        remember: Keep a rule that is chosen now.

    Raises:
        ConfigError: The configured rule holds out nothing, or leaves nothing to train on.
        DataError: A file cannot be read.
    """
    settings = [data.validation.model_dump(mode="json"), data.cache.unit_bytes, data.cache.grow]
    key = hashlib.sha256(canonical_json([source.digest, source.definition, *settings])).hexdigest()
    path = directory / f"holdout-{key[:24]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(path.read_bytes())
        if known["key"] == key:
            notes = [Note(kind, text) for kind, text in known["notes"]]
            rule = ValidationConfig.model_validate(known["rule"])
            return replace(source, holdout=rule, notes=(*source.notes, *notes))
    chosen = with_holdout(source, data)
    if remember:
        notes = [[note.kind, note.text] for note in chosen.notes[len(source.notes) :]]
        body = {"key": key, "rule": chosen.holdout.model_dump(mode="json"), "notes": notes}
        with contextlib.suppress(OSError):  # on a disk that is read-only it is chosen again
            make_directory(directory)
            write_file(path, canonical_json(body))
    return chosen
