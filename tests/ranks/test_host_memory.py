"""The ranks of one host share its memory: what fits alone, and on two hosts, is refused for two ranks of one host.

The memory is that of the estimate for one process, and half as much again; each rank of two needs as much.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ranks.processes import PATIENCE_SECONDS, Runs, environment, python_path
from vorox.core.config import load_config
from vorox.models.decoder.spec import decoder_spec
from vorox.planning.memory_estimate import memory_per_device

pytestmark = [pytest.mark.slow]

VOCAB = 264
PAIR = ["parallel.data_parallel_size=2", "train.micro_batch_sequences=1", "--nproc", "2"]


@pytest.mark.parametrize(
    "backend", [pytest.param("torch", marks=pytest.mark.torch), pytest.param("jax", marks=pytest.mark.jax)]
)
def test_two_ranks_of_a_host_share_its_memory(backend: str, tmp_path: Path) -> None:
    model = [f"backend={backend}", "runtime.num_threads=null", f"model.vocab_size={VOCAB}", "log.matmul_peak=false"]
    runs = Runs(tmp_path, [*model, "train.micro_batch_sequences=1", "train.num_steps=2", "eval.prompts=[]"])
    config = load_config(tmp_path / "tiny.yaml", runs.model)
    length = config.data.sequence_length_tokens
    spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=length)
    host_bytes = memory_per_device(spec, config, "cpu").total_bytes_on("cpu") * 3 // 2

    def train(name: str, *words: str, **variables: str) -> tuple[int, str]:
        given = (
            environment() | {"PYTHONPATH": python_path("small_host"), "TESTS_HOST_BYTES": str(host_bytes)} | variables
        )
        done = subprocess.run(
            runs.command(name, words), env=given, cwd=tmp_path, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, timeout=PATIENCE_SECONDS, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout

    code, said = train("alone")
    assert code == 0, said
    code, said = train("pair", *PAIR)
    assert code == 3, said
    assert "on each of 2 devices" in said
    code, said = train("apart", *PAIR, TESTS_HOSTS="1")
    assert code == 0, said
