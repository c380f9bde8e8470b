"""DeepSpeed on two processes trains as one device does, and its checkpoints are those of every layout."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from ranks.processes import PATIENCE_SECONDS, Runs, entries, losses, on_ranks, second_process

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed"),  # importing takes seconds
]


def test_every_stage_trains_as_one_device_and_its_state_moves(tmp_path: Path) -> None:
    """See ``zero.py``: training, saving, loading both ways, resuming and skipped steps, on fresh random data."""
    cases = ["1", "2", "3", "2 with offload", "3 with offload"]
    said = on_ranks("ranks.zero", 2, secrets.randbelow(10**6), tmp_path, *cases)
    assert list(json.loads(said.splitlines()[-1])) == cases


def test_a_killed_run_of_a_user_s_file_is_resumed_in_order(tmp_path: Path) -> None:
    """A transformers model under ZeRO-3; the file is the one of the repository."""
    pytest.importorskip("transformers")
    from backends.torch_engine.transformers_models import write_model  # imports torch

    model = write_model(tmp_path / "model", "llama", vocab_size=300)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    runs = Runs(tmp_path, [*settings, "train.global_batch_sequences=8", "train.micro_batch_sequences=1"])
    alone, _ = runs.train("alone", [])
    file = Path(__file__).parents[2] / "configs" / "ds_config_production.json"
    pair = ["parallel.kind=deepspeed", f"parallel.deepspeed_config={file}", "--nproc", "2"]
    process = runs.start("killed", pair, tmp_path / "hold")
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    (tmp_path / "hold").unlink()
    process.communicate(timeout=PATIENCE_SECONDS)
    run, _ = runs.train("killed", pair)
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)


def test_one_process_saves_resumes_and_replays(tmp_path: Path) -> None:
    runs = Runs(tmp_path, ["backend=torch", "log.matmul_peak=false", "schedule.name=constant"])
    alone, _ = runs.train("alone", [])
    zero = ["parallel.kind=deepspeed", "parallel.zero_offload=optimizer"]
    run, _ = runs.train("zero", [*zero, "train.num_steps=7"])
    runs.vorox(["train", "--resume", str(run), "train.num_steps=12"])
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert "bit-exact" in runs.vorox(["replay", run.name])


COPIES = """
from conformance.engines import POSITIONS, VOCAB, torch_config
from vorox import backends
from vorox.backends.torch_engine import checkpoint
from vorox.backends.torch_engine.layouts import zero_parameters
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.models.decoder.spec import decoder_spec

copied = dict.fromkeys((checkpoint, zero_parameters), 0)


def counting(module):
    copy = module.host_copy

    def host_copy(tensor):
        copied[module] += tensor.numel() * tensor.element_size()
        return copy(tensor)

    return host_copy


for module in copied:
    module.host_copy = counting(module)
config = torch_config(parallel={"kind": "deepspeed"})
spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
engine = backends.load("torch").create(config, spec, DistributedContext())
copied.update(dict.fromkeys(copied, 0))
engine.snapshot(detached=True)
print(12 * spec.num_parameters, copied[zero_parameters], copied[checkpoint])
"""


ENVIRONMENT = """
import gc
import os
import numpy as np
from conformance.engines import POSITIONS, VOCAB, batch, torch_config
from vorox import backends
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.models.decoder.spec import decoder_spec

before = dict(os.environ)
config = torch_config(parallel={"kind": "deepspeed", "zero_stage": 3})
spec = decoder_spec(config.model, tokenizer_vocab_size=VOCAB, sequence_length_tokens=POSITIONS)
tokens = np.zeros((8, POSITIONS + 1), np.int32)
create = backends.load("torch").create
first, second = (create(config, spec, DistributedContext()) for _ in range(2))
first.train_step(batch(tokens), lr=0.01, weight_decay=0.1).fetch()
del first
gc.collect()
assert second.train_step(batch(tokens), lr=0.01, weight_decay=0.1).fetch().finite  # DeepSpeed reads LOCAL_RANK
del second
gc.collect()
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "DS_ACCELERATOR")
print([name for name in names if before.get(name) != os.environ.get(name)])
"""


def python(program: str) -> str:
    """The last line that a program says, in a process of its own that no launcher started."""
    given = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False,
        timeout=PATIENCE_SECONDS, env=given,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()[-1]


def test_an_engine_that_is_freed_leaves_the_environment_as_it_was() -> None:
    assert python(ENVIRONMENT) == "[]"


def test_the_copy_for_a_checkpoint_is_made_once_and_by_host_copy() -> None:
    """Parameters and two moments; ``host_copy`` has its own test that the system gets the memory back."""
    state, by_zero, again = map(int, python(COPIES).split())
    assert by_zero == state
    assert again == 0
