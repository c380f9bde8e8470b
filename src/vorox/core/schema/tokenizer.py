"""``tokenizer``: a vocabulary, trained on the sources or loaded."""

from __future__ import annotations

from typing import Literal

from vorox.core.schema.section import ImportPath, Section
from vorox.core.schema.setting import FUNCTION, Need, setting


class TokenizerConfig(Section):
    kind: Literal["bpe", "byte", "char", "file", "huggingface", "tiktoken", "none"] | ImportPath = setting(
        default="bpe",
        description="bpe: byte-level BPE trained on the sources; byte: 256 bytes; char: the characters of the text; "
        "file: a tokenizer.json; huggingface: the tokenizer of a model, from a directory or repository; tiktoken: an "
        "encoding by name, or a file of ranks; none: token shards without a known tokenizer. Or a user function: "
        "f(path) returns a tokenizers.Tokenizer.",
    )
    vocab_size: int = setting(
        default=4096,
        ge=1,
        description="Vocabulary size of a trained BPE including special tokens, smaller if the text has fewer pairs; "
        "or the number of ids of kind none.",
        needs=Need("kind", ("bpe", "none")),
    )
    train_bytes: int = setting(
        default=8 << 20,
        ge=1,
        description="Bytes of text that a BPE is trained on, from evenly spread documents.",
        needs=Need("kind", ("bpe",)),
    )
    path: str | None = setting(
        default=None,
        description="file: the tokenizer.json. huggingface: a directory, or OWNER/NAME on the Hub. tiktoken: an "
        "encoding such as gpt2 or cl100k_base, a .tiktoken file or a vocab.bpe. User function: its argument.",
        location="tokenizer",
        needs=Need("kind", ("file", "huggingface", "tiktoken", FUNCTION)),
    )
    revision: str | None = setting(
        default=None,
        description="Commit, tag or branch of a Hub repository. None: the newest commit.",
        location="tokenizer",
        needs=Need("kind", ("huggingface",)),
    )
    pattern: str | None = setting(
        default=None,
        description="Regular expression that splits text into words, for a .tiktoken file. None: that of GPT-2.",
        needs=Need("kind", ("tiktoken",)),
    )
    end_of_text: str | None = setting(
        default=None,
        description="Token appended to every document; added to the vocabulary if it is missing. None: the eos_token "
        "of a Hugging Face tokenizer, else <|endoftext|>.",
    )
    end_of_text_id: int | None = setting(
        default=None,
        ge=0,
        description="Kind none: the end-of-text id. None: one id after the vocabulary.",
        needs=Need("kind", ("none",)),
    )
    chat_template: str | None = setting(
        default=None,
        description="Template of conversations: chatml, plain or a Jinja file. None: the tokenizer's own, else chatml.",
        needs=Need("kind", never=("none",), remedy="a tokenizer"),
    )
    special_tokens: tuple[str, ...] = setting(
        default=(),
        description="Further special tokens, such as the sentinels of fill_in_the_middle; added at the end of the "
        "vocabulary if they are missing. The same characters in text stay text.",
    )
    fast_path: Literal["auto", "off"] = setting(
        default="auto",
        description="auto: encode words by table lookup where a test shows that the ids are equal; off: always use "
        "the library. The ids are the same.",
        digest="none",
    )
