"""vLLM serves a checkpoint as it is, and completes prompts like ``vorox generate``."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
import vorox
from eventually import wait_until

PROMPTS = ["the step of a run is", "what was"]
START_SECONDS = 240.0


@contextmanager
def vllm_server(checkpoint: Path) -> Iterator[str]:
    """The URL of vLLM's server with a checkpoint."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [os.environ["VLLM_PYTHON"], "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "64", "--enforce-eager"]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as server:
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: server.poll() is not None or answers(f"{url}/health"), seconds=START_SECONDS)
            assert server.poll() is None, "vLLM ended; its error is above"
            yield url
        finally:
            server.terminate()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def complete(url: str, checkpoint: Path, prompt: str) -> str:
    body = {"model": str(checkpoint), "prompt": prompt, "temperature": 0, "max_tokens": 16}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
    return answer["choices"][0]["text"]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="needs VLLM_PYTHON: the Python of an environment with vLLM")
def test_vllm_completes_like_generate(tmp_path: Path) -> None:
    settings = ["model.hidden_size=128", "tokenizer.kind=bpe", "tokenizer.vocab_size=300", "train.num_steps=60"]
    settings += ["data.sequence_length_tokens=64", "optimizer.lr=0.003"]  # vLLM needs heads of 32 and more dimensions
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, settings)).run_directory
    checkpoint = max((run / "checkpoints").iterdir())
    assert (checkpoint / "optimizer.safetensors").exists()
    with vllm_server(checkpoint) as url:
        found = [complete(url, checkpoint, prompt) for prompt in PROMPTS]
    model = vorox.load_model(checkpoint)
    assert found == [model.generate(prompt, num_tokens=16, temperature=0.0) for prompt in PROMPTS]
