"""Write a model with its tokenizer as a GGUF file, and read it back to check it.

In: canonical parameters and a tokenizer. Out: one ``.gguf`` file, written with the package ``gguf``. Vectors and
position embeddings are stored in fp32, which llama.cpp requires; matrices in the requested type. A byte-level BPE with
a pattern that llama.cpp knows is stored for llama.cpp; any other tokenizer only as its ``tokenizer.json``, and the file
is then one that maps ids to ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vorox.core.engine import NamedArray
from vorox.core.errors import CheckpointError, ConfigError
from vorox.core.platform.installation import install_command
from vorox.data.tokenizers.tokenizer import TOKENIZER_NAME, Tokenizer
from vorox.data.tokenizers.tokenizer_json import is_byte_level
from vorox.data.tokenizers.word_pattern import GPT2_PATTERN
from vorox.models.arrays.weights_file import TensorEntry, stored_array
from vorox.models.decoder.spec import DecoderSpec
from vorox.models.huggingface.gguf_tensors import GgufTensor, from_gguf, gguf_keys, gguf_tensors, require_gguf, to_gguf

GGUF_NAME = "model.gguf"
TOKENIZER_MODEL = "tokenizer.ggml.model"
_FILE_TYPES = {"F32": "ALL_F32", "F16": "MOSTLY_F16", "BF16": "MOSTLY_BF16"}
_NORMAL, _CONTROL, _UNUSED = 1, 3, 5

Keys = dict[str, Any]
Stored = Literal["F32", "F16", "BF16"]


def import_gguf() -> Any:
    """Return the package ``gguf``.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(
            "Export to GGUF needs the package gguf", where="--to gguf", hint=install_command("gguf")
        ) from error
    return gguf


def write_gguf(
    path: Path, spec: DecoderSpec, weights: Iterable[NamedArray], tokenizer: Tokenizer, *, stored: Stored, name: str
) -> None:
    """Write a file.

    Args:
        path: The file.
        spec: The model.
        weights: Its canonical parameters, in table order.
        tokenizer: Its tokenizer.
        stored: Type of the matrices.
        name: Shown by programs that load it.

    Raises:
        ConfigError: GGUF cannot hold the model, or the package is not installed.
        CheckpointError: A parameter is missing, or a value overflows fp16.
    """
    gguf = import_gguf()
    writer = gguf.GGUFWriter(path, require_gguf(spec))
    for key, value in metadata(spec, tokenizer, stored=stored, name=name).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        else:
            {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](key, value)
    entries = {tensor.name: _entry(tensor, stored) for tensor in gguf_tensors(spec)}
    for tensor in entries.values():
        kind = gguf.GGMLQuantizationType[tensor.dtype]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), tensor.size_bytes, raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor_name, array in to_gguf(spec, weights):
            writer.write_tensor_data(stored_array(array, entries[tensor_name]))
    finally:
        writer.close()


def _entry(tensor: GgufTensor, stored: Stored) -> TensorEntry:
    is_small = len(tensor.shape) == 1 or tensor.name.startswith("position_embd")
    return TensorEntry(tensor.name, "F32" if is_small else stored, tensor.shape)


def metadata(spec: DecoderSpec, tokenizer: Tokenizer, *, stored: Stored, name: str) -> Keys:
    """Return all metadata of a file but the architecture, which the package writes."""
    file_type = int(import_gguf().LlamaFileType[_FILE_TYPES[stored]])
    described: Keys = {"general.name": name, "general.file_type": file_type}
    return described | gguf_keys(spec) | _tokenizer_keys(tokenizer, spec.vocab_size)


def _tokenizer_keys(tokenizer: Tokenizer, vocab_size: int) -> Keys:
    text = tokenizer.files().get(TOKENIZER_NAME)
    if text is None:  # a run on token ids
        return {TOKENIZER_MODEL: "no_vocab"}
    value: dict[str, Any] = json.loads(text)
    keys: Keys = {TOKENIZER_MODEL: "no_vocab", "tokenizer.huggingface.json": text.decode("utf-8")}
    if not _is_gpt2(value):
        return keys
    special = {token["id"]: token["content"] for token in value["added_tokens"]}
    tokens = {index: token for token, index in value["model"]["vocab"].items()} | special
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in value["model"]["merges"]]
    return keys | {
        TOKENIZER_MODEL: "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": [tokens.get(index, f"[PAD{index}]") for index in range(vocab_size)],
        "tokenizer.ggml.token_type": [
            _CONTROL if index in special else _NORMAL if index in tokens else _UNUSED for index in range(vocab_size)
        ],
        "tokenizer.ggml.merges": merges,
        **_special_keys(tokenizer),
    }


def _special_keys(tokenizer: Tokenizer) -> Keys:
    """Return which tokens llama.cpp adds to a text, where it stops, and the chat template.

    llama.cpp stops at ``eos_token_id`` and ``eot_token_id``, and at tokens that it knows by name.
    """
    ids = tokenizer.special_ids()
    keys: Keys = {
        "tokenizer.ggml.eos_token_id": tokenizer.end_of_text_id,
        "tokenizer.ggml.add_bos_token": bool(tokenizer.start_ids),
    }
    for name, key in (("bos_token_id", "bos_token_id"), ("pad_token_id", "padding_token_id")):
        if name in ids:
            keys[f"tokenizer.ggml.{key}"] = ids[name]
    turn_ends = [token for token in tokenizer.turn_end_ids if token != tokenizer.end_of_text_id]
    if turn_ends:
        keys["tokenizer.ggml.eot_token_id"] = turn_ends[0]
    if tokenizer.chat_template is not None:
        keys["tokenizer.chat_template"] = tokenizer.chat_template.source
    return keys


def _is_gpt2(value: dict[str, Any]) -> bool:
    """Whether llama.cpp's GPT-2 tokenizer gives the same ids: bytes, GPT-2's pattern, and at least one merge."""
    if not is_byte_level(value) or not value["model"]["merges"] or value["model"].get("ignore_merges"):
        return False
    *splits, last = value["pre_tokenizer"].get("pretokenizers") or [value["pre_tokenizer"]]
    patterns = [split.get("pattern", {}).get("Regex") for split in splits]
    return patterns == ([] if last.get("use_regex", True) else [GPT2_PATTERN])


def read_gguf(path: Path, spec: DecoderSpec) -> Iterator[NamedArray]:
    """Yield the canonical parameters of a file, in fp32.

    Raises:
        CheckpointError: A tensor is missing or does not belong to the model.
    """
    gguf = import_gguf()
    tensors = gguf.GGUFReader(path).tensors
    return from_gguf(spec, ((tensor.name, _dequantized(gguf, tensor)) for tensor in tensors))


def stores_tokenizer(path: Path) -> bool:
    """Return whether llama.cpp can encode text with a file."""
    return import_gguf().GGUFReader(path).fields[TOKENIZER_MODEL].contents() != "no_vocab"


def stores_only_fp32(path: Path) -> bool:
    """Return whether a file stores all tensors in fp32."""
    gguf = import_gguf()
    return all(tensor.tensor_type == gguf.GGMLQuantizationType.F32 for tensor in gguf.GGUFReader(path).tensors)


def _dequantized(gguf: Any, tensor: Any) -> npt.NDArray[np.float32]:
    values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)  # a copy: the file is read-only
    return values.reshape(tuple(int(size) for size in reversed(tensor.shape)))


def check_gguf(
    path: Path, spec: DecoderSpec, weights: Iterable[NamedArray], tokenizer: Tokenizer, *, stored: Stored, name: str
) -> None:
    """Compare a file, as the package reads it, with what was to be written; arguments as of ``write_gguf``.

    Raises:
        CheckpointError: A metadata key or an element of a tensor differs.
    """
    gguf = import_gguf()
    reader = gguf.GGUFReader(path)
    expected = {"general.architecture": require_gguf(spec)} | metadata(spec, tokenizer, stored=stored, name=name)
    found = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    for key in sorted(expected.keys() | found.keys()):
        wanted = expected.get(key)
        if (float(np.float32(wanted)) if isinstance(wanted, float) else wanted) != found.get(key):
            raise CheckpointError(f"GGUF key {key} differs from the model's", where=str(path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    declared = {tensor.name: tensor for tensor in gguf_tensors(spec)}
    if tensors.keys() != declared.keys():
        raise CheckpointError(f"Tensor {min(tensors.keys() ^ declared.keys())} is missing or unknown", where=str(path))
    for tensor_name, array in to_gguf(spec, weights):
        entry = _entry(declared[tensor_name], stored)
        rounded = array if entry.dtype == "F32" else _rounded(stored_array(array, entry), entry.dtype)
        if not np.array_equal(_dequantized(gguf, tensors[tensor_name]), rounded, equal_nan=True):
            raise CheckpointError(f"Tensor {tensor_name} differs from the checkpoint's", where=str(path))


def _rounded(array: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "F16":
        return array.astype(np.float32)
    return (array.astype(np.uint32) << 16).view(np.float32)
