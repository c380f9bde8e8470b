"""Prompt a checkpoint with ``vorox generate`` in a process of its own: no framework is loaded here."""

from __future__ import annotations

import json
import subprocess
import threading
from pathlib import Path
from typing import Any

from vorox.core.errors import ConfigError
from vorox.core.processes.child_process import child_command

_TIMEOUT_SECONDS = 300
_MAX_PROMPT_CHARACTERS = 20_000
_MAX_TOKENS = 1024
_one_at_a_time = threading.Lock()


def generate(directory: Path, step: int, prompt: str, num_tokens: int, temperature: float, seed: int) -> dict[str, Any]:
    """Complete a prompt with a checkpoint of a run; one request at a time.

    Raises:
        ConfigError: A value is out of range, another request is running, or the command failed.
    """
    if not prompt or len(prompt) > _MAX_PROMPT_CHARACTERS or not 1 <= num_tokens <= _MAX_TOKENS or temperature < 0:
        raise ConfigError(
            "The prompt or a sampling setting is out of range", where="prompt",
            hint=f"use 1 to {_MAX_TOKENS:,} tokens, a temperature of 0 or more and a prompt of at most "
            f"{_MAX_PROMPT_CHARACTERS:,} characters",
        )  # fmt: skip
    command = child_command(
        "vorox", "generate", str(directory.resolve()), f"--prompt={prompt}", f"--tokens={num_tokens}",
        f"--temperature={temperature}", f"--seed={seed}", f"--step={step}", "--json",
    )  # fmt: skip
    if not _one_at_a_time.acquire(blocking=False):
        raise ConfigError("Another prompt is running", where="prompt", hint="try again when it has finished")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"No answer after {_TIMEOUT_SECONDS} s", where="vorox generate", hint="request fewer tokens"
        ) from None
    finally:
        _one_at_a_time.release()
    if done.returncode:
        raise ConfigError(done.stderr.strip()[-2000:] or f"exit code {done.returncode}", where="vorox generate")
    return json.loads(done.stdout)
