"""Conversations and preference pairs: the messages of a record, from its columns

The values of a source's ``chat_fields`` go in; messages come out. One column holds a list of messages, either
``{role, content}`` or ``{from, value}`` (ShareGPT); two columns are a prompt and its answer, each a text or a list of
messages; three are an instruction, its input and its output (Alpaca). The columns of a preference pair are a prompt, a
chosen and a rejected answer, all texts or all lists of messages, or only the last two, which then start with the
prompt. Invariant: a conversation has at least one answer, and no answer is empty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final, cast

from vorox.core.schema import SourceConfig
from vorox.data.documents import Conversation, Message, PreferencePair, UnreadableRecord

_ROLES: Final[Mapping[str, str]] = {
    "system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant",
    "tool": "tool",
}  # fmt: skip
"""The role of a message, by its name in the record."""

_KEYS = (("role", "content"), ("from", "value"))
_JSON_TYPES = {"dict": "an object", "list": "an array", "bool": "a boolean", "str": "a string", "NoneType": "null"}


def read_messages(source: SourceConfig, values: Mapping[str, object], present: Sequence[str]) -> Conversation:
    """Return the messages of a record, or its preference pair (``preference_pairs``).

    Args:
        source: Names the fields.
        values: The values of the chat fields that the record has.
        present: The fields of the record, for messages.

    Raises:
        UnreadableRecord: As ``read_conversation`` and ``read_pair``.
    """
    if not source.preference_pairs:
        return read_conversation(values, source.chat_fields, present)
    _check_present(values, source.chat_fields, present)
    return read_pair(values, source.chat_fields)


def read_conversation(
    values: Mapping[str, object], chat_fields: Sequence[str], present: Sequence[str]
) -> tuple[Message, ...]:
    """Return the messages of a record.

    Args:
        values: The values of the chat fields that the record has.
        chat_fields: One field with messages; prompt and answer; or instruction, input and output.
        present: The fields of the record, for messages.

    Raises:
        UnreadableRecord: A field is missing, a role is unknown, an answer is empty, or there is none.
    """
    _check_present(values, chat_fields, present)
    if len(chat_fields) == 1:
        messages = _messages(chat_fields[0], values[chat_fields[0]])
    elif len(chat_fields) == 2:
        prompt, answer = chat_fields
        messages = [*_side("user", prompt, values[prompt]), *_side("assistant", answer, values[answer])]
    else:
        instruction, further, output = (_text(name, values[name]) for name in chat_fields)
        asked = f"{instruction}\n\n{further}" if further else instruction
        messages = [Message("user", asked), Message("assistant", output)]
    _check_answers(messages)
    return tuple(messages)


def read_pair(values: Mapping[str, object], fields: Sequence[str]) -> PreferencePair:
    """Return the preference pair of a record.

    Args:
        values: The values of the fields.
        fields: Prompt, chosen and rejected answer; or only the two, which then start with the prompt.

    Raises:
        UnreadableRecord: Texts and lists of messages are mixed, both answers are equal, or one is empty.
    """
    is_text = isinstance(values[fields[-1]], str)
    for name in fields:
        if isinstance(values[name], str) != is_text:
            raise UnreadableRecord(
                f"field {name!r} is {json_type(values[name])}, {fields[-1]!r} is {json_type(values[fields[-1]])}: a "
                "pair consists of texts or of lists of messages; if both answers include the prompt, name only them "
                "in chat_fields"
            )
    if is_text:
        texts = [_text(name, values[name]) for name in fields]
        parts = texts if len(fields) == 3 else _split_texts(*texts)
        roles = ("user", "assistant", "assistant")
        prompt, chosen, rejected = ((Message(role, text),) for role, text in zip(roles, parts, strict=True))
    else:
        sides = [tuple(_messages(name, values[name])) for name in fields]
        prompt, chosen, rejected = sides if len(fields) == 3 else _split_messages(*sides)
    if chosen == rejected:
        raise UnreadableRecord("the chosen and the rejected answer are equal")
    for answer in (chosen, rejected):
        _check_answers(answer)
    return PreferencePair(prompt, chosen, rejected, is_text)


def messages_of(conversation: Conversation) -> tuple[Message, ...]:
    """Return all messages; for a preference pair, the prompt and both answers."""
    if isinstance(conversation, PreferencePair):
        return (*conversation.prompt, *conversation.chosen, *conversation.rejected)
    return conversation


def plain_text(conversation: Conversation) -> str:
    """Return the contents of all messages, without roles: the text that tokenizers are trained on."""
    return "\n".join(message.content for message in messages_of(conversation))


def json_type(value: object) -> str:
    """Return the JSON type of a value, for messages."""
    return _JSON_TYPES.get(type(value).__name__, "a number")


def lone_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate, which UTF-8 cannot encode; ``None`` if there is none."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return error.start
    return None


def _check_present(values: Mapping[str, object], chat_fields: Sequence[str], present: Sequence[str]) -> None:
    for name in chat_fields:
        if name not in values:
            names = ", ".join(repr(key) for key in present[:8])
            raise UnreadableRecord(
                f"no field {name!r}; the record has {names or 'no fields'}: set the source's chat_fields"
            )


def _check_answers(messages: Sequence[Message]) -> None:
    for number, message in enumerate(messages, 1):
        if message.role == "assistant" and not message.content.strip():
            raise UnreadableRecord(f"the answer in message {number} is empty")
    if not any(message.role == "assistant" for message in messages):
        raise UnreadableRecord("no message has the role assistant, so nothing can be trained on")


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts into the prompt that both start with and their answers; a space before them is theirs."""
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    length -= chosen[:length].endswith(" ")
    return chosen[:length], chosen[length:], rejected[length:]


def _split_messages(
    chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    return chosen[:length], chosen[length:], rejected[length:]


def _side(role: str, name: str, value: object) -> list[Message]:
    """Return the messages of a prompt or of an answer."""
    return [Message(role, _text(name, value))] if isinstance(value, str) else _messages(name, value)


def _messages(name: str, value: object) -> list[Message]:
    if not isinstance(value, list):
        raise UnreadableRecord(f"field {name!r} is not a list of messages but {json_type(value)}")
    return [_message(number, entry) for number, entry in enumerate(cast("list[object]", value), 1)]


def _message(number: int, entry: object) -> Message:
    if not isinstance(entry, dict):
        raise UnreadableRecord(f"message {number} is not an object but {json_type(entry)}")
    fields = cast("dict[str, object]", entry)
    keys = next((pair for pair in _KEYS if pair[0] in fields), None)
    if keys is None:
        raise UnreadableRecord(f"message {number} has neither 'role' and 'content' nor 'from' and 'value'")
    role = fields[keys[0]]
    if not isinstance(role, str) or role not in _ROLES:
        raise UnreadableRecord(f"message {number} has the unknown role {role!r}; roles are {', '.join(_ROLES)}")
    if fields.get("tool_calls"):
        raise UnreadableRecord(f"message {number} calls tools, which is not supported")
    return Message(_ROLES[role], _text(f"{keys[1]} of message {number}", fields.get(keys[1])))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UnreadableRecord(f"field {name!r} is not a string but {json_type(value)}")
    surrogate = lone_surrogate(value)
    if surrogate is not None:
        raise UnreadableRecord(f"field {name!r} has half a surrogate pair at character {surrogate}")
    return value
