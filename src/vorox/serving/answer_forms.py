"""The forms of OpenAI's answers: completions and conversations, whole and as chunks of a stream."""

from __future__ import annotations

from typing import Any, Protocol

Choice = dict[str, Any]


class AnswerForm(Protocol):
    """How completions are written in an answer.

    Attributes:
        id_prefix: Start of the answer's id.
        whole: ``object`` of an answer.
        chunk: ``object`` of a chunk of a stream.
    """

    id_prefix: str
    whole: str
    chunk: str

    def opening(self, index: int) -> Choice | None:
        """Return what opens a completion in a stream, if anything."""
        ...

    def part(self, index: int, text: str, reason: str | None) -> Choice:
        """Return a part of a completion in a stream."""
        ...

    def choice(self, index: int, text: str, reason: str) -> Choice:
        """Return a whole completion."""
        ...


class CompletionForm:
    """Answers of ``/v1/completions``."""

    id_prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def opening(self, index: int) -> Choice | None:
        del index
        return None

    def part(self, index: int, text: str, reason: str | None) -> Choice:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}

    def choice(self, index: int, text: str, reason: str) -> Choice:
        return self.part(index, text, reason)


class ChatForm:
    """Answers of ``/v1/chat/completions``; the role is only in the opening of a stream."""

    id_prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, index: int) -> Choice | None:
        return _delta(index, {"role": "assistant", "content": ""}, None)

    def part(self, index: int, text: str, reason: str | None) -> Choice:
        return _delta(index, {"content": text} if text else {}, reason)

    def choice(self, index: int, text: str, reason: str) -> Choice:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": reason}


def _delta(index: int, delta: dict[str, str], reason: str | None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
