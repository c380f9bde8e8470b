"""``tokenizer``: a vocabulary, trained on the sources or loaded."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import ImportPath, Section


class TokenizerConfig(Section):
    kind: Literal["bpe", "byte", "char", "file", "huggingface", "tiktoken", "none"] | ImportPath = Field(
        default="bpe",
        description="bpe: byte-level BPE trained on the sources; byte: 256 bytes; char: the characters of the text; "
        "file: a tokenizer.json; huggingface: the tokenizer of a model, from a directory or repository; tiktoken: an "
        "encoding by name, or a file of ranks; none: token shards without a known tokenizer. Or a user function: "
        "f(path) returns a tokenizers.Tokenizer.",
    )
    vocab_size: int = Field(
        default=4096,
        ge=1,
        description="Vocabulary size of a trained BPE including special tokens, smaller if the text has fewer pairs; "
        "or the number of ids of kind none.",
    )
    train_bytes: int = Field(
        default=8 << 20, ge=1, description="Bytes of text that a BPE is trained on, from evenly spread documents."
    )
    path: str | None = Field(
        default=None,
        description="file: the tokenizer.json. huggingface: a directory, or OWNER/NAME on the Hub. tiktoken: an "
        "encoding such as gpt2 or cl100k_base, a .tiktoken file or a vocab.bpe. User function: its argument.",
    )
    revision: str | None = Field(
        default=None, description="Commit, tag or branch of a Hub repository. None: the newest commit."
    )
    pattern: str | None = Field(
        default=None,
        description="Regular expression that splits text into words, for a .tiktoken file. None: that of GPT-2.",
    )
    end_of_text: str | None = Field(
        default=None,
        description="Token appended to every document; added to the vocabulary if it is missing. None: the eos_token "
        "of a Hugging Face tokenizer, else <|endoftext|>.",
    )
    end_of_text_id: int | None = Field(
        default=None, ge=0, description="Kind none: the end-of-text id. None: one id after the vocabulary."
    )
    chat_template: str | None = Field(
        default=None,
        description="Template of conversations: chatml, plain or a Jinja file. None: the tokenizer's own, else chatml.",
    )
    special_tokens: tuple[str, ...] = Field(
        default=(),
        description="Further special tokens, such as the sentinels of fill_in_the_middle; added at the end of the "
        "vocabulary if they are missing. The same characters in text stay text.",
    )
    fast_path: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: encode words by table lookup where a test shows that the ids are equal; off: always use "
        "the library. The ids are the same.",
    )
