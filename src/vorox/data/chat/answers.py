"""Where the answers of a conversation are in its rendered text, for a template that does not mark them.

A text, its messages and what renders them go in; ranges of characters come out. An answer is the content of an
assistant's message and the token that ends it, or, where it calls tools or reasons, all that follows the generation
prompt.
Invariant: a range is where a rendering of the same conversation with marks, or without this answer, has it; an answer
that the template changes is refused.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from vorox.data.documents import Message, Ranges, UnreadableRecord

START_MARK, END_MARK = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, which mark answers while a text is rendered."""

MARKS = re.compile(f"[{START_MARK}{END_MARK}]")

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
"""Names of the reasoning before an answer."""

ANSWER_KEYS = frozenset({"tool_calls", *REASONING_KEYS})
"""Fields of a message that are part of the answer beside its content."""

REASONED = "</think>"
"""Ends the reasoning within a content; templates such as that of Qwen3 take it out of there."""

_TRIMS: Final[tuple[Callable[[str], str], ...]] = (
    str, str.strip, str.lstrip, str.rstrip, lambda text: text.strip("\n"), lambda text: text.lstrip("\n"),
)  # fmt: skip
"""What templates do to the white space around a content; most do nothing, or remove all of it."""


class Render(Protocol):
    """Renders messages with the tools that they may call."""

    def __call__(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, *, tools: Sequence[object] = ()
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class AnswerFinder:
    """Finds answers.

    Attributes:
        render: The template.
        is_reasoning_known: Whether the template knows ``</think>`` within a content.
        special_tokens: All special tokens of the tokenizer.
    """

    render: Render
    is_reasoning_known: bool
    special_tokens: tuple[str, ...]

    def find(self, text: str, messages: Sequence[Message], tools: Sequence[object]) -> Ranges:
        """Return the range of each answer in a text without marks."""
        ranges: dict[int, tuple[int, int]] = {}
        for index, message in enumerate(messages):
            is_reasoned = REASONED in message.content and self.is_reasoning_known
            if message.role == "assistant" and (is_reasoned or any(map(message.further.get, ANSWER_KEYS))):
                found = self._find_turn(text, messages, index, tools)
                if found is not None and is_reasoned and not _has_reasoned(text[slice(*found)], messages[index:]):
                    found = None
                ranges |= {} if found is None else {index: found}
        numbers = [index for index, one in enumerate(messages) if one.role == "assistant" and index not in ranges]
        if numbers:
            ranges |= zip(numbers, self._find_contents(text, messages, numbers, tools), strict=True)
        return tuple(ranges[index] for index in sorted(ranges))

    def _find_turn(
        self, text: str, messages: Sequence[Message], index: int, tools: Sequence[object]
    ) -> tuple[int, int] | None:
        """Return the range of a message: what follows the generation prompt; ``None`` if it is not found."""
        prompt = self.render(messages[:index], True, tools=tools)
        turn = self.render(messages[: index + 1], tools=tools).rstrip()
        if text.startswith(prompt) and turn.startswith(prompt):
            length = self._length_in(text, turn[len(prompt) :], len(prompt))
            if length:
                return len(prompt), len(prompt) + length
        try:
            return self._find_replaced(text, messages, index, tools, prompt)
        except UnreadableRecord:  # the template refuses another answer in this place
            return None

    def _find_replaced(
        self, text: str, messages: Sequence[Message], index: int, tools: Sequence[object], prompt: str
    ) -> tuple[int, int] | None:
        """Return what ``_find_turn`` does, from the whole conversation with a plain answer in place of the message.

        A template may write a turn otherwise once further turns follow, such as without its reasoning.
        """
        plain = [*messages[:index], Message("assistant", f"{START_MARK}x{END_MARK}"), *messages[index + 1 :]]
        before, start, rest = self.render(plain, tools=tools).partition(START_MARK)
        after = rest.partition(END_MARK)[2]
        if not start or not after or not text.endswith(after):
            return None
        own = prompt[_common_length(prompt, self.render(messages[:index], tools=tools)) :]
        place = before.rfind(own) if own else -1
        before = before if place < 0 else before[: place + len(own)]
        common = _common_length(before, text)
        if before[common:].strip():
            return None
        end = self.render(plain[: index + 1], tools=tools).rpartition(END_MARK)[2].rstrip()
        stop = len(text) - len(after)
        return (common, stop + self._length_in(text, end, stop)) if common < stop else None

    def _find_contents(
        self, text: str, messages: Sequence[Message], numbers: Sequence[int], tools: Sequence[object]
    ) -> Ranges:
        """Return the ranges of the contents of some messages, each with the token that ends it."""
        if not any("tool_calls" in messages[index].further for index in numbers):
            for trim in _TRIMS[:2]:
                if answers := self._find_marked(text, messages, dict.fromkeys(numbers, trim), tools):
                    return answers
            each = {  # Qwen3 writes the last answer otherwise than those before it
                index: next((trim for trim in _TRIMS if self._find_marked(text, messages, {index: trim}, tools)), str)
                for index in numbers
            }
            if answers := self._find_marked(text, messages, each, tools):
                return answers
        raise UnreadableRecord(
            "the chat template changes an answer, so it cannot be found in the text: mark answers in the template "
            "with {% generation %} and {% endgeneration %}"
        )

    def _find_marked(
        self, text: str, messages: Sequence[Message], trims: Mapping[int, Callable[[str], str]], tools: Sequence[object]
    ) -> Ranges:
        """Return what ``_find_contents`` does, by marks around the trimmed contents; empty if these change the text."""
        marked = [_marked(one, trims[index]) if index in trims else one for index, one in enumerate(messages)]
        found, answers = without_marks(self.render(marked, tools=tools))
        if found != text or len(answers) != len(trims):
            return ()
        end = self.render(marked[: max(trims) + 1], tools=tools).rpartition(END_MARK)[2].rstrip()
        return tuple((start, stop + self._length_in(text, end, stop)) for start, stop in answers)

    def _length_in(self, text: str, end: str, start: int) -> int:
        """Return how much of the end of a conversation is at a place of a text: all, less tokens at its very end.

        What ends a conversation, as in Phi-3, follows its last answer only; the tokens before it end every turn.
        """
        pattern, lengths = any_of(self.special_tokens), [len(end)]
        tokens: list[re.Match[str]] = [] if pattern is None else list(pattern.finditer(end))
        for token in reversed(tokens):
            if end[token.end() : lengths[-1]].strip():
                break
            lengths.append(len(end[: token.start()].rstrip()))
        return next((length for length in lengths if text.startswith(end[:length], start)), 0)


def _common_length(one: str, other: str) -> int:
    """Return the length of the beginning that two texts share."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one.startswith(other[low:middle], low) else (low, middle - 1)
    return low


def _has_reasoned(turn: str, messages: Sequence[Message]) -> bool:
    """Return whether a turn has the content of the first message; its reasoning only if no question follows."""
    *reasoning, answer = messages[0].content.split(REASONED)
    if any(message.role == "user" for message in messages):
        reasoning = []
    return all(part.replace("<think>", "").strip() in turn for part in (*reasoning, answer))


def _marked(message: Message, trim: Callable[[str], str]) -> Message:
    return message._replace(content=f"{START_MARK}{trim(message.content)}{END_MARK}")


def without_marks(text: str) -> tuple[str, Ranges]:
    """Return a text without its marks, and the ranges between them."""
    places = [match.start() - before for before, match in enumerate(MARKS.finditer(text))]
    return MARKS.sub("", text), tuple(zip(places[::2], places[1::2], strict=False))


@functools.lru_cache(maxsize=16)
def any_of(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None
