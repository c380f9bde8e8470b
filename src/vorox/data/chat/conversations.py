"""Conversations and preference pairs: the messages of a record, from its columns

The values of a source's columns go in; messages come out. One column of ``chat_fields`` holds a list of messages,
either ``{role, content}`` or ``{from, value}`` (ShareGPT); two columns are a prompt and its answer, each a text or a
list of messages; three are a question, its context and its answer (Alpaca, Dolly, SQuAD). The columns of a preference
pair are a prompt, a chosen and a rejected answer, all texts or all lists of messages, or only the last two, which then
start with the prompt. ``system_field``, ``history_field`` and ``tools_field`` add to a conversation, ``label_field``
selects.
Invariants: a conversation has at least one answer to train on, and no answer is empty; whatever would change what is
trained on and is not understood is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple, cast

from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import (
    ROLES,
    ReadColumns,
    as_truth,
    holds_messages,
    is_call,
    parse_json,
    without_nulls,
)
from vorox.data.documents import Conversation, Message, PreferencePair, UnreadableRecord

_KEYS = (("role", "content"), ("from", "value"))
_TRAINED_KEYS = ("train", "training", "trainable", "loss", "include_in_loss")
"""Keys of a message that say whether it is trained on; ``weight`` is the same as a number."""

_UNKNOWN_WEIGHTS = ("train_detail", "training_detail", "train_on_turn", "loss_weight", "mask", "masked", "loss_mask",
                    "ignore", "rejected", "assistant_mask", "loss_on")  # fmt: skip
"""Keys that change what is trained on and are not understood."""
_NEUTRAL: tuple[object, ...] = (None, False, "", [], {})

_ANSWER_TURN = "\n\nAssistant:"
"""Begins an answer in the dialogues of HH-RLHF."""

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_JSON_TYPES = {"dict": "an object", "list": "an array", "bool": "a boolean", "str": "a string", "NoneType": "null"}


class ChatRecord(NamedTuple):
    """What a record says: its messages, and the tools that they may call, for the chat template."""

    messages: Conversation
    tools: tuple[object, ...] = ()


def read_messages(columns: ReadColumns, values: Mapping[str, object], present: Sequence[str]) -> ChatRecord | None:
    """Return the conversation of a record, or its preference pair (``preference_pairs``).

    Args:
        columns: The columns of the source.
        values: The values of ``columns.among(present)`` that the record has.
        present: The fields of the record, for messages.

    Returns:
        ``None`` for a record that is left out: its label is false, or all of its answers have the weight 0.

    Raises:
        UnreadableRecord: As ``read_conversation`` and ``read_pair``; a label or the tools cannot be read; or a column
            without a setting may change what the record means.
    """
    source: SourceConfig = columns.source
    values = {name: without_nulls(value) for name, value in values.items()}
    _check_present(values, (*source.chat_fields, *([source.label_field] if source.label_field else [])), present)
    columns.check_guarded(values)
    if source.label_field is not None and not _is_good(source.label_field, values):
        return None
    tools = _tools(source.tools_field, values.get(source.tools_field or ""))
    before: list[Message] = []
    system = values.get(source.system_field or "")
    if system not in (None, ""):
        before.append(Message("system", _text(str(source.system_field), system)))
    if source.preference_pairs:
        pair = read_pair(values, source.chat_fields)
        if before and pair.is_text:
            raise UnreadableRecord(
                f"field {source.system_field!r} belongs to messages, but the pair consists of texts: unset the "
                f"source's system_field and set its ignored_fields=[{source.system_field}] to train without it, or "
                "write prompt, chosen and rejected as lists of messages"
            )
        pair = replace(pair, prompt=(*before, *pair.prompt))
        _check_tools(source.tools_field, tools, pair.prompt)
        return ChatRecord(pair, tools)
    before += _history(source.history_field, values.get(source.history_field or ""))
    messages = read_conversation(values, source.chat_fields, present, has_tools=bool(tools))
    if system not in (None, "") and messages[0].role == "system":
        if messages[0].content != system:
            raise UnreadableRecord(
                f"field {source.system_field!r} and the first message hold different system messages: unset the "
                f"source's system_field and set its ignored_fields=[{source.system_field}] if the messages are complete"
            )
        before = before[1:]  # the column repeats the message
    found = (*before, *messages)
    _check_tools(source.tools_field, tools, found)
    return ChatRecord(found, tools) if any(one.role == "assistant" and one.is_trained for one in found) else None


def read_conversation(
    values: Mapping[str, object], chat_fields: Sequence[str], present: Sequence[str], *, has_tools: bool = False
) -> tuple[Message, ...]:
    """Return the messages of a record.

    Args:
        values: The values of the chat fields that the record has.
        chat_fields: One field with messages; prompt and answer; or question, context and answer.
        present: The fields of the record, for messages.
        has_tools: Whether the record has tools, so that an answer may be a list of calls (xLAM, APIGen).

    Raises:
        UnreadableRecord: A field is missing, a role is unknown, an answer is empty, or there is none.
    """
    _check_present(values, chat_fields, present)
    if len(chat_fields) == 1:
        messages = _messages(chat_fields[0], values[chat_fields[0]])
    elif len(chat_fields) == 2:
        prompt, answer = chat_fields
        messages = [*_side("user", prompt, values[prompt]), *_side("assistant", answer, values[answer], has_tools)]
    else:
        question, context, answer = chat_fields
        asked, further = _text(question, values[question]), values[context]
        further = "" if further is None else _text(context, further)
        asked = f"{asked}\n\n{further}" if further else asked
        messages = [Message("user", asked), *_side("assistant", answer, values[answer], has_tools)]
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
    if is_text and all(holds_messages(values[name]) for name in fields[-2:]):
        raise UnreadableRecord(
            f"fields {fields[-2]!r} and {fields[-1]!r} hold messages written as texts: write the lists themselves"
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
        if not all(message.is_trained for message in answer):
            raise UnreadableRecord("an answer of the pair has the weight 0, which a preference pair cannot honour")
    return PreferencePair(prompt, chosen, rejected, is_text)


def messages_of(conversation: Conversation) -> tuple[Message, ...]:
    """Return all messages; for a preference pair, the prompt and both answers."""
    if isinstance(conversation, PreferencePair):
        return (*conversation.prompt, *conversation.chosen, *conversation.rejected)
    return conversation


def plain_text(conversation: Conversation) -> str:
    """Return the contents of all messages, without roles: the text that tokenizers are trained on."""
    texts: list[str] = []
    for message in messages_of(conversation):
        calls = message.further.get("tool_calls")
        texts += [message.content] if message.content or not calls else []
        texts += [json.dumps(calls, ensure_ascii=False)] if calls else []
    return "\n".join(texts)


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


def _is_good(name: str, values: Mapping[str, object]) -> bool:
    """Return whether the label of a record is true.

    Raises:
        UnreadableRecord: It is no truth value.
    """
    found = as_truth(values[name])
    if found is None:
        raise UnreadableRecord(f"field {name!r} is neither true nor false")
    return found


def _tools(name: str | None, value: object) -> tuple[object, ...]:
    """Return the tools of a record, as the chat template gets them.

    Raises:
        UnreadableRecord: They are neither a list of objects nor the JSON text of one.
    """
    value = parse_json(value) if isinstance(value, str) else value
    if value is None or value == "":
        return ()
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in cast("list[object]", value)):
        raise UnreadableRecord(f"field {name!r} is not a list of tools (JSON schemas) or its JSON text")
    return tuple(cast("list[object]", value))


def _check_tools(name: str | None, tools: Sequence[object], messages: Sequence[Message]) -> None:
    """Refuse tools whose schemas the system message has too (Hermes): the chat template would write them once more.

    Raises:
        UnreadableRecord: It has all of their names and parameters.
    """
    if not tools or not messages or messages[0].role != "system":
        return
    written = messages[0].content.replace("\\", "").replace("'", '"')  # also as Python prints them
    for tool in tools:
        own, parameters = _schema(tool)
        is_named = re.search(f'"name"\\s*:\\s*"{re.escape(own)}"', written) is not None
        if not is_named or not all(f'"{one}"' in written for one in parameters):
            return
    raise UnreadableRecord(
        f"the system message lists the tools of field {name!r} already, and the chat template would write them again: "
        f"unset the source's tools_field and set its ignored_fields=[{name}]"
    )


def _schema(tool: object) -> tuple[str, list[str]]:
    """Return the name of a tool and those of its parameters, of ``{function: {...}}`` or of what is inside."""
    whole = cast("dict[str, object]", tool)
    inner = whole.get("function")
    function = cast("dict[str, object]", inner) if isinstance(inner, dict) else whole
    given = function.get("parameters")
    parameters = cast("dict[str, object]", given) if isinstance(given, dict) else {}
    properties = parameters.get("properties", parameters)  # xLAM has the parameters themselves
    return str(function.get("name", "")), [*cast("dict[str, object]", properties)] if isinstance(
        properties, dict
    ) else []


def _history(name: str | None, value: object) -> list[Message]:
    """Return the earlier turns of a record.

    Raises:
        UnreadableRecord: They are not pairs of a question and its answer.
    """
    value = parse_json(value) if isinstance(value, str) else value
    if value is None or value == "":
        return []
    turns = cast("list[object]", value) if isinstance(value, list) else [None]
    messages: list[Message] = []
    for number, turn in enumerate(turns, 1):
        if not isinstance(turn, list | tuple) or len(cast("list[object]", turn)) != 2:
            raise UnreadableRecord(f"field {name!r} is not a list of [question, answer] pairs: turn {number} is none")
        question, answer = cast("list[object]", turn)
        messages += [Message("user", _text(f"{name}", question)), Message("assistant", _text(f"{name}", answer))]
    _check_answers(messages, are_any_needed=False)
    return messages


def _check_present(values: Mapping[str, object], chat_fields: Sequence[str], present: Sequence[str]) -> None:
    for name in chat_fields:
        if name not in values:
            names = ", ".join(repr(key) for key in present[:8])
            raise UnreadableRecord(
                f"no field {name!r}; the record has {names or 'no fields'}: set the source's chat_fields"
            )


def _check_answers(messages: Sequence[Message], *, are_any_needed: bool = True) -> None:
    for number, message in enumerate(messages, 1):
        is_empty = not message.content.strip() and not message.further.get("tool_calls")
        if message.role == "assistant" and message.is_trained and is_empty:
            raise UnreadableRecord(f"the answer in message {number} is empty")
    if are_any_needed and not any(message.role == "assistant" for message in messages):
        raise UnreadableRecord("no message has the role assistant, so nothing can be trained on")


def _split_texts(chosen: str, rejected: str) -> tuple[str, str, str]:
    """Split two texts into the prompt that both start with and their answers; a space before them is theirs.

    The prompt of a dialogue ends where the assistant's turn begins, even if both answers begin alike.

    Raises:
        UnreadableRecord: One text is the beginning of the other, and no turn says where its answer begins.
    """
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    turn = chosen.rfind(_ANSWER_TURN, 0, length)
    if turn >= 0:
        length = turn + len(_ANSWER_TURN)
    elif chosen != rejected and length == min(len(chosen), len(rejected)):
        raise UnreadableRecord(
            "one text of the pair is the beginning of the other, so where its answer begins is not known: write the "
            "prompt as a column of its own, and name it first in chat_fields"
        )
    else:
        length -= chosen[:length].endswith(" ")
    return chosen[:length], chosen[length:], rejected[length:]


def _split_messages(
    chosen: tuple[Message, ...], rejected: tuple[Message, ...]
) -> tuple[tuple[Message, ...], tuple[Message, ...], tuple[Message, ...]]:
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    return chosen[:length], chosen[length:], rejected[length:]


def _side(role: str, name: str, value: object, has_tools: bool = False) -> list[Message]:
    """Return the messages of a prompt or of an answer; of several answers (SQuAD), the first.

    Beside tools, a list of ``{name, arguments}`` is an answer that calls them.
    """
    calls = (parse_json(value) if isinstance(value, str) else value) if has_tools else None
    if isinstance(calls, list) and all(map(is_call, cast("list[object]", calls))):
        if not calls:
            raise UnreadableRecord(f"field {name!r} is an empty list of tool calls: write what is answered instead")
        called = [_tool_call(1, call) for call in cast("list[object]", calls)]
        return [Message(role, "", {"content": None, "tool_calls": called})]
    if isinstance(value, dict):
        value = cast("dict[str, object]", value).get("text")
    if role == "assistant" and isinstance(value, list):
        answers = cast("list[object]", value)
        if not answers:
            raise UnreadableRecord(f"field {name!r} has no answer")
        if isinstance(answers[0], str):
            return [Message(role, _text(name, answers[0]))]
    whole = cast("object", value)
    return [Message(role, _text(name, whole))] if isinstance(whole, str) else _messages(name, whole)


def _messages(name: str, value: object) -> list[Message]:
    value = parse_json(value) if isinstance(value, str) else value
    if isinstance(value, str) and value.lstrip().startswith("[{'"):
        raise UnreadableRecord(
            f"field {name!r} is a list of messages printed by Python (pandas' to_csv): write the table with "
            "to_json(orient='records', lines=True) or to_parquet instead"
        )
    if not isinstance(value, list):
        raise UnreadableRecord(f"field {name!r} is not a list of messages but {json_type(value)}")
    return [_message(number, entry) for number, entry in enumerate(cast("list[object]", value), 1)]


def _message(number: int, entry: object) -> Message:
    if not isinstance(entry, dict):
        raise UnreadableRecord(f"message {number} is not an object but {json_type(entry)}")
    fields = {key: value for key, value in cast("dict[str, object]", entry).items() if value is not None}
    keys = next((pair for pair in _KEYS if pair[0] in fields), None)
    if keys is None:
        raise UnreadableRecord(f"message {number} has neither 'role' and 'content' nor 'from' and 'value'")
    name = fields.pop(keys[0])
    if not isinstance(name, str) or name not in ROLES:
        raise UnreadableRecord(f"message {number} has the unknown role {name!r}; roles are {', '.join(ROLES)}")
    role, content = ROLES[name], fields.pop(keys[1], None)
    is_trained = _is_trained(number, role, fields)
    calls = _tool_calls(number, fields)
    if name == "function_call":  # ShareGPT: the value is the call
        calls, content = [_tool_call(number, content)], None
    if calls and role != "assistant":
        raise UnreadableRecord(f"message {number} calls tools, but its role is {name!r}")
    if calls:
        fields["tool_calls"] = calls
        if content is None:
            fields["content"] = None  # a template may tell no content from an empty one
            content = ""
    return Message(role, _content(number, keys[1], content), fields, is_trained)


def _is_trained(number: int, role: str, fields: dict[str, object]) -> bool:
    """Remove the flags of a message that say whether it is trained on, and return the result.

    Raises:
        UnreadableRecord: A flag is not understood.
    """
    is_trained = True
    for key in ("weight", *_TRAINED_KEYS):
        if key not in fields:
            continue
        value = fields.pop(key)
        found = as_truth(value)
        if found is None:
            raise UnreadableRecord(f"message {number} has {key} {value!r}; only 0 and 1 (false, true) are supported")
        if found and role != "assistant":
            raise UnreadableRecord(
                f"message {number} has {key} {value!r}, but is no answer: only the assistant's messages are trained on"
            )
        is_trained = is_trained and found
    unknown = next((key for key in _UNKNOWN_WEIGHTS if fields.get(key) not in _NEUTRAL), None)
    if unknown is not None:
        raise UnreadableRecord(
            f"message {number} has {unknown!r}, which changes what is trained on and is not supported: write weight "
            "0 or 1 instead"
        )
    return is_trained


def _tool_calls(number: int, fields: dict[str, object]) -> list[object]:
    """Remove the tool calls of a message and return them as chat templates expect them: arguments as objects."""
    calls = fields.pop("tool_calls", None)
    calls = parse_json(calls) if isinstance(calls, str) else calls
    legacy = fields.pop("function_call", None)
    if legacy:
        calls = [*(cast("list[object]", calls) if isinstance(calls, list) else ()), {"function": legacy}]
    if not calls:
        return []
    if not isinstance(calls, list):
        raise UnreadableRecord(f"the tool calls of message {number} are not a list but {json_type(calls)}")
    return [_tool_call(number, call) for call in cast("list[object]", calls)]


def _tool_call(number: int, call: object) -> object:
    call = parse_json(call) if isinstance(call, str) else call
    whole = cast("dict[str, object]", call) if isinstance(call, dict) else {}
    inner = whole.get("function", whole)
    function = cast("dict[str, object]", inner) if isinstance(inner, dict) else {}
    if not isinstance(function.get("name"), str):
        raise UnreadableRecord(f"a tool call of message {number} names no function")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):  # OpenAI writes them as JSON text, templates write them as JSON again
        arguments = parse_json(arguments or "{}")
    function = {**function, "arguments": arguments}
    rest = {key: value for key, value in whole.items() if value is not None} if "function" in whole else {}
    return {"type": "function", **rest, "function": function}


def _content(number: int, key: str, value: object) -> str:
    """Return the content of a message: a text, or the texts of its parts."""
    name = f"{key} of message {number}"
    if not isinstance(value, list):
        return _text(name, value)
    texts: list[str] = []
    for part in cast("list[object]", value):
        fields = cast("dict[str, object]", part) if isinstance(part, dict) else {"type": "text", "text": part}
        kind = fields.get("type", "text")
        if kind not in _TEXT_PARTS:
            raise UnreadableRecord(
                f"message {number} has a part of type {kind!r}: only text is read from messages; images belong into a "
                "column of their own (the source's images_field), with <image> in the text"
            )
        texts.append(_text(name, fields.get("text")))
    return "".join(texts)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UnreadableRecord(f"field {name!r} is not a string but {json_type(value)}")
    surrogate = lone_surrogate(value)
    if surrogate is not None:
        raise UnreadableRecord(f"field {name!r} has half a surrogate pair at character {surrogate}")
    return value
