"""Streaming generation: completions as growing texts with stop strings, and prompts of conversations.

Token ids go in, one ``Fragment`` per sampled token comes out. The fragments of a completion join to the text that
``sampling.complete`` returns. Text that may still change is held back: an incomplete character, the start of a stop
string. A conversation is rendered with the chat template that the model was trained with.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.data.documents import Message, UnreadableRecord
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.training.inference.sampling import SamplingSettings, stream

FinishReason = Literal["stop", "length"]
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class Fragment(NamedTuple):
    """The text that a sampled token released; often empty.

    Attributes:
        prompt_index: The prompt that it continues.
        text: What follows the text released so far.
        finish_reason: Set in the last fragment of a prompt: ``stop`` for the end-of-text token or a stop string,
            ``length`` for ``max_new_tokens``.
    """

    prompt_index: int
    text: str
    finish_reason: FinishReason | None


def stream_text(
    engine: Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    settings: SamplingSettings,
    stop: Sequence[str] = (),
) -> Iterator[Fragment]:
    """Continue prompts and yield their texts, one fragment per sampled token.

    Args:
        engine: The model.
        tokenizer: Its tokenizer.
        prompts: Token ids.
        settings: How tokens are chosen.
        stop: A completion ends before the first of these strings.

    Raises:
        ConfigError: A prompt cannot be continued (``sampling.check_prompt``); before the first fragment.
    """
    stopped: set[int] = set()
    return _fragments(stream(engine, prompts, settings, stopped), tokenizer, len(prompts), settings, stop, stopped)


def _fragments(
    sampled: Iterator[tuple[int, int]],
    tokenizer: Tokenizer,
    num_prompts: int,
    settings: SamplingSettings,
    stop: Sequence[str],
    stopped: set[int],
) -> Iterator[Fragment]:
    texts = [_GrowingText(tokenizer, stop) for _ in range(num_prompts)]
    for index, token in sampled:
        text = texts[index]
        if settings.ends(token):
            yield Fragment(index, text.finish(), "stop")
            continue
        released = text.add(token)
        if text.is_stopped:
            stopped.add(index)
            yield Fragment(index, released, "stop")
        elif len(text.ids) == settings.max_new_tokens:
            yield Fragment(index, released + text.finish(), "length")
        else:
            yield Fragment(index, released, None)


class _GrowingText:
    """The text of a completion, released as far as it can no longer change."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._tokenizer, self._stop, self._released = tokenizer, tuple(filter(None, stop)), ""
        self.ids: list[int] = []
        self.is_stopped = False

    def add(self, token: int) -> str:
        """Append a token and return the text that it releases."""
        self.ids.append(token)
        text = self._tokenizer.decode(self.ids)
        ends = [at for string in self._stop if (at := text.find(string)) >= 0]
        if ends:
            self.is_stopped = True
            return self._release(text[: min(ends)])
        text = text.rstrip(_INCOMPLETE)
        held = max((_overlap(text, string) for string in self._stop), default=0)
        return self._release(text[: len(text) - held])

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._release(self._tokenizer.decode(self.ids))

    def _release(self, text: str) -> str:
        if not text.startswith(self._released):  # a decoder that changes earlier text, or nothing new
            return ""
        fresh, self._released = text[len(self._released) :], text
        return fresh


def _overlap(text: str, string: str) -> int:
    """Return the length of the longest end of a text that a string starts with."""
    return next((size for size in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:size])), 0)


def encode_conversation(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """Return the ids of a conversation, up to where the model's answer starts.

    Raises:
        ConfigError: The model has no chat template, or it refuses the conversation.
        DataError: A character is not in the vocabulary.
    """
    template = tokenizer.chat_template
    if template is None:
        raise ConfigError(
            "The model has no chat template", where="tokenizer.chat_template",
            hint="request plain completions, or fine-tune it on conversations (data.sources.chat_fields)",
        )  # fmt: skip
    try:
        text = template.render(messages, add_generation_prompt=True)
    except UnreadableRecord as error:
        raise ConfigError(f"The conversation cannot be rendered: {error}", where="messages") from error
    return tokenizer.encode_with_specials([text])[0][0].tolist()


def answer_stop_strings(tokenizer: Tokenizer) -> Sequence[str]:
    """Return the strings that end an answer of a conversation; none without a chat template."""
    template = tokenizer.chat_template
    try:
        return () if template is None else template.answer_ends()
    except UnreadableRecord:
        return (tokenizer.end_of_text,)
