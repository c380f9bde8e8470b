"""Matching of a configuration to its run on disk, including runs of versions with fewer settings.

A run id ends in digits of the configuration's digest, which covers all settings, so a version with a new setting
computes another id for the same command. Such a run is recognised by its record: its digest equals that of the current
configuration without the settings that its ``config.yaml`` lacks, and those have their default values.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import yaml

from vorox.core.atomic import canonical_json
from vorox.core.config import digest_values, flatten, load_config
from vorox.core.errors import VoroxError
from vorox.core.run_layout import RunLayout
from vorox.core.run_lookup import run_attempts, run_directories, same_run_directories
from vorox.core.schema import RunConfig


def latest_run(config: RunConfig, run_id: str) -> Path | None:
    """Return the directory of the latest run of a configuration; ``None`` if there is none.

    Args:
        config: The configuration.
        run_id: Its run id.
    """
    root = Path(config.run.directory)
    same = same_run_directories(root, run_id)
    if same:
        return same[-1]
    name = re.compile(re.escape(run_id[:-8]) + r"[0-9a-f]{8}(-\d+)?")
    earlier = [path for path in run_directories(root) if name.fullmatch(path.name) and _started_with(path, config)]
    return max(
        earlier,
        key=lambda path: (str([entry.get("started_at") for entry in run_attempts(path)][-1:]), path),
        default=None,
    )


def _started_with(directory: Path, config: RunConfig) -> bool:
    """Whether a run started with a configuration, apart from settings that did not exist then."""
    layout = RunLayout(directory)
    try:
        recorded = json.loads(layout.record.read_bytes())["config_digest"]
        known = flatten(yaml.safe_load(layout.config.read_bytes()))
        before = digest_values(load_config(layout.config))
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError, VoroxError):
        return False
    now = digest_values(config)
    if any(key not in before or before[key] != value for key, value in now.items() if key not in known):
        return False
    common = {key: value for key, value in now.items() if key in known}
    return len(common) < len(now) and hashlib.sha256(canonical_json(common)).hexdigest() == recorded
