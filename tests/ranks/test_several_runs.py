"""Several runs one after the other in the same processes of several ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ranks.processes import FIXED, PATIENCE_SECONDS
from tiny_runs import configuration
from vorox.cli.launch.rank_launcher import _free_port, environments_of
from vorox.core.ranks.distributed_context import Node

PROGRAM = """
import json, sys
import vorox.run
from vorox.core.config import load_config
from vorox.core.errors import ConfigError

def train(*settings):
    config = load_config("tiny.yaml", ["parallel.data_parallel_size=2", "log.matmul_peak=false", *settings])
    return vorox.run.train(config, resume_from="never", argv=["test"])

found = [train().progress.chain]
try:
    train("eval.functions=[nowhere.py:f]")  # a program may go on after an error
except ConfigError:
    found.append("refused")
found.append(train("optimizer.lr=0.02", "parallel.start_timeout_seconds=299").progress.chain)
found.append(train().progress.chain)
if sys.argv[1] == "0":
    print(json.dumps(found))
"""


@pytest.mark.slow
def test_a_process_trains_again_with_the_same_ranks(tmp_path: Path) -> None:
    configuration(tmp_path, ["train.num_steps=3"])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, variables["RANK"]], cwd=tmp_path, env={**variables, **FIXED},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for variables in environments_of(2, Node("127.0.0.1", _free_port(), 0, 1), os.environ)
    ]  # fmt: skip
    outputs = [rank.communicate(timeout=PATIENCE_SECONDS)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    first, refused, other, again = json.loads(outputs[0].splitlines()[-1])
    assert refused == "refused"
    assert first == again != other
