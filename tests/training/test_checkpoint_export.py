"""Export: the files, the refusals, the crash states, and the check against transformers with a numpy engine.

The engine here is the reference decoder, so a wrong export cannot hide behind the engine that wrote the checkpoint.
"""

from __future__ import annotations

import errno
import json
import shutil
import socket
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crash_enumeration import crash_states, record
from reference_decoder import numpy_logits
from vorox.core.engine import Engine, NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.files import atomic
from vorox.core.files.atomic import FileOperation
from vorox.core.files.staged_directory import StagedDirectory, verify_directory
from vorox.core.run_layout import RunLayout
from vorox.core.schema.model import ModelConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers import loading as tokenizers
from vorox.models.arrays.weights_file import TensorEntry, WeightsFile, bfloat16_bits, bfloat16_values, write_weights
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.config import huggingface_config, huggingface_files
from vorox.models.huggingface.families import huggingface_family
from vorox.models.huggingface.weights import from_huggingface, huggingface_entries, to_huggingface
from vorox.training.export import gguf as gguf_export
from vorox.training.export.checkpoint import export
from vorox.training.origin import transformers_ids

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "intermediate_size": 48, "vocab_size": 300}
LLAMA = SIZES | {"num_kv_heads": 2, "tie_embeddings": False}
GPT2 = SIZES | {
    "positions": "learned", "norm": "layer_norm", "norm_bias": True, "activation": "gelu_tanh",
    "attention_bias": True, "mlp_bias": True,
}  # fmt: skip
QWEN3 = LLAMA | {"qk_norm": True, "head_dim": 16}
TOKENIZER = tokenizers.train(TokenizerConfig(kind="byte"), [])


def spec_of(fields: dict[str, Any]) -> DecoderSpec:
    return decoder_spec(ModelConfig(**fields), tokenizer_vocab_size=TOKENIZER.vocab_size, sequence_length_tokens=48)


def random_weights(spec: DecoderSpec, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        part.name: (
            generator.normal(0, 0.25, part.shape)
            if len(part.shape) == 2
            else generator.normal(0 if part.name.endswith("bias") else 1, 0.3, part.shape)
        ).astype(np.float32)
        for part in spec.parameters
    }


def make_run(
    directory: Path, spec: DecoderSpec, steps: Iterable[int] = (10,), tokenizer: tokenizers.Tokenizer = TOKENIZER
) -> Path:
    """A run whose checkpoints hold what the engine and the checkpointer write for a model with a family."""
    for step in steps:
        (directory / "checkpoints").mkdir(parents=True, exist_ok=True)
        with StagedDirectory(RunLayout(directory).checkpoint(step)) as staged:
            with staged.open("model.safetensors") as writer:
                if huggingface_family(spec):
                    weights = to_huggingface(spec, random_weights(spec, step).items())
                    write_weights(writer, huggingface_entries(spec), weights)
                else:
                    entries = [TensorEntry(part.name, "F32", part.shape) for part in spec.parameters]
                    write_weights(writer, entries, random_weights(spec, step).items())
            staged.write("optimizer.safetensors", b"moments")
            staged.write("state.json", b"{}")
            files = huggingface_files(spec, end_of_text_id=tokenizer.end_of_text_id) | tokenizer.files()
            for name, data in files.items():
                staged.write(name, data)
            staged.commit({"step": step, "spec": spec.to_json()})
    return directory


class DecoderEngine:
    """As much of an engine as the check uses."""

    def __init__(self, spec: DecoderSpec) -> None:
        self.spec, self.weights = spec, dict[str, np.ndarray]()

    def import_weights(self, weights: Iterable[NamedArray]) -> None:
        self.weights = dict(weights)

    def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
        return numpy_logits(self.spec, self.weights, tokens_BT).astype(np.float32)


def engine_of(spec: DecoderSpec) -> Engine:
    engine: Any = DecoderEngine(spec)
    return engine


def test_holds_what_transformers_needs_and_nothing_else(tmp_path: Path) -> None:
    spec = spec_of(LLAMA)
    run = make_run(tmp_path / "run", spec, steps=[10, 20])
    result = export(run, tmp_path / "out" / "hf")
    assert (result.step, result.existed, result.dtype, result.comparison) == (20, False, "fp32", None)
    assert result.num_parameters == spec.num_parameters
    names = sorted(path.name for path in result.path.iterdir())
    assert names == sorted(
        ["MANIFEST.json", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
         "tokenizer_config.json"]
    )  # fmt: skip
    assert result.size_bytes == sum((result.path / name).stat().st_size for name in names)
    verify_directory(result.path)
    weights = dict(from_huggingface(spec, WeightsFile(result.path / "model.safetensors")))
    assert all(np.array_equal(weights[name], array) for name, array in random_weights(spec, 20).items())
    assert json.loads((result.path / "config.json").read_text())["dtype"] == "float32"
    described = json.loads((result.path / "tokenizer_config.json").read_text())
    end = described["eos_token"]
    assert [described[f"{kind}_token"] for kind in ("bos", "pad", "unk")] == [end] * 3
    assert described["model_max_length"] == spec.max_positions_tokens


def test_one_checkpoint_can_be_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", spec_of(LLAMA), steps=[10, 20])
    assert export(RunLayout(run).checkpoint(10), tmp_path / "hf").step == 10


def test_twice_is_once_and_anything_else_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", spec_of(LLAMA), steps=[10, 20])
    target = tmp_path / "hf"
    target.mkdir()
    assert not export(run, target).existed
    before = {path: path.stat().st_mtime_ns for path in target.iterdir()}
    assert export(run, target).existed
    assert before == {path: path.stat().st_mtime_ns for path in target.iterdir()}
    other = make_run(tmp_path / "other", spec_of(LLAMA | {"norm_eps": 1e-3}), steps=[20])
    for source, dtype in [(RunLayout(run).checkpoint(10), "fp32"), (run, "bf16"), (other, "fp32")]:
        with pytest.raises(ConfigError, match="something other than this export") as caught:
            export(source, target, dtype=dtype)
        assert str(target) in caught.value.where
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="something other"):
        export(run, target)
    assert (target / "notes.txt").read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="something other"):
        export(run, tmp_path / "file")


def test_half_precision_is_rounded_to_nearest_even(tmp_path: Path) -> None:
    spec = spec_of(GPT2)
    run = make_run(tmp_path / "run", spec)
    weights = random_weights(spec, 10)
    for dtype, stored, loaded, rounded in [
        ("bf16", "BF16", "bfloat16", lambda array: bfloat16_values(bfloat16_bits(array))),
        ("fp16", "F16", "float16", lambda array: array.astype(np.float16).astype(np.float32)),
    ]:
        target = export(run, tmp_path / dtype, dtype=dtype).path
        file = WeightsFile(target / "model.safetensors")
        assert {entry.dtype for entry in file.entries.values()} == {stored}
        assert json.loads((target / "config.json").read_text())["dtype"] == loaded
        back = dict(from_huggingface(spec, file))
        assert all(np.array_equal(back[name], rounded(array)) for name, array in weights.items())
        assert any(not np.array_equal(back[name], array) for name, array in weights.items())


def test_an_architecture_that_transformers_lacks_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", spec_of(LLAMA | {"positions": "learned"}))
    with pytest.raises(ConfigError, match="no architecture that computes this model: positions = learned"):
        export(run, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()


def test_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for source in (tmp_path / "absent", tmp_path):
        with pytest.raises(ConfigError, match="neither a checkpoint nor a run"):
            export(source, tmp_path / "hf")
    run = make_run(tmp_path / "run", spec_of(LLAMA))
    path = RunLayout(run).checkpoint(10) / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="No checkpoint of this run is valid"):
        export(run, tmp_path / "hf")
    with pytest.raises(CheckpointError, match="does not match the hash"):
        export(RunLayout(run).checkpoint(10), tmp_path / "hf")


def test_a_missing_tokenizer_is_said(tmp_path: Path) -> None:
    with StagedDirectory(tmp_path / "checkpoint") as staged:
        staged.write("config.json", json.dumps(huggingface_config(spec_of(LLAMA), end_of_text_id=0)).encode())
        staged.write("model.safetensors", b"")
        staged.commit({"step": 3})
    with pytest.raises(CheckpointError, match=r"no generation_config.json"):
        export(tmp_path / "checkpoint", tmp_path / "hf")


def test_every_crash_leaves_no_export_or_the_whole_one(tmp_path: Path) -> None:
    here, before = tmp_path / "here", tmp_path / "before"
    run = make_run(here / "run", spec_of(SIZES | {"num_layers": 1, "hidden_size": 8}))
    shutil.copytree(here, before)
    operations = record(lambda: export(run, here / "hf"))
    seen = set[bool]()
    for number, (name, state) in enumerate(crash_states(before, here, operations, tmp_path / "scratch")):
        existed = (state / "hf").exists()
        seen.add(existed)
        if existed:
            verify_directory(state / "hf")
        if number % 7 == 0:
            assert export(state / "run", state / "hf").existed == existed, name
            verify_directory(state / "hf")
    assert seen == {True, False}


def test_a_full_disk_says_how_much_is_needed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", spec_of(LLAMA))

    def full(operation: FileOperation) -> None:
        if operation.kind == "write" and operation.path.name == "model.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")

    with atomic.observe(full), pytest.raises(CheckpointError, match=r"refused .* [\d,]+ are free") as caught:
        export(run, tmp_path / "new" / "folder" / "hf")
    assert caught.value.saved == "the checkpoint is unchanged"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# -- the check --------------------------------------------------------------------------------------------------------


@pytest.mark.hf
@pytest.mark.torch
@pytest.mark.parametrize("fields", [LLAMA, GPT2, QWEN3, LLAMA | {"activation": "geglu", "tie_embeddings": True}])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_the_check_agrees(tmp_path: Path, fields: dict[str, Any], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError(f"the network was asked: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    spec = spec_of(fields)
    run = make_run(tmp_path / "run", spec)
    for existed in (False, True):
        result = export(run, tmp_path / "hf", dtype=dtype, engine=engine_of(spec))
        assert result.existed == existed
        assert result.comparison is not None
        assert result.comparison.max_difference <= result.comparison.tolerance <= 3e-4
        assert (result.comparison.rounding_difference > 1e-4) == (dtype != "fp32")
        assert result.comparison.num_texts == len(transformers_ids.TEXTS)
        assert result.comparison.num_tokens > 100


@pytest.mark.hf
@pytest.mark.torch
def test_tokenizers_of_every_kind_agree(tmp_path: Path) -> None:
    spec = spec_of(LLAMA | {"vocab_size": 400})
    texts = ["the order of the data", "is arithmetic and the order", "of the arithmetic"] * 5
    for kind, size in [("bpe", 270), ("char", 257), ("byte", 257)]:
        tokenizer = tokenizers.train(TokenizerConfig(kind=kind, vocab_size=size), texts)
        run = make_run(tmp_path / kind, spec, tokenizer=tokenizer)
        result = export(run, tmp_path / f"{kind}-hf", engine=engine_of(spec), texts=["the order, in Größe: ά", "data"])
        assert result.comparison is not None
        assert result.comparison.num_texts == 2


@pytest.mark.hf
@pytest.mark.torch
def test_the_check_finds_what_is_wrong(tmp_path: Path) -> None:
    """Negative controls: each damage is small, loads without complaint, and must not pass; nothing may appear."""
    spec = spec_of(LLAMA)
    run = make_run(tmp_path / "run", spec)
    for changed, message in [
        (replace(spec, rope_theta=spec.rope_theta * 1.01), "differ from the engine's by"),
        (replace(spec, norm_eps=2e-3), "differ from the engine's by"),
        (replace(spec, activation="geglu"), "differ from the engine's by"),
    ]:
        with pytest.raises(CheckpointError, match=message):
            export(run, tmp_path / "hf", engine=engine_of(changed))

    class Forgetful(DecoderEngine):
        def import_weights(self, weights: Iterable[NamedArray]) -> None:
            first = not self.weights
            super().import_weights(weights)
            if first:
                self.weights["final_norm.weight"] = self.weights["final_norm.weight"] * np.float32(1.000001)

    forgetful: Any = Forgetful(spec)
    with pytest.raises(CheckpointError, match="differ from those of the checkpoint"):
        export(run, tmp_path / "hf", engine=forgetful)

    class Infinite(DecoderEngine):
        def logits(self, tokens_BT: np.ndarray) -> np.ndarray:
            return super().logits(tokens_BT) * np.float32(np.nan)

    infinite: Any = Infinite(spec)
    with pytest.raises(CheckpointError, match="differ from the engine's by nan"):
        export(run, tmp_path / "hf", dtype="bf16", engine=infinite)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.hf
@pytest.mark.torch
@pytest.mark.parametrize("outcome", ["unused tensor", "refusal"])
def test_what_transformers_says_while_loading_is_heard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str
) -> None:
    from transformers import AutoModelForCausalLM

    def load(*arguments: object, **keywords: object) -> Any:
        if outcome == "refusal":
            raise ValueError("I do not like this")
        return None, {"missing_keys": set(), "unexpected_keys": {"model.extra.weight"}}

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", load)
    spec = spec_of(LLAMA)
    with pytest.raises(CheckpointError, match=r"model\.extra\.weight|I do not like this"):
        export(make_run(tmp_path / "run", spec), tmp_path / "hf", engine=engine_of(spec))


QWEN2 = LLAMA | {"attention_bias": "qkv"}
HEAD_DIM = LLAMA | {"head_dim": 24}


@pytest.mark.hf
@pytest.mark.torch
@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        (LLAMA, "fp32"), (LLAMA, "bf16"), (HEAD_DIM | {"tie_embeddings": True}, "fp16"), (QWEN2, "fp32"),
        (QWEN3, "fp32"), (GPT2, "fp16"),
    ],
)  # fmt: skip
def test_gguf_is_the_same_model(tmp_path: Path, fields: dict[str, Any], dtype: Any) -> None:
    """The readers are the package's, and that of transformers, which undoes llama.cpp's order of rows by itself."""
    gguf, _ = pytest.importorskip("gguf"), pytest.importorskip("accelerate")
    spec = spec_of(fields)
    run = make_run(
        tmp_path / "run", spec, tokenizer=tokenizers.train(TokenizerConfig(kind="bpe", vocab_size=270), TEXTS)
    )
    for existed in (False, True):
        result = export(run, tmp_path / "gguf", to="gguf", dtype=dtype, engine=engine_of(spec))
        assert result.existed == existed
        assert result.comparison is not None
        assert result.comparison.max_difference <= result.comparison.tolerance <= 3e-4
        assert result.comparison.num_greedy_tokens == 16
    assert all(array.flags.writeable for _, array in gguf_export.read_gguf(result.path / "model.gguf", spec))
    reader = gguf.GGUFReader(result.path / "model.gguf")
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["blk.1.ffn_up.weight"] == {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}[dtype]
    assert kinds["output_norm.weight"] == "F32"
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == 300
    assert tokens[299] == "[PAD299]"
    assert tokens[reader.fields["tokenizer.ggml.eos_token_id"].contents()] == "<|endoftext|>"
    assert reader.fields["tokenizer.ggml.merges"].contents()


TEXTS = ["the order of the data", "is arithmetic and the order", "of the arithmetic"] * 5


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (LLAMA | {"sliding_window_tokens": 8}, "family is mistral"),
        (LLAMA | {"activation": "geglu"}, "model.activation is geglu"),
        (LLAMA | {"attention_bias": True}, "it has biases"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "model.rope_scaling is linear"),
        (QWEN3 | {"sliding_window_tokens": 8}, "model.sliding_window_tokens is set"),
    ],
)
def test_gguf_refuses_what_llama_cpp_computes_differently(tmp_path: Path, fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=f"GGUF cannot hold this model: .*{reason}"):
        export(make_run(tmp_path / "run", spec_of(fields)), tmp_path / "gguf", to="gguf")
    assert not (tmp_path / "gguf").exists()


def test_a_damaged_gguf_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gguf")
    spec = spec_of(LLAMA)
    run = make_run(tmp_path / "run", spec)
    written = gguf_export.stored_array

    def damaged(array: np.ndarray, entry: TensorEntry) -> np.ndarray:
        stored = written(array, entry).copy()
        if entry.name == "blk.1.attn_k.weight":
            stored[3, 5] += np.float32(1e-6)
        return stored

    with monkeypatch.context() as patch:
        patch.setattr(gguf_export, "stored_array", damaged)
        with pytest.raises(CheckpointError, match=r"Tensor blk\.1\.attn_k\.weight differs"):
            export(run, tmp_path / "gguf", to="gguf")
    with monkeypatch.context() as patch:
        keys = gguf_export.gguf_keys
        calls = iter([1.0, 1.01])
        patch.setattr(gguf_export, "gguf_keys", lambda spec: keys(spec) | {"llama.rope.freq_base": next(calls)})
        with pytest.raises(CheckpointError, match=r"key llama\.rope\.freq_base differs"):
            export(run, tmp_path / "gguf", to="gguf")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]
    export(run, tmp_path / "gguf", to="gguf")


def recommit(run: Path, name: str, old: bytes, new: bytes) -> None:
    """Change one file of a checkpoint and give it a valid manifest again."""
    path = RunLayout(run).checkpoint(10)
    contents = {file.name: file.read_bytes() for file in sorted(path.iterdir()) if file.name != atomic.MANIFEST_NAME}
    assert contents[name].count(old) == 1
    contents[name] = contents[name].replace(old, new)
    shutil.rmtree(path)
    with StagedDirectory(path) as staged:
        for file, content in contents.items():
            staged.write(file, content)
        staged.commit({"step": 10})


@pytest.mark.hf
@pytest.mark.torch
@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("config.json", b'"num_hidden_layers": 2', b'"num_hidden_layers": 3', "layers.2.* is missing"),
        ("config.json", b'"num_hidden_layers": 2', b'"num_hidden_layers": 1', "layers.1.* is not part of"),
        ("config.json", b'"hidden_act": "silu"', b'"hidden_act": "gelu"', "differ from the engine's"),
        ("config.json", b'"LlamaForCausalLM"', b'"LlamaForCausalLM", "X"', None),
    ],
)
def test_a_config_file_that_says_something_else_is_found(
    tmp_path: Path, name: str, old: bytes, new: bytes, message: str | None
) -> None:
    spec = spec_of(LLAMA)
    run = make_run(tmp_path / "run", spec)
    recommit(run, name, old, new)
    if message is None:
        assert export(run, tmp_path / "hf", engine=engine_of(spec)).comparison is not None
        return
    with pytest.raises(CheckpointError, match=message):
        export(run, tmp_path / "hf", engine=engine_of(spec))
    assert not (tmp_path / "hf").exists()


@pytest.mark.hf
@pytest.mark.torch
def test_a_tokenizer_that_transformers_reads_differently_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(LLAMA)
    run = make_run(tmp_path / "run", spec)
    other = tokenizers.train(TokenizerConfig(kind="bpe", vocab_size=258), ["export export"])
    monkeypatch.setattr(tokenizers, "load", lambda directory: other)
    with pytest.raises(CheckpointError, match="End-of-text id of transformers is 256, expected 0"):
        export(run, tmp_path / "hf", engine=engine_of(spec))
    monkeypatch.setattr(other, "end_of_text_id", TOKENIZER.end_of_text_id)
    with pytest.raises(CheckpointError, match="returns other ids for 'export'"):
        export(run, tmp_path / "hf", engine=engine_of(spec), texts=["export"])
