"""Commands of one or several ranks in one folder.

Ranks of PyTorch that nothing happens to are forked from a process that has imported the engine, and transformers if the
model is one of those (``warm_children.py``); they have the variables that ``vorox train --nproc`` gives them. Commands
that are killed or stopped are fresh processes, and their ranks are started by ``--nproc``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from eventually import wait_until
from small_configurations import SMOOTH_EPS
from tiny_runs import configuration
from vorox.cli.launch.rank_launcher import environments_of
from vorox.core.files.staged_directory import read_manifest
from vorox.core.ranks.distributed_context import Node
from vorox.models.stored.engine_state import read_weights
from vorox.models.stored.spec import spec_from_json
from vorox.records.replay_chain import ChainEntry, number, read_chain
from warm_children import FreshChild, WarmChild, WarmChildren

TESTS = Path(__file__).parents[1]
PATIENCE_SECONDS = 600
FIXED = {"OMP_NUM_THREADS": "1"}
"""Several threads would keep a process from being forked, and change bits."""
IMPORTED = ("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo")
"""What ranks import besides the engine."""
TRANSFORMERS = ("transformers.modeling_utils",)
"""What ranks with a model of transformers import besides."""


def environment() -> dict[str, str]:
    """The variables of every command: those of this test, but for the devices of JAX."""
    return {name: value for name, value in os.environ.items() if name != "JAX_NUM_CPU_DEVICES"} | FIXED


@functools.cache
def _children(*modules: str) -> WarmChildren:
    children = WarmChildren("torch", environment(), [*IMPORTED, *modules])
    atexit.register(children.close)
    return children


def python_path(folder: str) -> str:
    """The path of Python's modules with a folder beside this file in front, which Python runs at its start."""
    return os.pathsep.join([str(Path(__file__).with_name(folder)), *filter(None, [os.environ.get("PYTHONPATH")])])


class Runs:
    """A folder with a text, its cache and runs; ``model`` are settings of all commands."""

    def __init__(self, directory: Path, model: Sequence[str]) -> None:
        self.directory, self.model = directory, model
        configuration(directory)  # writes the text and tiny.yaml

    def command(self, name: str, overrides: Sequence[str]) -> list[str]:
        words = [str(self.directory / "tiny.yaml"), *self.model, *overrides]
        return [sys.executable, "-m", "vorox", "train", *words, "--name", name]

    def start(self, name: str, overrides: Sequence[str], hold: Path | None = None) -> subprocess.Popen[str]:
        """The command as a process; where there is a file ``hold``, no process of the run begins step 9."""
        variables = environment()
        if hold is not None:
            hold.touch()
            variables |= {"TESTS_HOLD": str(hold), "TESTS_SETTINGS": " ".join(self.model)}
            variables["PYTHONPATH"] = python_path("held")
        return subprocess.Popen(
            self.command(name, overrides), env=variables, cwd=self.directory, text=True, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )  # fmt: skip

    def train_with_variables(self, name: str, overrides: Sequence[str], variables: dict[str, str]) -> str:
        """Run the command with more environment variables to its end; return what was said on stderr."""
        done = subprocess.run(
            self.command(name, overrides), env=environment() | variables, cwd=self.directory, text=True,
            capture_output=True, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done.stderr

    def train(self, name: str, overrides: Sequence[str], *, code: int = 0) -> tuple[Path, str]:
        """Return the run of that name and what its ranks said; see ``vorox``."""
        said = self.vorox(self.command(name, overrides)[3:], code=code)
        return self.find(name), said

    def run_fresh(self, words: Sequence[str], code: int = 0) -> str:
        """Run a command to its end in a fresh process, which starts the ranks; return its output."""
        done = subprocess.run(
            [sys.executable, "-m", "vorox", *words], env=environment(), cwd=self.directory, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=PATIENCE_SECONDS,
        )  # fmt: skip
        assert done.returncode == code, f"{done.returncode}\n{done.stdout[-6000:]}"
        return done.stdout

    def vorox(self, words: Sequence[str], *, code: int = 0) -> str:
        """Run a command to its end, with as many ranks as ``--nproc`` says; return what they said, the first one first.

        Where it must fail with ``code``, a rank does when the first ones end, and the others are killed.
        """
        if "backend=torch" not in self.model:  # gRPC, which connects the ranks of JAX, hangs after a fork
            return self.run_fresh(words, code)
        words, count = list(words), 1
        if "--nproc" in words:
            place = words.index("--nproc")
            count = int(words[place + 1])
            del words[place : place + 2]
        variables: list[dict[str, str]] = [{}]
        if count > 1:
            with socket.create_server(("127.0.0.1", 0)) as free:
                node = Node("127.0.0.1", free.getsockname()[1], 0, 1)
            variables = environments_of(count, node, {})
        children = _children(*(TRANSFORMERS if "model.kind=huggingface" in self.model else ()))
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in variables]
            ranks = [
                children.vorox(words, cwd=self.directory, output=output, variables=environment() | own)
                for output, own in zip(outputs, variables, strict=True)
            ]
            for rank in ranks:
                stack.callback(rank.kill)
            codes, said = _wait_for(ranks), list(map(_text, outputs))
        as_wanted = code in codes if code else codes == [0] * count
        assert as_wanted, "\n".join([str(codes), *(text[-3000:] for text in said)])
        return "".join(said) if code else said[0]

    def find(self, name: str) -> Path:
        digest = "[0-9a-f]" * 8
        found = [path for path in (self.directory / "runs").glob(f"{name}-{digest}") if path.is_dir()]
        assert len(found) < 2, f"other settings are another run: {found}"
        return found[0] if found else self.directory / "runs" / name


def _wait_for(ranks: Sequence[WarmChild | FreshChild]) -> list[int | None]:
    """Wait until all ranks have ended or one has failed; return their exit codes, ``None`` of one that runs."""
    wait_until(
        lambda: any(rank.poll() for rank in ranks) or None not in [rank.poll() for rank in ranks], PATIENCE_SECONDS
    )
    return [rank.returncode for rank in ranks]


def _text(output: IO[bytes]) -> str:
    output.seek(0)
    return output.read().decode()


KILLS = ("1-connect", "0-corpus", "1-step", "0-checkpoint")
"""Before the ranks connect, while they prepare the data, in a step, and before a checkpoint is committed."""


def train_with_kills(
    runs: Runs, backend: str, overrides: Sequence[str], orders: Path, kills: Sequence[str] = KILLS
) -> Path:
    """A run of two ranks that kill themselves at these points, in this order, and are restarted."""
    orders.mkdir(exist_ok=True)
    for kill in kills:
        (orders / kill).touch()
    variables = {
        "TESTS_KILLS": str(orders),
        "TESTS_BACKEND": backend,
        "PYTHONPATH": python_path("killed"),
    }
    errors = runs.train_with_variables(
        "restarted", [*overrides, "--nproc", "2", "--max-restarts", str(len(kills))], variables
    )
    assert not any(orders.iterdir()), "every kill took place"
    assert [line for line in errors.splitlines() if "Restarting" in line] == [
        f"Rank {kill[0]} of 2 was killed by SIGKILL. Restarting ({number} of {len(kills)}) from the newest checkpoint."
        for number, kill in enumerate(kills, start=1)
    ]
    return runs.find("restarted")


def entries(run: Path) -> list[ChainEntry]:
    return list(read_chain(run).values())


def losses(run: Path) -> list[float]:
    return [number(entry.loss) for entry in entries(run)]


def lines(run: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def second_process(process: subprocess.Popen[str], runs: Runs, name: str) -> int:
    """The process id of the second process, once the run has saved."""
    saved = "checkpoints/step-*/MANIFEST.json"
    wait_until(lambda: process.poll() is not None or any(runs.find(name).glob(saved)), PATIENCE_SECONDS)
    assert process.poll() is None, process.communicate()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    is_second = b"\0RANK=1\0"
    (found,) = [int(child) for child in children if is_second in Path(f"/proc/{child}/environ").read_bytes()]
    return found


def killed_and_resumed(runs: Runs, overrides: Sequence[str], hold: Path) -> Path:
    """Kill the second of two processes of a run named killed once it has saved, start it again, and return the run."""
    process = runs.start("killed", overrides, hold)
    os.kill(second_process(process, runs, "killed"), signal.SIGKILL)
    hold.unlink()
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode not in (0, 2, 75), errors
    run, _ = runs.train("killed", overrides)
    return run


def on_ranks(program: str, count: int, *words: object) -> str:
    """Run a module on that many forked ranks; return what rank 0 prints. When one fails, the others are stopped."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    shared = environment() | {"VOROX_COORDINATOR": address, "VOROX_PROCESS_COUNT": str(count)}
    given = [str(word) for word in words]
    children = _children(*(TRANSFORMERS if any("transformers" in word for word in given) else ()))
    with contextlib.ExitStack() as stack:
        outputs, errors = ([stack.enter_context(tempfile.TemporaryFile()) for _ in range(count)] for _ in range(2))
        ranks = [
            children.start(
                program, given, cwd=TESTS, output=outputs[rank], errors=errors[rank],
                variables=shared | {"VOROX_PROCESS_INDEX": str(rank)},
            )
            for rank in range(count)
        ]  # fmt: skip
        for rank in ranks:
            stack.callback(rank.kill)
        codes = _wait_for(ranks)
        said = [f"rank {rank}: {code}\n{_text(errors[rank])[-3000:]}" for rank, code in enumerate(codes)]
        assert codes == [0] * count, "\n".join(said)
        return _text(outputs[0])


def transformers_runs(folder: Path, name: str, **values: Any) -> Runs:
    """Runs of a small transformers model with random weights, on masked documents; ``values`` of its configuration."""
    from backends.torch_engine.transformers_models import write_model  # imports torch

    model = write_model(folder / "model", name, vocab_size=301, **values)
    settings = ["backend=torch", "model.kind=huggingface", f"model.name_or_path={model}", "log.matmul_peak=false"]
    settings += ["train.global_batch_sequences=8", "train.micro_batch_sequences=2", "data.document_mask=true"]
    return Runs(folder, [*settings, "schedule.name=constant"])


def pretrained_runs(folder: Path, name: str, **values: Any) -> Runs:
    """Runs of 20 steps of ``transformers_runs``, with other values in ``config.json``."""
    runs = transformers_runs(folder, name, **values)
    return Runs(folder, [*runs.model, "train.num_steps=20", "log.parameter_norms=true", f"optimizer.eps={SMOOTH_EPS}"])


def assert_same_numbers(run: Path, alone: Path) -> None:
    """The same rows, losses within 1e-5 (relative), and the same state, up to the order of sums, after 20 steps."""
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    norms = [
        [line["values"]["grad_norm"] for line in lines(path, "metrics") if "grad_norm" in line.get("values", {})]
        for path in (run, alone)
    ]
    assert norms[0]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)
    mine, theirs = (stored_arrays(path / "checkpoints" / "step-00000020") for path in (run, alone))
    assert mine.keys() == theirs.keys()
    for key, array in theirs.items():
        np.testing.assert_allclose(mine[key], array, rtol=1e-3, atol=1e-4, err_msg=key)


def check_continuation(runs: Runs, run: Path, kind: str) -> None:
    """Continue a run that two ranks divide on one process, and divided again: the rows and losses of one process."""
    for size, steps in ((1, 22), (2, 24)):
        words = [f"parallel.{kind}_size={size}", f"train.num_steps={steps}", "--nproc", str(size)]
        runs.vorox(["train", "--resume", str(run), *words])
    longer, _ = runs.train("longer", ["train.num_steps=24"])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(longer)]
    assert losses(run) == pytest.approx(losses(longer), rel=1e-4)


def check_killed_run(runs: Runs, kind: str, hold: Path, others: Sequence[Mapping[str, object]]) -> None:
    """Check that two ranks that are killed repeat every bit, and that other layouts read the same rows.

    Args:
        runs: The model.
        kind: What divides it, as in ``parallel.<kind>_size``.
        hold: A file that does not exist.
        others: Layouts that continue for two steps each: settings of ``parallel``, with all sizes.
    """
    divided = [f"parallel.{kind}_size=2", "--nproc", "2"]
    alone, _ = runs.train("alone", [f"train.num_steps={12 + 2 * len(others)}"])
    pair, _ = runs.train("pair", divided)
    assert losses(pair) == pytest.approx(losses(alone)[:12], rel=1e-5)
    found, expected = ({line["step"]: line["loss"] for line in lines(run, "evaluations")} for run in (pair, alone))
    shared = found.keys() & expected.keys()
    assert shared
    assert [found[step] for step in shared] == pytest.approx([expected[step] for step in shared], rel=1e-5)
    run = killed_and_resumed(runs, divided, hold)
    assert any(f"num_devices = 2, {kind}_size = 2)" in record["message"] for record in lines(run, "events"))
    assert entries(run) == entries(pair)
    assert fingerprint(run) == fingerprint(pair)
    for index, layout in enumerate(others, start=1):
        size = math.prod(value for value in layout.values() if isinstance(value, int))
        changed = [f"parallel.{name}={value}" for name, value in layout.items()]
        runs.vorox(["train", "--resume", str(run), *changed, f"train.num_steps={12 + 2 * index}", "--nproc", str(size)])
    assert [entry.batch for entry in entries(run)] == [entry.batch for entry in entries(alone)]
    assert losses(run) == pytest.approx(losses(alone), rel=1e-4)


def stored_arrays(checkpoint: Path) -> dict[str, np.ndarray]:
    """The whole arrays of a checkpoint of PyTorch by ``<kind>.<canonical name>``; shards are joined by their index."""
    if not (checkpoint / "shards.json").exists():
        spec = spec_from_json(json.loads((checkpoint / "engine.json").read_bytes())["spec"])
        weights = {f"weights.{name}": array for name, array in read_weights(checkpoint, spec)}
        return weights | load_file(checkpoint / "optimizer.safetensors")
    index = json.loads((checkpoint / "shards.json").read_bytes())["arrays"]
    shards = {path.name: load_file(path) for path in checkpoint.glob("shard-*.safetensors")}
    return {
        name: np.concatenate([shards[file][name] for file, _, _ in array["slices"]]) for name, array in index.items()
    }


def fingerprint(run: Path) -> str:
    return read_manifest(run / "checkpoints" / "step-00000012")["metadata"]["fingerprint"]
