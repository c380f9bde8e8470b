"""The views that a run reads, as its attempts recorded them.

A running or finished run finds its rows by its own record, never by what its folders list now. A view that is not
where it was recorded is looked up by name below the root of the caches: the root may have moved, or the run. A lost
view is restored from its record in the run directory (``view_records``), to be rebuilt.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vorox.core.files.json_reader import mapping
from vorox.core.run_layout import RunLayout
from vorox.core.schema.data import Split
from vorox.data.cache.upkeep.gc import STREAMS_NAME
from vorox.data.cache.upkeep.retention import register_run
from vorox.data.corpus.view_records import is_stream, restore_view
from vorox.data.recipe import RECIPE_NAME
from vorox.data.text.sources import Source
from vorox.records.run_lookup import notes_of_attempts

TRAIN_NOTE, HOLDOUT_NOTE, VALIDATION_NOTE = "caches", "holdout_caches", "validation_caches"
"""Notes of an attempt: the views of the training text, of what is held out of it, and of ``data.validation.sources``;
each maps the name of a source to a directory."""
SHARES_NOTE = "held_out_shares"
"""Note of an attempt: the measured share of the text of each source that is held out."""


@dataclass(frozen=True, slots=True)
class RunViews:
    """The views of a run, by note and name of the source; the newest attempt that recorded one counts.

    Attributes:
        directories: Their directories.
        held_out_shares: The measured share of its text that is held out, by name of the source, if it is known.
    """

    directories: Mapping[str, Mapping[str, Path]] = field(default_factory=dict[str, Mapping[str, Path]])
    held_out_shares: Mapping[str, float] = field(default_factory=dict[str, float])

    @classmethod
    def of_run(cls, run_directory: Path, root: Path, *, restore: bool = True, only_root: bool = False) -> RunViews:
        """Return the views of a run that exist.

        Args:
            run_directory: The run.
            root: The root of the caches, where views are that are no longer where they were recorded.
            restore: Restore lost views from the run's records, if the disk is writable, so that they can be built.
                Otherwise only views that are already restored are found.
            only_root: Look below the root alone, also for views that are where they were recorded.

        Raises:
            DataError: The record of a lost view is damaged.
        """
        layout = RunLayout(run_directory)
        attempts = notes_of_attempts(run_directory)[::-1]
        found: dict[str, dict[str, Path]] = {}
        for notes, note in itertools.product(attempts, (TRAIN_NOTE, HOLDOUT_NOTE, VALIDATION_NOTE)):
            views = found.setdefault(note, {})
            for name, text in mapping(notes.get(note)).items():
                path = Path(str(text))
                recorded = (path,) if not only_root else ()
                existing = None if name in views else _find_view(layout, path, recorded, root, name, restore=restore)
                if existing is not None:
                    views[name] = existing
        measured = mapping(next((notes[SHARES_NOTE] for notes in attempts if SHARES_NOTE in notes), None))
        shares = {name: share for name, share in measured.items() if isinstance(share, float)}
        return cls({note: views for note, views in found.items() if views}, shares)

    def directory(self, source: Source, split: Split) -> Path | None:
        """Return the view of a split of a source."""
        return self.named(source.config.name, source.key, split)

    def named(self, name: str, key: str, split: Split) -> Path | None:
        """Return the view of a split of the source with a name and a key in the configuration."""
        is_separate = key.startswith("data.validation")
        note = VALIDATION_NOTE if is_separate else TRAIN_NOTE if split == "train" else HOLDOUT_NOTE
        return self.directories.get(note, {}).get(name)

    def register(self, run_directory: Path) -> None:
        """Record in the caches that the run reads them, if they do not say so: the run, or they, may have moved."""
        for directory in (path for views in self.directories.values() for path in views.values()):
            register_run(directory, run_directory)

    def __bool__(self) -> bool:
        return bool(self.directories)


def missing_views(run_directory: Path, root: Path, *, only_root: bool = False) -> list[str]:
    """Return the names of the recorded views that ``RunViews.of_run`` does not find."""
    found = RunViews.of_run(run_directory, root, restore=False, only_root=only_root).directories
    attempts = itertools.product(notes_of_attempts(run_directory), (TRAIN_NOTE, HOLDOUT_NOTE, VALIDATION_NOTE))
    recorded = {
        (note, name): Path(str(text)).name
        for notes, note in attempts
        for name, text in mapping(notes.get(note)).items()
    }
    return sorted(view for (note, name), view in recorded.items() if name not in found.get(note, {}))


def recorded_views(run_directory: Path) -> list[Path]:
    """Return the directories of all views that the attempts of a run have recorded."""
    notes = itertools.product(notes_of_attempts(run_directory), (TRAIN_NOTE, HOLDOUT_NOTE, VALIDATION_NOTE))
    return list(dict.fromkeys(Path(str(text)) for found, note in notes for text in mapping(found.get(note)).values()))


def _is_view(path: Path) -> bool:
    """Whether a view is at a path; a place that this user may not read has none, as the home of the run's owner."""
    try:
        return (path / RECIPE_NAME).exists()
    except PermissionError:
        return False


def _find_view(
    layout: RunLayout, path: Path, recorded: tuple[Path, ...], root: Path, name: str, *, restore: bool
) -> Path | None:
    """Return the directory of a view that was recorded at a path; ``None`` if it is lost and not restored."""
    places = (*recorded, root / path.name, root / STREAMS_NAME / path.name)
    existing = next((place for place in places if _is_view(place)), None)
    record = layout.view(path.name)
    if existing is None and record.exists():
        kind = root / STREAMS_NAME if is_stream(path) else root
        with contextlib.suppress(OSError):  # reported by the build
            return restore_view(record, kind, name, create=restore)
    return existing
