"""Tiny directories of transformers whose tokenizers have the shapes of published ones, written by their libraries."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tiny_runs

SHAPES = ("llama3", "gemma", "mistral", "qwen", "t5", "both")
"""llama3 and gemma add BOS, mistral BOS and a prefix space, qwen nothing, t5 EOS, both BOS and EOS."""

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}{{'<start_of_turn>' + ('model' if message['role'] == 'assistant' else"
    " message['role']) + '\\n' + message['content'] | trim + '<end_of_turn>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}"
    "{% endif %}{% endfor %}"
)
_SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "llama3": {
        "bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", "chat_template": LLAMA3,
        "extra": ["<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"], "turn_end": "<|eot_id|>",
    },
    "gemma": {
        "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>", "chat_template": GEMMA,
        "extra": ["<start_of_turn>", "<end_of_turn>"], "turn_end": "<end_of_turn>",
    },
    "mistral": {
        "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "chat_template": MISTRAL,
        "extra": ["[INST]", "[/INST]"], "turn_end": "</s>",
    },
    "qwen": {
        "eos_token": "<|endoftext|>", "pad_token": "<|pad|>", "chat_template": CHATML,
        "extra": ["<|im_start|>", "<|im_end|>"], "turn_end": "<|im_end|>",
    },
    "t5": {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>", "extra": []},
    "both": {"bos_token": "<s>", "eos_token": "</s>", "extra": []},
}  # fmt: skip


def turn_end(shape: str) -> str | None:
    return _SPECIAL[shape].get("turn_end")


def tokenizer(shape: str, *, chat: bool = True) -> Any:
    """A tokenizer of transformers."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    described = dict(_SPECIAL[shape])
    extra, template = described.pop("extra"), described.pop("chat_template", None)
    described.pop("turn_end", None)
    names = [AddedToken(token, special=True, normalized=False) for token in [*described.values(), *extra]]
    text = [tiny_runs.TEXT, "Größe 日本語 🙂\n\n\tdef f(x):  return x", *tiny_runs.WORDS]
    library: Any
    if shape in {"llama3", "qwen", "both"}:
        library = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(r" ?\w+|\s+(?!\S)|\s+|[^\w\s]+"), "isolated")
        library.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        library.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, special_tokens=names)
        if shape == "qwen":
            library.normalizer = normalizers.NFC()
    else:
        library = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
        if shape == "gemma":
            library.normalizer = normalizers.Replace(" ", "▁")
            library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        else:
            library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
            library.decoder = decoders.Sequence(
                [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
            )
        bytes_ = [AddedToken(f"<0x{byte:02X}>", special=False) for byte in range(256)]
        trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=[*names, *bytes_])
    library.train_from_iterator(text, trainer)
    if shape in {"gemma", "mistral", "t5"}:  # bytes are no added tokens in published files
        value = json.loads(library.to_str())
        value["added_tokens"] = [token for token in value["added_tokens"] if not token["content"].startswith("<0x")]
        library = Tokenizer.from_str(json.dumps(value))
    bos, eos = described.get("bos_token"), described["eos_token"]
    adds_bos, adds_eos = shape in {"llama3", "gemma", "mistral", "both"}, shape in {"t5", "both"}
    if adds_bos or adds_eos:
        single = f"{f'{bos} ' if adds_bos else ''}$A{' ' + eos if adds_eos else ''}"
        used = [(token, library.token_to_id(token)) for token in (bos, eos) if token is not None]
        added: Any = processors.TemplateProcessing(single=single, pair=f"{single} $B:1", special_tokens=used)
        if shape == "llama3":
            added = processors.Sequence([processors.ByteLevel(trim_offsets=False), added])
        library.post_processor = added
    if template is not None and chat:
        described["chat_template"] = template
    return PreTrainedTokenizerFast(tokenizer_object=library, **described)


def write(directory: Path, shape: str, *, chat: bool = True, generation: Mapping[str, Any] | None = None) -> Any:
    """Write a tiny Llama with a tokenizer of a shape; return the tokenizer of transformers.

    Args:
        directory: Directory to create.
        shape: One of ``SHAPES``.
        chat: With the chat template of the shape.
        generation: Keys of ``generation_config.json`` to add.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = tokenizer(shape, chat=chat)
    theirs.save_pretrained(directory)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(theirs), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=theirs.bos_token_id,
        eos_token_id=theirs.eos_token_id, pad_token_id=theirs.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    if generation is not None:
        file = directory / "generation_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **generation}), encoding="utf-8")
    return theirs
