"""Sharded checkpoints on disk: written by threads as ranks, read in slices, and refused where anything is wrong.

The oracles are the arrays in memory and the official safetensors library.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from rank_threads import together
from small_configurations import GPT2, VOCAB
from vorox.core.errors import CheckpointError
from vorox.core.files.staged_directory import FileEntry, StagedDirectory, StagedPart, verify_directory
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.schema.model import ModelConfig
from vorox.models.arrays.sharded_arrays import ShardedArrays
from vorox.models.decoder.spec import decoder_spec
from vorox.models.stored import engine_state
from vorox.models.stored.engine_state import EngineState
from vorox.models.stored.sharded_snapshot import ShardedSnapshot, ShardRows
from vorox.training.checkpoints.store import write_shards, write_state

Arrays = dict[str, np.ndarray]
SPEC = decoder_spec(
    ModelConfig.model_validate({**GPT2, "num_layers": 1, "hidden_size": 40, "num_heads": 4}),
    tokenizer_vocab_size=VOCAB,
    sequence_length_tokens=24,
)
COUNTERS = {"updates": 3.0}


def random_state() -> Arrays:
    """Weights of all parameters, and one moment of those whose weights decay."""
    random = np.random.Generator(np.random.Philox(key=11))
    names = [f"weights.{row.name}" for row in SPEC.parameters] + [f"exp_avg.{name}" for name in moment_names()]
    shapes = {row.name: row.shape for row in SPEC.parameters}
    return {name: random.normal(size=shapes[name.partition(".")[2]]).astype(np.float32) for name in names}


def moment_names() -> tuple[str, ...]:
    return tuple(row.name for row in SPEC.parameters if row.decay)


def bounds(num_rows: int, index: int, count: int) -> tuple[int, int]:
    """Rows of a shard as ``torch.chunk`` divides them; the last shards may have none."""
    share = -(-num_rows // count)
    return min(share * index, num_rows), min(share * (index + 1), num_rows)


def snapshot(state: Arrays, index: int, count: int, *, is_holder: bool = True) -> ShardedSnapshot:
    rows: list[ShardRows] = []
    for name, array in state.items():
        first, end = bounds(len(array), index, count)
        if first < end and is_holder:
            rows.append(ShardRows(name, first, array[first:end].shape, partial(array.__getitem__, slice(first, end))))
    return ShardedSnapshot(SPEC, (index, count), rows, {"exp_avg": moment_names()}, COUNTERS)


def write(
    state: Arrays, target: Path, count: int, *, replicas: int = 1, spoil: Callable[[Path], None] | None = None
) -> tuple[Path, str]:
    """Write a checkpoint with ``count`` shards per replica; return it with its fingerprint."""

    def program(dist: DistributedContext) -> str:
        replica, index = divmod(dist.rank, count)
        ours = snapshot(state, index, count, is_holder=replica == 0)
        with dist.propagating_failure():
            if not dist.is_main:
                write_shards(ours, dist)
                return ""
            with StagedDirectory(target) as directory:
                fingerprint = write_state(ours, directory, dist)
                if spoil is not None:
                    spoil(directory.path)
                directory.commit({})
            return fingerprint

    results, _ = together(count * replicas, program)
    errors = [found for found in results if isinstance(found, Exception)]
    if errors:
        raise errors[0]
    return target, results[0]


@pytest.fixture(scope="module")
def state() -> Arrays:
    return random_state()


@pytest.fixture
def checkpoint(state: Arrays, tmp_path: Path) -> Path:
    return write(state, tmp_path / "step", 3)[0]


@pytest.mark.parametrize(("count", "replicas"), [(1, 1), (2, 1), (3, 1), (2, 2), (7, 1)])
def test_what_ranks_write_is_what_any_layout_reads(state: Arrays, tmp_path: Path, count: int, replicas: int) -> None:
    path, fingerprint = write(state, tmp_path / "step", count, replicas=replicas)
    verify_directory(path)
    shards = sorted(path.glob("shard-*.safetensors"))
    assert len(shards) == count, "replicas write nothing"
    theirs = [load_file(shard) for shard in shards]
    stored = ShardedArrays(path)
    for name, array in state.items():
        np.testing.assert_array_equal(np.concatenate([one[name] for one in theirs if name in one]), array)
        np.testing.assert_array_equal(stored.read(name), array)
        for index in range(5):
            first, end = bounds(len(array), index, 5)
            np.testing.assert_array_equal(stored.read(name, (slice(first, end),)), array[first:end])
        if array.ndim == 2:
            np.testing.assert_array_equal(stored.read(name, (slice(None), slice(3, 7))), array[:, 3:7])
    whole = EngineState(
        weights=lambda: ((name[8:], array) for name, array in state.items() if name.startswith("weights.")),
        moments={"exp_avg": lambda: ((name, state[f"exp_avg.{name}"]) for name in moment_names())},
        moment_names={"exp_avg": moment_names()}, counters=COUNTERS,
    )  # fmt: skip
    assert fingerprint == engine_state.state_fingerprint(whole)
    for name, array in engine_state.read_weights(path, SPEC):
        np.testing.assert_array_equal(array, state[f"weights.{name}"])
    loaded = engine_state.load(path, SPEC, whole)
    assert {f"{kind}.{name}" for kind, name, _ in loaded.moments} == {f"exp_avg.{name}" for name in moment_names()}
    assert loaded.counters == COUNTERS


def test_a_slice_is_read_without_the_rest(state: Arrays, checkpoint: Path) -> None:
    name = max(state, key=lambda one: len(state[one]))
    first, end = bounds(len(state[name]), 1, 3)
    for shard in ("shard-00001-of-00003.safetensors", "shard-00003-of-00003.safetensors"):
        (checkpoint / shard).unlink()
    np.testing.assert_array_equal(ShardedArrays(checkpoint).read(name, (slice(first, end),)), state[name][first:end])
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00003"):
        ShardedArrays(checkpoint).read(name)


def test_a_number_that_is_not_finite_is_named(state: Arrays) -> None:
    name = "exp_avg." + moment_names()[-1]
    broken = {
        **state,
        name: np.where(np.arange(len(state[name]))[:, None] == len(state[name]) - 1, np.nan, state[name]),
    }
    assert [snapshot(broken, index, 2).nonfinite_array() for index in range(2)] == ["", name]


@pytest.mark.parametrize("damage", ["missing", "truncated", "stale", "exchanged", "extra"])
def test_a_damaged_shard_is_named(state: Arrays, checkpoint: Path, tmp_path: Path, damage: str) -> None:
    shard, other = (checkpoint / f"shard-0000{number}-of-00003.safetensors" for number in (2, 1))
    if damage == "missing":
        shard.unlink()
    elif damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-4])
    elif damage == "stale":
        newer, _ = write({name: array + 1 for name, array in state.items()}, tmp_path / "newer", 3)
        shard.write_bytes((newer / shard.name).read_bytes())
    elif damage == "exchanged":
        ours, theirs = shard.read_bytes(), other.read_bytes()
        shard.write_bytes(theirs)
        other.write_bytes(ours)
        shard = other  # the first file that is compared
    else:
        shard = checkpoint / "shard-00004-of-00003.safetensors"
        shard.write_bytes(other.read_bytes())
    with pytest.raises(CheckpointError) as found:
        verify_directory(checkpoint)
    assert found.value.where == str(shard)


def test_a_file_that_no_rank_reported_prevents_the_commit(state: Arrays, tmp_path: Path) -> None:
    def spoil(directory: Path) -> None:
        (directory / "shard-00009-of-00009.safetensors").write_bytes(b"left over")

    with pytest.raises(CheckpointError, match="not written by this save") as found:
        write(state, tmp_path / "step", 2, spoil=spoil)
    assert found.value.where.endswith("shard-00009-of-00009.safetensors")
    assert not (tmp_path / "step").exists()


def test_a_file_of_another_rank_must_be_here_as_written(tmp_path: Path) -> None:
    with StagedDirectory(tmp_path / "step") as directory:
        with pytest.raises(CheckpointError, match="not visible to rank 0"):
            directory.add("shard", FileEntry(5, "0" * 32))
        StagedPart(directory.path).write("shard", b"1234")
        with pytest.raises(CheckpointError, match="has 4 bytes here; that rank wrote 5"):
            directory.add("shard", FileEntry(5, "0" * 32))
        directory.add("shard", FileEntry(4, "0" * 32))
        with pytest.raises(CheckpointError, match="Two ranks"):
            directory.add("shard", FileEntry(4, "0" * 32))


def test_rows_that_no_rank_holds_prevent_the_commit(state: Arrays, tmp_path: Path) -> None:
    """Rank 1 of 2 writes nothing."""
    ours = snapshot(state, 0, 2)
    with (
        StagedDirectory(tmp_path / "step") as directory,
        pytest.raises(CheckpointError, match=r"The shards hold \d+ of"),
    ):
        write_state(ours, directory)
    with StagedDirectory(tmp_path / "step") as directory:
        part = ours.write_part(directory)
        with pytest.raises(CheckpointError, match="do not follow each other"):
            ours.write_metadata(directory, [part, part])


def read_all(checkpoint: Path) -> None:
    stored = ShardedArrays(checkpoint)
    for name in random_state():
        stored.read(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: body.update(format="vorox-shards/9"), "format vorox-shards/9"),
        (lambda body: body.pop("arrays"), "not valid"),
        (lambda body: next(iter(body["arrays"].values()))["slices"].pop(), "hold"),
        (lambda body: next(iter(body["arrays"].values()))["slices"][0].__setitem__(0, "../x"), "not valid"),
        (lambda body: body["arrays"].popitem(), "is missing"),
        (lambda body: next(iter(body["arrays"].values())).update(shape=[10**6, 2]), "of 1,000,000 rows"),
    ],
)
def test_an_index_that_is_wrong_is_refused(
    checkpoint: Path, change: Callable[[dict[str, object]], object], message: str
) -> None:
    path = checkpoint / "shards.json"
    body = json.loads(path.read_bytes())
    change(body)
    path.write_text(json.dumps(body))
    with pytest.raises(CheckpointError, match=message):
        read_all(checkpoint)
