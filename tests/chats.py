"""Random conversations, a tokenizer with the tokens of chatml, and the loss masks of transformers."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.tokenizers.loading import train
from vorox.data.tokenizers.tokenizer import Tokenizer

WORDS = ("the", "cat", "runs", "é", "漢字", "🙂", "<|im_", "user", "assistant", "\n", "  ", "a-b", "42", "ok.")
MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
)
"""chatml with marks, which transformers needs for a mask; Vorox finds the same answers without them."""

TRIMMED = MARKED.replace("message['content'] +", "message['content'] | trim +")


def unmarked(template: str) -> str:
    return re.sub(r"{%-? (end)?generation %}", "", template)


def text(chooser: random.Random, most: int = 12) -> str:
    """Words with white space at any place, never only white space."""
    return chooser.choice(["", " ", "\n"]) + "x" + " ".join(chooser.choices(WORDS, k=chooser.randint(0, most)))


def conversation(chooser: random.Random) -> list[dict[str, str]]:
    messages = [{"role": "system", "content": text(chooser)}] if chooser.random() < 0.3 else []
    for _ in range(chooser.randint(1, 3)):
        messages.append({"role": "user", "content": text(chooser)})
        messages.append({"role": "assistant", "content": text(chooser)})
    if chooser.random() < 0.2:
        messages.append({"role": "user", "content": text(chooser)})
    return messages


def conversations(count: int, seed: int) -> list[list[dict[str, str]]]:
    chooser = random.Random(seed)
    return [conversation(chooser) for _ in range(count)]


def write_jsonl(file: Path, chats: list[list[dict[str, str]]]) -> Path:
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats), encoding="utf-8")
    return file


def tokenizer(kind: str = "bpe") -> Tokenizer:
    config = TokenizerConfig.model_validate({"kind": kind, "vocab_size": 300})
    texts = [message["content"] for chat in conversations(40, 99) for message in chat]
    return train(config, texts).with_special_tokens(["<|im_start|>", "<|im_end|>"])


class Oracle:
    """transformers: ids and loss mask of a conversation."""

    def __init__(self, directory: Path, ours: Tokenizer, template: str) -> None:
        import transformers

        ours.save(directory)
        self._theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(directory)
        self._template = template

    def __call__(self, chat: list[dict[str, str]]) -> tuple[list[int], npt.NDArray[np.bool_]]:
        found = self._theirs.apply_chat_template(
            chat, chat_template=self._template, return_dict=True, return_assistant_tokens_mask=True
        )
        return found["input_ids"], np.array(found["assistant_masks"], np.bool_)
