"""One way to load a configuration: whatever a user names is loaded with the model that it starts from.

``vorox.core.config`` merges and checks settings without reading a model. Only readers of configurations that a run
recorded, in which everything is decided, may use it directly.
"""

from __future__ import annotations

import ast
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "vorox"
READERS_OF_RECORDS = {
    "training/origin/configuration.py", "training/resume/resume_settings.py", "training/reports/training_record.py",
    "training/mirror/run_mirror.py", "records/run_context.py", "api/checkpoints.py",
}  # fmt: skip
LOADERS = {"load_config", "resolve_config"}


def test_only_recorded_configurations_are_loaded_without_their_model() -> None:
    found: set[str] = set()
    for path in sorted(SOURCE.rglob("*.py")):
        name = path.relative_to(SOURCE).as_posix()
        if name.startswith("core/"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("vorox.core.config"):
                continue
            if LOADERS & {alias.name for alias in node.names}:
                found.add(name)
    assert found == READERS_OF_RECORDS
