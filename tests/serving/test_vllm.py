"""vLLM loads a checkpoint as it is, and completes prompts like ``vorox generate``."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

import tiny_runs
import vorox

PROMPTS = ["the step of a run is", "what was"]
COMPLETE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model = LLM(model=sys.argv[1], dtype="float32", max_model_len=64, enforce_eager=True)
    found = model.generate(json.loads(sys.argv[2]), SamplingParams(temperature=0, max_tokens=16))
    print("completions:", json.dumps([one.outputs[0].text for one in found]))
"""


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif("VLLM_PYTHON" not in os.environ, reason="needs VLLM_PYTHON: the Python of an environment with vLLM")
def test_vllm_completes_like_generate(tmp_path: Path) -> None:
    settings = ["model.hidden_size=128", "tokenizer.kind=bpe", "tokenizer.vocab_size=300", "train.num_steps=60"]
    settings += ["data.sequence_length_tokens=64", "optimizer.lr=0.003"]  # vLLM needs heads of 32 and more dimensions
    run = tiny_runs.run(tiny_runs.configuration(tmp_path, settings)).run_directory
    checkpoint = max((run / "checkpoints").iterdir())
    assert (checkpoint / "optimizer.safetensors").exists()
    program = tmp_path / "complete.py"
    program.write_text(COMPLETE)
    done = subprocess.run(
        [os.environ["VLLM_PYTHON"], program, checkpoint, json.dumps(PROMPTS)], capture_output=True, text=True,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("completions: ")]
    found: list[str] = json.loads(lines[0].removeprefix("completions: "))
    model = vorox.load_model(checkpoint)
    assert found == [model.generate(prompt, num_tokens=16, temperature=0.0) for prompt in PROMPTS]
