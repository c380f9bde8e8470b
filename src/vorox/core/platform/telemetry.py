"""No telemetry: libraries that report their use to somebody by default have it switched off before their import."""

from __future__ import annotations

import os

_OFF = {
    "DO_NOT_TRACK": "1",
    "GRADIO_ANALYTICS_ENABLED": "False",  # trackio
    "HF_HUB_DISABLE_TELEMETRY": "1",  # huggingface_hub, transformers, datasets
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_USAGE_STATS_REPORT_URL": "http://127.0.0.1:9",  # a cluster reports even that its reports are disabled
    "WANDB_ERROR_REPORTING": "false",
}


def disable_telemetry() -> None:
    """Set the variables by which libraries send no reports, for this process and those that it starts.

    A variable that is set already stays: the user wants the reports.
    """
    for name, value in _OFF.items():
        os.environ.setdefault(name, value)
