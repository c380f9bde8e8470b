"""Directories of pretrained models as others publish them: weights by transformers, a tokenizer by ``tokenizers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_runs import TEXT, WORDS

VOCAB = 300


def write_pretrained(directory: Path, model_type: str, **values: Any) -> Path:
    """Write a tiny model with random weights, and a byte-level BPE that knows the words of ``tiny_runs``."""
    from backends.torch_engine.transformers_models import write_model  # imports torch

    write_model(directory, model_type, **{"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 1, **values})
    return write_tokenizer(directory)


def write_tokenizer(directory: Path) -> Path:
    import tokenizers
    import transformers

    library: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False,
        special_tokens=["<|begin|>", "<|end|>"],
    )  # fmt: skip
    library.train_from_iterator([TEXT, *WORDS], trainer)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<|begin|>", eos_token="<|end|>")
    fast.save_pretrained(directory)
    return directory


def reference(directory: Path) -> tuple[Any, Any]:
    """The model and the tokenizer as transformers loads them, in fp32."""
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype="float32", local_files_only=True)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
