"""Checkpoints in the format of Orbax: any mesh and layout restores any other's, bit for bit, reading what it holds.

Oracles: Orbax's own restore for the reader that has only tensorstore, and the bits of the engine that was saved.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from backends.jax_engine.test_sharding import DIVISIBLE, MESHES, losses, on
from vorox.backends.jax_engine.engine import JaxEngine
from vorox.core.errors import CheckpointError
from vorox.core.files.staged_directory import MANIFEST_NAME, StagedDirectory, verify_directory
from vorox.core.platform.installation import install_command
from vorox.core.schema import RunConfig
from vorox.models.arrays.orbax_arrays import FOLDER, OrbaxArrays
from vorox.models.stored.engine_state import read_weights
from vorox.training.checkpoints.store import write_state

pytestmark = pytest.mark.jax

ORBAX: dict[str, Any] = {"checkpoint__format": "orbax"}


def saved(engine: JaxEngine, target: Path, *, detached: bool = False) -> Path:
    snapshot = engine.snapshot(detached=detached)
    with StagedDirectory(target) as directory:
        write_state(snapshot, directory)
        return directory.commit({})


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[JaxEngine, Path]:
    """A state after two steps of Muon and AdamW, spread over four devices, layers stacked."""
    engine = on(
        MESHES["fsdp 2, tensor 2"], DIVISIBLE["qwen3"], optimizer__name="muon", runtime__scan_layers=True, **ORBAX
    )
    losses(engine, 2)
    return engine, saved(engine, tmp_path_factory.mktemp("orbax") / "saved", detached=True)


@pytest.mark.parametrize(
    ("mesh", "scan_layers", "arrays"),
    [
        ({}, False, "orbax"),
        ({}, True, "safetensors"),
        ({"fsdp_size": 2}, True, "orbax"),
        (MESHES["tensor 4"], False, "orbax"),
        (MESHES["data 2, fsdp 2"], True, "safetensors"),
    ],
)
def test_any_mesh_and_layout_restores_it(
    written: tuple[JaxEngine, Path], mesh: dict[str, int], scan_layers: bool, arrays: str
) -> None:
    engine, path = written
    settings = {"optimizer__name": "muon", "runtime__scan_layers": scan_layers, "checkpoint__format": arrays}
    other = on(mesh, DIVISIBLE["qwen3"], run__seed=9, **settings)
    shardings = jax.tree.map(lambda array: array.sharding, other.state)
    other.load(path)
    assert other.fingerprint() == engine.fingerprint()
    for (name, left), (_, right) in zip(engine.export_weights(), other.export_weights(), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)
    assert jax.tree.map(lambda array: array.sharding, other.state) == shardings


def test_each_device_reads_its_part_alone(written: tuple[JaxEngine, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, path = written
    asked: dict[str, list[int]] = {}
    original = OrbaxArrays.read

    def read(self: OrbaxArrays, name: str, index: Any = ...) -> Any:
        part = original(self, name, index)
        asked.setdefault(name, []).append(part.size)
        return part

    monkeypatch.setattr(OrbaxArrays, "read", read)
    other = on(MESHES["data 2, fsdp 2"], DIVISIBLE["qwen3"], optimizer__name="muon", **ORBAX)
    other.load(path)
    whole = {name: math.prod(OrbaxArrays(path)._open(name).shape) for name in asked}
    for name, parts in asked.items():
        assert sum(parts) == whole[name], f"{name} was read more than once"
    spread = [name for name, parts in asked.items() if len(parts) == 2]
    assert {f"{kind}.blocks.0.mlp.up.weight" for kind in ("weights", "momentum")} <= set(spread)


def test_the_store_is_cut_as_the_devices_hold_it(written: tuple[JaxEngine, Path]) -> None:
    """Nothing is gathered: the chunks on disk are the shards."""
    engine, path = written
    leaf = engine.state.params["blocks.mlp.up.weight"]
    shard = leaf.addressable_shards[0].data.shape[1:]
    assert math.prod(shard) * 4 == math.prod(leaf.shape[1:])
    stored = OrbaxArrays(path)._open("weights.blocks.1.mlp.up.weight")
    assert tuple(stored.chunk_layout.write_chunk.shape) == shard


def test_the_reader_agrees_with_orbax(written: tuple[JaxEngine, Path]) -> None:
    import orbax.checkpoint as ocp
    from etils import epath

    engine, path = written
    trees = engine.snapshot(detached=False).trees  # type: ignore[attr-defined]
    as_numpy = jax.tree.map(lambda array: ocp.RestoreArgs(restore_type=np.ndarray), dict(trees))
    theirs = ocp.PyTreeCheckpointHandler().restore(
        epath.Path(path / FOLDER), args=ocp.args.PyTreeRestore(restore_args=as_numpy)
    )
    ours = OrbaxArrays(path)
    flat = {f"{kind}.{name}": np.asarray(array) for kind, tree in theirs.items() for name, array in tree.items()}
    assert sorted(flat) == ours.names
    for name, array in flat.items():
        np.testing.assert_array_equal(ours.read(name), array, err_msg=name)
    for name, array in engine.export_weights():
        np.testing.assert_array_equal(flat[f"weights.{name}"], array, err_msg=name)


def test_either_format_is_read_whatever_is_set(tmp_path: Path) -> None:
    for before, after in (("safetensors", "orbax"), ("orbax", "safetensors")):
        engine = on({}, DIVISIBLE["gpt2"], checkpoint__format=before)
        losses(engine, 1)
        path = saved(engine, tmp_path / before, detached=True)
        assert (path / FOLDER).is_dir() == (before == "orbax")
        other = on(MESHES["fsdp 4"], DIVISIBLE["gpt2"], checkpoint__format=after, run__seed=4)
        other.load(path)
        assert other.fingerprint() == engine.fingerprint()


def test_a_detached_snapshot_outlives_steps(tmp_path: Path) -> None:
    engine = on(MESHES["data 2, fsdp 2"], DIVISIBLE["llama"], **ORBAX)
    moment, snapshot = engine.fingerprint(), engine.snapshot(detached=True)
    losses(engine, 2)
    assert engine.fingerprint() != moment == snapshot.fingerprint()
    with StagedDirectory(tmp_path / "saved") as directory:
        write_state(snapshot, directory)
        path = directory.commit({})
    written = sum(file.stat().st_size for file in (path / FOLDER).rglob("*") if file.is_file())
    assert snapshot.size_bytes <= written, "what a full disk is told is needed at least"
    other = on({}, DIVISIBLE["llama"], run__seed=3, **ORBAX)
    other.load(path)
    assert other.fingerprint() == moment


def test_every_file_is_in_the_manifest_and_every_damage_is_found(
    written: tuple[JaxEngine, Path], tmp_path: Path
) -> None:
    engine, _ = written
    path = saved(engine, tmp_path / "saved")
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and file.name != MANIFEST_NAME]
    listed = json.loads((path / MANIFEST_NAME).read_bytes())["files"]
    assert sorted(listed) == sorted(file.relative_to(path).as_posix() for file in files)
    assert sum(name.startswith(f"{FOLDER}/") for name in listed) >= 4
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        with pytest.raises(CheckpointError, match="does not match the hash"):
            verify_directory(path)
        file.unlink()
        with pytest.raises(CheckpointError, match="missing"):
            verify_directory(path)
        file.write_bytes(whole)
    verify_directory(path)


NO_ROOM = """
import resource, sys
from pathlib import Path

from backends.jax_engine.test_orbax import DIVISIBLE, ORBAX, on
from vorox.core.files.staged_directory import StagedDirectory
from vorox.training.checkpoints.store import write_state

engine = on({}, DIVISIBLE["gpt2"], **ORBAX)
snapshot = engine.snapshot(detached=True)
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
with StagedDirectory(Path(sys.argv[1])) as directory:
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        write_state(snapshot, directory)
    except OSError as error:
        print(error)
"""


@pytest.mark.slow
def test_no_room_is_said_as_such(tmp_path: Path) -> None:
    """A real limit on the size of files, below what the store needs.

    In a process of its own: writes that tensorstore still has under way complain after Orbax has closed its event loop.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", NO_ROOM, str(tmp_path / "saved")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert "File too large" in done.stdout, done.stderr[-3000:]
    assert not (tmp_path / "saved").exists()


def test_without_tensorstore_it_says_what_to_install(
    written: tuple[JaxEngine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, path = written
    monkeypatch.setitem(sys.modules, "tensorstore", None)
    with pytest.raises(CheckpointError) as refused:
        read_weights(path, engine._spec)
    assert refused.value.exit_code == 5
    assert "Orbax" in refused.value.what
    for remedy in (install_command("orbax"), "vorox export", "--from-weights"):
        assert remedy in refused.value.hint


def test_a_format_of_another_version_is_refused(written: tuple[JaxEngine, Path], tmp_path: Path) -> None:
    engine, _ = written
    path = saved(engine, tmp_path / "saved")
    body = json.loads((path / "engine.json").read_bytes())
    (path / "engine.json").write_text(json.dumps({**body, "arrays": "dcp"}))
    before = engine.fingerprint()
    with pytest.raises(CheckpointError, match="stored as dcp; this version reads safetensors and orbax"):
        engine.load(path)
    assert engine.fingerprint() == before


def test_another_model_is_refused_and_changes_nothing(written: tuple[JaxEngine, Path]) -> None:
    _, path = written
    for model, settings in (("llama", {}), ("qwen3", {"optimizer__name": "adamw"})):
        other = on({}, DIVISIBLE[model], **settings, **ORBAX)
        before = other.fingerprint()
        with pytest.raises(CheckpointError):
            other.load(path)
        assert other.fingerprint() == before


@pytest.mark.torch
def test_torch_reads_it(tmp_path: Path) -> None:
    """Weights and AdamW's state, by names alone; and what torch cannot write is refused when it is read."""
    from vorox import backends
    from vorox.core.config.checks.cross_checks import find_problems
    from vorox.core.ranks.distributed_context import DistributedContext

    engine = on(MESHES["fsdp 4"], DIVISIBLE["llama"], **ORBAX)
    losses(engine, 2)
    path = saved(engine, tmp_path / "saved")
    values = engine._config.model_dump(mode="json")
    values |= {"backend": "torch", "parallel": {}}
    refused = find_problems(RunConfig.model_validate(values))
    assert any(problem.keys == ("checkpoint.format", "backend") for problem in refused)
    values["checkpoint"] = {}
    other = backends.load("torch").create(RunConfig.model_validate(values), engine._spec, DistributedContext())
    other.import_weights(read_weights(path, engine._spec))
    for (name, left), (_, right) in zip(engine.export_weights(), other.export_weights(), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)
    other.load(path)
    assert other.fingerprint() == engine.fingerprint(), "parameters, moments and counters"


@pytest.mark.parametrize("mesh", ["fsdp", "data"])
def test_two_processes_write_one_state_together(mesh: str, tmp_path: Path) -> None:
    """2 processes x 2 devices: each writes what it alone has, one process with one device reads all of it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("two_processes.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(script), str(port)]
    processes = [
        subprocess.Popen(
            [*command, str(index), str(tmp_path), mesh], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env=environment,
        )
        for index in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    written, whole = zip(*(map(int, out.splitlines()[-1].split()) for out, _ in said), strict=True)
    assert sum(written) == whole[0] == whole[1], "every byte is written once"
    assert max(written) < 0.6 * whole[0] or mesh == "data", "each process writes what it alone has"
    verify_directory(tmp_path / "saved")
    alone = on({}, DIVISIBLE["qwen3"], optimizer__name="muon", run__seed=21)
    other = on({}, DIVISIBLE["qwen3"], optimizer__name="muon", run__seed=5)
    other.load(tmp_path / "saved")
    assert other.fingerprint() == alone.fingerprint()
    for (name, left), (_, right) in zip(alone.export_weights(), other.export_weights(), strict=True):
        np.testing.assert_array_equal(left, right, err_msg=name)
