"""What a preset says for its own text only, and what is fitted when the text is another one.

A preset was tuned on its sources: its prompts, learning rate and holdout belong to them (``with_its_sources`` in its
file). They are left out as soon as a later layer names other sources. The learning rate then follows from the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from vorox.core.config.overrides import Assignment
from vorox.core.config.synonyms import translated
from vorox.core.config.tree import ConfigTree

WITH_ITS_SOURCES: Final = "with_its_sources"
"""Top-level key of a configuration file: settings that hold only while its own ``data.sources`` do."""

_WHICH_TEXT: Final = frozenset({"format", "paths", "preset"})
_LARGEST_LR, _LR_TIMES_WIDTH = 3e-3, 0.4


def names_sources(assignments: Iterable[Assignment]) -> bool:
    """Whether any of them says which text is read."""
    for assignment in map(translated, assignments):
        path = assignment.path
        if path == ("data", "sources") or path[:2] == ("data", "source"):
            return True
        if path[:2] == ("data", "sources") and (len(path) == 3 or path[3] in _WHICH_TEXT):
            return True
        if path == ("data",) and isinstance(assignment.value, dict) and "sources" in assignment.value:
            return True
    return False


def names_warmup(assignments: Iterable[Assignment]) -> bool:
    """Whether any of them says how long the learning rate rises."""
    paths = (translated(assignment).path for assignment in assignments)
    return any(path[0] == "schedule" and (len(path) < 2 or str(path[1]).startswith("warmup")) for path in paths)


def fit_learning_rate(tree: ConfigTree) -> None:
    """Fill in ``optimizer.lr``, unless somebody said it: inversely proportional to the width of the model."""
    width = tree.get("model.hidden_size")
    if tree.said("optimizer.lr") or not isinstance(width, int) or width < 1:
        return
    lr = float(f"{min(_LARGEST_LR, _LR_TIMES_WIDTH / width):.1e}")
    tree.fill("optimizer.lr", lr, f"fitted to model.hidden_size={width}")


def fit_warmup(tree: ConfigTree) -> None:
    """Shorten a warm-up that was chosen for more steps than the run has to a tenth of them."""
    steps, warmup = tree.get("train.num_steps"), tree.get("schedule.warmup_steps")
    if isinstance(steps, int) and isinstance(warmup, int) and warmup > max(1, steps // 10):
        tree.fill("schedule.warmup_steps", max(1, steps // 10), f"fitted to train.num_steps={steps}")
