"""Safetensors: our files under the official library, its files under our reader, and everything broken refused."""

from __future__ import annotations

import io
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load, load_file, save_file

from vorox.core.errors import CheckpointError
from vorox.core.files.staged_directory import StagedDirectory, verify_directory
from vorox.models.arrays import weights_file
from vorox.models.arrays.weights_file import (
    TensorEntry,
    WeightsFile,
    bfloat16_bits,
    bfloat16_values,
    entry_of,
    open_directory,
    write_weights,
)

DTYPES = ["f8", "i8", "u8", "f4", "i4", "u4", "f2", "i2", "u2", "i1", "u1", "?"]


def random_array(generator: np.random.Generator, kind: str, shape: tuple[int, ...]) -> np.ndarray:
    raw = generator.integers(0, 256, size=(*shape, np.dtype(kind).itemsize), dtype=np.uint8)
    if kind == "?":
        return (raw[..., 0] & 1).astype(bool)
    array = raw.reshape(-1).view(kind).reshape(shape)
    return np.nan_to_num(array) if array.dtype.kind == "f" else array


def written(arrays: dict[str, np.ndarray]) -> bytes:
    sink = io.BytesIO()
    write_weights(sink, [entry_of(name, array) for name, array in arrays.items()], arrays.items())
    return sink.getvalue()


def sample(shape: tuple[int, ...] = (5, 3)) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(7)
    arrays = {f"tensor.{kind}": random_array(generator, kind, shape) for kind in DTYPES}
    return arrays | {"empty": np.zeros((0, 4), bool), "scalar": np.array(3, np.uint8)}


def same(first: np.ndarray, second: np.ndarray) -> bool:
    return first.shape == second.shape and first.dtype == second.dtype and first.tobytes() == second.tobytes()


def broken(tmp_path: Path, header: dict[str, Any] | bytes, data: bytes = bytes(8)) -> WeightsFile:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "broken.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return WeightsFile(path)


def test_the_official_library_reads_our_files() -> None:
    arrays = sample()
    loaded = load(written(arrays))
    assert loaded.keys() == arrays.keys()
    for name, array in arrays.items():
        assert same(loaded[name], array), name


def test_we_read_files_of_the_official_library(tmp_path: Path) -> None:
    arrays = sample()
    save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "np", "note": "grüße"})
    file = WeightsFile(tmp_path / "model.safetensors")
    assert file.metadata == {"format": "np", "note": "grüße"}
    assert {name for name, _ in file} == arrays.keys()
    for name, array in file:
        expected = arrays[name].astype(np.float32) if arrays[name].dtype == np.float16 else arrays[name]
        assert same(array, expected), name
        assert same(file.read(name), expected), name


def test_layout_is_the_official_one(tmp_path: Path) -> None:
    """Given the library's own order (wide types first, then by name), not one byte of our file differs."""
    arrays = sample()
    save_file(arrays, tmp_path / "official", metadata={"format": "pt"})
    official = (tmp_path / "official").read_bytes()
    (length,) = struct.unpack("<Q", official[:8])
    order = [name for name in json.loads(official[8 : 8 + length]) if name != "__metadata__"]
    assert written({name: arrays[name] for name in order}) == official


def test_streams_through_a_committed_directory(tmp_path: Path) -> None:
    arrays = sample((300, 40))
    produced: list[str] = []

    def stream() -> Any:
        for name, array in arrays.items():
            produced.append(name)
            yield name, array

    with StagedDirectory(tmp_path / "saved") as directory:
        with directory.open("model.safetensors") as writer:
            write_weights(writer, [entry_of(name, array) for name, array in arrays.items()], stream())
        directory.commit({})
    verify_directory(tmp_path / "saved")
    loaded = load_file(tmp_path / "saved" / "model.safetensors")
    assert produced == list(arrays)
    assert all(same(loaded[name], array) for name, array in arrays.items())
    with safe_open(tmp_path / "saved" / "model.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt"}


def test_large_tensors_go_and_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_file, "PIECE_BYTES", 7)
    sizes: list[int] = []

    class Sink(io.BytesIO):
        def write(self, data: Any, /) -> int:
            sizes.append(len(data))
            return super().write(data)

    sink, array = Sink(), np.arange(33, dtype=np.float32).reshape(3, 11)
    write_weights(sink, [entry_of("a", array)], [("a", array)])
    assert max(sizes[1:]) <= 7
    (tmp_path / "a").write_bytes(sink.getvalue())
    assert same(WeightsFile(tmp_path / "a").read("a"), array)


def test_transposed_and_big_endian_arrays_are_stored_by_value(tmp_path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    loaded = load(written({"transposed": array.T, "big": array.astype(">f4"), "strided": array[:, ::2]}))
    assert same(loaded["transposed"], np.ascontiguousarray(array.T))
    assert same(loaded["big"], array)
    assert same(loaded["strided"], np.ascontiguousarray(array[:, ::2]))


@pytest.mark.torch
def test_bfloat16_rounds_as_torch_does(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load as load_torch
    from safetensors.torch import save_file as save_torch

    generator = np.random.default_rng(3)
    bits = generator.integers(0, 2**32, size=200_000, dtype=np.uint32)
    ties = (generator.integers(0, 2**16, size=2_000, dtype=np.uint32) << 16) | 0x8000
    special = np.array([0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 1, 0x7F800001, 0x7FC00000], np.uint32)
    array = np.concatenate([bits, ties, special]).view(np.float32)
    expected = torch.from_numpy(array.copy()).to(torch.bfloat16)
    ours = bfloat16_bits(array)
    number = ~np.isnan(array)
    assert np.array_equal(ours[number], expected.view(torch.uint16).numpy()[number])
    assert np.isnan(bfloat16_values(ours)[~number]).all()
    assert np.array_equal(bfloat16_values(ours)[number], expected.float().numpy()[number])

    finite = array[np.isfinite(array)][:1000].reshape(10, 100)
    sink = io.BytesIO()
    write_weights(sink, [TensorEntry("w", "BF16", (10, 100))], [("w", finite)])
    loaded = load_torch(sink.getvalue())["w"]
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded, torch.from_numpy(finite.copy()).to(torch.bfloat16))

    save_torch({"w": expected, "half": torch.arange(7).half() / 3}, tmp_path / "torch")
    file = WeightsFile(tmp_path / "torch")
    assert np.array_equal(file.read("w")[number], expected.float().numpy()[number])
    assert same(file.read("half"), (torch.arange(7).half() / 3).float().numpy())


def test_half_precision_refuses_what_it_cannot_hold() -> None:
    entry = TensorEntry("blocks.0.weight", "F16", (2,))
    sink = io.BytesIO()
    write_weights(sink, [entry], [("blocks.0.weight", np.array([65504.0, 1 / 3], np.float32))])
    assert load(sink.getvalue())["blocks.0.weight"].tolist() == [65504.0, float(np.float16(1 / 3))]
    with pytest.raises(CheckpointError, match=r"blocks.0.weight.*65,504"):
        write_weights(io.BytesIO(), [entry], [("blocks.0.weight", np.array([7e4, 0], np.float32))])


def test_the_writer_holds_the_caller_to_the_declaration() -> None:
    one = np.zeros(2, np.float32)
    entries = [TensorEntry("a", "F32", (2,)), TensorEntry("b", "F32", (2,))]
    for arrays, message in [
        ([("a", one)], "b was declared but not given"),
        ([("b", one), ("a", one)], "Got tensor b, but a was declared"),
        ([("a", one), ("b", one), ("c", one)], "Got tensor c, but no further tensor was declared"),
        ([("a", np.zeros(3, np.float32)), ("b", one)], "shape"),
        ([("a", one.astype(np.int32)), ("b", one)], "dtype int32"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            write_weights(io.BytesIO(), entries, arrays)
    with pytest.raises(CheckpointError, match="declared twice"):
        write_weights(io.BytesIO(), [entries[0], entries[0]], [])
    with pytest.raises(CheckpointError, match="misaligned"):
        write_weights(io.BytesIO(), [TensorEntry("a", "U8", (1,)), TensorEntry("b", "F32", (1,))], [])


GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b'{"a":' + json.dumps(GOOD).encode() + b',"a":' + json.dumps(GOOD).encode() + b"}", "'a' appears twice"),
        (b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}', "'dtype' appears twice"),
        ({"a": {**GOOD, "shape": [3]}}, "needs 12"),
        ({"a": {**GOOD, "shape": [-2]}}, "non-negative integer"),
        ({"a": {**GOOD, "shape": [2.0]}}, "non-negative integer"),
        ({"a": {**GOOD, "shape": [True, 2]}}, "non-negative integer"),
        ({"a": {**GOOD, "data_offsets": [8, 0]}}, "has -8 bytes"),
        ({"a": {**GOOD, "data_offsets": [4, 12]}}, "starts at 4"),
        ({"a": {**GOOD, "data_offsets": [0]}}, "not described"),
        ({"a": {**GOOD, "dtype": "F8_E4M3"}}, "type F8_E4M3"),
        ({"a": {**GOOD, "more": 1}}, "not described"),
        ({"a": GOOD, "b": GOOD}, "starts at 0"),
        ({"a": {**GOOD, "shape": [1], "data_offsets": [0, 4]}}, "the file has"),
        ({"a": {**GOOD, "shape": [4], "data_offsets": [0, 16]}}, "the file has"),
        ({"a": {**GOOD, "shape": [2**62, 2**62]}}, "no array can have"),
        ({"a": {**GOOD, "shape": [0, 2**62], "data_offsets": [0, 0]}}, "no array can have"),
        ({"a": {**GOOD, "shape": [1] * 1000}}, "no array can have"),
        ({"__metadata__": {"epoch": 1}, "a": GOOD}, "__metadata__"),
        ({"__metadata__": ["x"], "a": GOOD}, "__metadata__"),
        ({"a": [1, 2]}, "not described"),
        (b'["a"]', "begin with"),
        (b" {}", "begin with"),
        (b'{"a":', "not JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"\xff": 1}', "not JSON"),
        (b'{"a":' * 100_000, "not JSON"),
    ],
)
def test_a_broken_header_is_refused(tmp_path: Path, header: dict[str, Any] | bytes, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        broken(tmp_path, header)
    assert "broken.safetensors" in caught.value.where
    assert caught.value.exit_code == 5


def test_many_names_with_a_duplicate_are_refused_at_once(tmp_path: Path) -> None:
    empty = json.dumps({"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})
    names = [f'"t{index}":{empty}' for index in range(200_000)]
    started = time.perf_counter()
    with pytest.raises(CheckpointError, match="'t7' appears twice"):
        broken(tmp_path, ("{" + ",".join([*names, names[7]]) + "}").encode())
    assert time.perf_counter() - started < 20.0, "quadratic in the names, it took minutes"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs of POSIX")
def test_a_fifo_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        open_directory(tmp_path)


def test_header_bounds(tmp_path: Path) -> None:
    path = tmp_path / "short"
    for content, message in [
        (b"", "only 0 bytes"),
        (b"\x01\x02", "only 2 bytes"),
        (struct.pack("<Q", 2**63), "claims"),
        (struct.pack("<Q", 100) + b"{}", "claims 100 bytes"),
    ]:
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=message):
            WeightsFile(path)
    with pytest.raises(CheckpointError, match="Cannot read"):
        WeightsFile(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="Cannot read"):
        WeightsFile(tmp_path)


def test_a_header_beyond_the_official_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model"
    path.write_bytes(written({"a": np.ones(2, np.float32)}))
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    monkeypatch.setattr(weights_file, "HEADER_LIMIT_BYTES", length)
    WeightsFile(path)
    monkeypatch.setattr(weights_file, "HEADER_LIMIT_BYTES", length - 1)
    with pytest.raises(CheckpointError, match="claims"):
        WeightsFile(path)


def test_a_boolean_is_true_or_false(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(written({"a": np.ones(2, bool)})[:-1] + b"\x02")
    with pytest.raises(CheckpointError, match="neither true nor false"):
        WeightsFile(path).read("a")


def test_a_file_that_shrinks_after_opening_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model"
    path.write_bytes(written({"a": np.ones(100, np.float32)}))
    file = WeightsFile(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="ends inside tensor a"):
        file.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match="Cannot read"):
        list(file)


@settings(max_examples=300, deadline=None, database=None)
@given(data=st.data())
def test_what_we_accept_the_official_library_reads_equally(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any damaged file is refused by us, or read by the library with the same content. Nothing else is ever raised."""
    raw = bytearray(written({"a": np.arange(3, dtype=np.float32), "b": np.ones((2, 2), np.uint8)}))
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
        place = data.draw(st.integers(0, len(raw) - 1))
        if kind == "flip":
            raw[place] ^= data.draw(st.integers(1, 255))
        elif kind == "cut" and len(raw) > 1:
            del raw[place : place + data.draw(st.integers(1, 9))]
        else:
            raw[place:place] = data.draw(st.binary(min_size=1, max_size=4))
        if not raw:
            return
    path = tmp_path_factory.mktemp("fuzz") / "file"
    path.write_bytes(raw)
    try:
        ours = dict(WeightsFile(path))
    except CheckpointError:
        return
    try:
        official = load_file(path)
    except SafetensorError as error:
        pytest.fail(f"we accept what the library refuses: {error}")
    assert ours.keys() == official.keys()
    for name, array in official.items():
        assert same(ours[name], array.astype(np.float32) if array.dtype == np.float16 else array), name


def test_entries_are_compared_by_name_shape_and_type(tmp_path: Path) -> None:
    arrays = {"a": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32)}
    (tmp_path / "model").write_bytes(written(arrays))
    file = WeightsFile(tmp_path / "model")
    right = [TensorEntry("b", "F32", (4,)), TensorEntry("a", "F32", (2, 3))]
    file.check_entries(right)
    for wrong, message in [
        ([right[0]], "a is not part"),
        ([*right, TensorEntry("c", "F32", ())], "c is missing"),
        ([right[0], TensorEntry("a", "F32", (3, 2))], r"a is F32 \(2, 3\); expected F32 \(3, 2\)"),
        ([right[0], TensorEntry("a", "F16", (2, 3))], "expected F16"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            file.check_entries(wrong)
    with pytest.raises(CheckpointError, match="c is missing"):
        file.read("c")


def test_shards_are_found_through_their_index(tmp_path: Path) -> None:
    arrays = {"a": np.zeros(3, np.float32), "b": np.ones(2, np.float32)}
    for name, array in arrays.items():
        (tmp_path / f"{name}.safetensors").write_bytes(written({name: array}))
    index = tmp_path / "model.safetensors.index.json"
    with pytest.raises(CheckpointError, match="no index"):
        open_directory(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickles are never loaded"):
        open_directory(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert {name for file in open_directory(tmp_path) for name in file.entries} == {"a", "b"}
    for weight_map, message in [
        ({"a": "a.safetensors"}, None),
        ({"a": "a.safetensors", "b": "a.safetensors"}, "disagree about tensor b"),
        ({"a": "../a.safetensors"}, "outside"),
        ({"a": "gone.safetensors"}, "Cannot read"),
        (["a"], "not valid"),
    ]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        if message is None:
            assert [list(file.entries) for file in open_directory(tmp_path)] == [["a"]]
            continue
        with pytest.raises(CheckpointError, match=message):
            open_directory(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(written(arrays))
    assert [file.path.name for file in open_directory(tmp_path)] == ["model.safetensors"]
