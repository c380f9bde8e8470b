"""A trained model to talk to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_runs


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run of the numpy engine, with a chat template."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        tiny_runs.use_numpy_engine(monkeypatch)
        settings = ["tokenizer.chat_template=chatml", "data.sequence_length_tokens=256", "run.seed=7"]
        settings += ["tokenizer.special_tokens=['<|im_start|>', '<|im_end|>']", "train.num_steps=4"]
        yield tiny_runs.run(tiny_runs.configuration(tmp_path_factory.mktemp("run"), settings)).run_directory
