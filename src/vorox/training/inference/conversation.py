"""A conversation with a model: its messages so far and streamed answers, or a text that it continues.

With a chat template, lines are messages of a user and answers are messages of an assistant. Without one, lines and
completions form one text.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace

from vorox.core.engine import Engine
from vorox.core.errors import ConfigError
from vorox.data.documents import Message
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.training.inference.sampling import SamplingSettings, encode_prompts
from vorox.training.inference.text_generation import answer_stop_strings, encode_conversation, stream_text

ANSWER_TOKENS = 1024
"""The default length of an answer in a conversation, if the model has room for it."""


class Conversation:
    """A conversation with a model.

    Args:
        engine: The model.
        tokenizer: Its tokenizer.
        settings: How tokens are chosen.
        system: System message.
        num_tokens: Tokens of an answer. ``None``: ``ANSWER_TOKENS`` or as many as there is room for; without a chat
            template those of the settings.

    Attributes:
        has_template: Whether the model has a chat template.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        settings: SamplingSettings,
        *,
        system: str | None = None,
        num_tokens: int | None = None,
    ) -> None:
        self._engine, self._tokenizer, self._settings, self._num_tokens = engine, tokenizer, settings, num_tokens
        self.has_template = tokenizer.chat_template is not None
        self._system = [] if system is None else [Message("system", system)]
        self._stop = answer_stop_strings(tokenizer)
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system message."""
        self._messages, self._text = list(self._system), ""

    def change(self, *, seed: int | None = None, temperature: float | None = None) -> None:
        """Change sampling settings.

        Raises:
            ValueError: A value is negative or not finite.
        """
        if (seed or 0) < 0 or not 0 <= (temperature or 0) < math.inf:
            raise ValueError("negative or not finite")
        if seed is not None:
            self._settings = replace(self._settings, seed=seed)
        if temperature is not None:
            self._settings = replace(self._settings, temperature=temperature)

    def answer(self, line: str) -> Generator[str]:
        """Yield the answer to a line as it grows. What was yielded becomes part of the conversation.

        Raises:
            ConfigError: The conversation is too long for the model, or its template refuses the line; the line is
                then no part of it.
        """
        messages, text = [*self._messages, Message("user", line)], self._text + line
        if self.has_template:
            prompt = encode_conversation(self._tokenizer, messages)
        else:
            (prompt,) = encode_prompts(self._tokenizer, [text])
        room_tokens = self._settings.max_positions_tokens - len(prompt)
        if room_tokens < 1:
            raise ConfigError(
                f"The conversation has {len(prompt):,} tokens, but the model only "
                f"{self._settings.max_positions_tokens:,} positions", where="conversation", hint="write /reset",
            )  # fmt: skip
        wanted = self._num_tokens or (ANSWER_TOKENS if self.has_template else self._settings.max_new_tokens)
        settings = replace(self._settings, max_new_tokens=min(wanted, room_tokens))
        answer = ""
        try:
            for fragment in stream_text(self._engine, self._tokenizer, [prompt], settings, self._stop):
                answer += fragment.text
                if fragment.text:
                    yield fragment.text
        finally:
            self._messages, self._text = [*messages, Message("assistant", answer)], text + answer + "\n"
