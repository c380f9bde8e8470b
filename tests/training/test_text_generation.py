"""Streamed texts: equal to whole completions, stopped where a search in the whole text stops them."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import chats
from numpy_engine import NumpyEngine
from vorox.core.batch import Int32Array
from vorox.core.errors import ConfigError
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.data.chat.template import BUILT_IN
from vorox.data.documents import Message
from vorox.data.tokenizers.loading import train
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.training.inference.sampling import SamplingSettings, complete
from vorox.training.inference.text_generation import answer_stop_strings, encode_conversation, stream_text


class Speaker:
    """An engine that says a given text, whatever the prompt."""

    def __init__(self, tokenizer: Tokenizer, ids: list[int]) -> None:
        self._ids, self._vocab_size, self.num_fed = ids, tokenizer.vocab_size, 0

    def decoder(self, batch_size: int, max_tokens: int) -> Speaker:
        return self

    def feed(self, tokens_BT: Int32Array) -> np.ndarray:
        logits_BV = np.zeros((len(tokens_BT), self._vocab_size), np.float32)
        logits_BV[:, self._ids[self.num_fed]] = 1
        self.num_fed += 1
        return logits_BV


def settings(tokenizer: Tokenizer, num_tokens: int = 40) -> SamplingSettings:
    return SamplingSettings(num_tokens, 0.0, None, 1, tokenizer.vocab_size, tokenizer.end_of_text_id, 512)


BYTES = train(TokenizerConfig.model_validate({"kind": "byte"}), [])


def spoken(tokenizer: Tokenizer, text: str, stop: list[str], num_tokens: int = 40) -> tuple[list[str], str | None, int]:
    """The fragments, why they ended, and how often the model ran."""
    ids = [*tokenizer.encode_with_specials([text])[0][0].tolist(), tokenizer.end_of_text_id]
    engine = Speaker(tokenizer, ids)
    found = list(stream_text(engine, tokenizer, [[0]], settings(tokenizer, num_tokens), stop))  # type: ignore[arg-type]
    assert [fragment.finish_reason for fragment in found[:-1]] == [None] * (len(found) - 1)
    return [fragment.text for fragment in found], found[-1].finish_reason, engine.num_fed


def test_a_character_is_released_when_it_is_complete() -> None:
    text = "häß 漢字 🙂 e"
    texts, reason, num_fed = spoken(BYTES, text, [])
    assert "".join(texts) == text
    assert all("\ufffd" not in part for part in texts)
    assert texts[:4] == ["h", "", "ä", ""]
    assert (reason, num_fed) == ("stop", len(text.encode()) + 1)
    assert "".join(spoken(BYTES, "abc🙂", [], num_tokens=5)[0]) == "abc\ufffd", "the rest of a character never came"


def test_stop_strings_end_where_a_search_ends() -> None:
    """Random texts of two letters, where stop strings overlap with themselves and each other."""
    chooser = random.Random(5)
    for _ in range(300):
        text = "".join(chooser.choices("ab", k=chooser.randint(1, 30)))
        stop = ["".join(chooser.choices("ab", k=chooser.randint(1, 5))) for _ in range(chooser.randint(0, 3))]
        texts, reason, num_fed = spoken(BYTES, text, stop)
        first_end = min((text.find(one) + len(one) for one in stop if one in text), default=None)
        assert reason == "stop"
        if first_end is None:
            assert "".join(texts) == text
        else:
            ended = text[:first_end]
            assert "".join(texts) == ended[: min(ended.find(one) for one in stop if one in ended)]
            assert num_fed == first_end, "nothing is computed after the stop string"


def test_fragments_join_to_the_completions() -> None:
    engine = NumpyEngine(BYTES.vocab_size, seed=3)
    prompts = ["the", "run", "the"]
    asked = replace(settings(BYTES, 12), temperature=1.0, end_of_text_id=None)
    joined = ["", "", ""]
    ids = [BYTES.encode(text).tolist() for text in prompts]
    for fragment in stream_text(engine, BYTES, ids, asked):
        joined[fragment.prompt_index] += fragment.text
    assert joined == [text for _, text in complete(engine, BYTES, prompts, asked)]
    with pytest.raises(ConfigError, match="positions of the model"):
        stream_text(engine, BYTES, [[1] * 600], asked)


@pytest.mark.parametrize(("name", "end"), [("chatml", "<|im_end|>"), ("plain", "<|endoftext|>")])
def test_an_answer_ends_where_the_template_ends_it(name: str, end: str) -> None:
    tokenizer = chats.tokenizer().with_chat_template(BUILT_IN[name])
    assert answer_stop_strings(tokenizer) == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    texts, reason, num_fed = spoken(tokenizer, f"yes{end} and more", answer_stop_strings(tokenizer))
    assert ("".join(texts), reason) == ("yes", "stop")
    assert num_fed < 10
    without = tokenizer.with_chat_template("{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]\n{% endfor %}")
    assert answer_stop_strings(without)[-1] == "[end]"
    assert answer_stop_strings(BYTES) == ()


def test_a_conversation_is_encoded_as_it_was_trained() -> None:
    tokenizer = chats.tokenizer().with_chat_template(BUILT_IN["chatml"])
    messages = [Message("user", "hello"), Message("assistant", "run"), Message("user", "step")]
    text = (
        "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\nrun<|im_end|>\n<|im_start|>user\nstep<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    ids = encode_conversation(tokenizer, messages)
    assert tokenizer.decode(ids) == text
    assert ids.count(tokenizer.special_id("<|im_start|>")) == 4
    with pytest.raises(ConfigError, match="spells the special token"):
        encode_conversation(tokenizer, [Message("user", "<|im_end|>")])
    with pytest.raises(ConfigError, match="no chat template"):
        encode_conversation(BYTES, messages)
