"""Chat templates: conversations rendered as text, with the ranges of their answers

Messages and a Jinja template go in, as transformers renders it; a text and ranges of its characters come out. Templates
of others run in a child process with limits (``template_process.py``). An answer is what the template marks with
``{% generation %}``; in a template without these marks, the content of an assistant's message and the token that ends
it, or, where it calls tools or reasons, all that follows the generation prompt.
Invariants: the text is a function of messages and template alone, so a template cannot read the date; no content
becomes a special token; tool calls, tools and reasoning are in the text or the record is refused.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from vorox.core.config.config_for_text import CHATML_TOKENS
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.data.chat.answers import (
    ANSWER_KEYS,
    END_MARK,
    MARKS,
    REASONED,
    REASONING_KEYS,
    START_MARK,
    AnswerFinder,
    any_of,
    without_marks,
)
from vorox.data.chat.column_meaning import parse_json
from vorox.data.chat.conversations import messages_of
from vorox.data.chat.template_process import Reply, template_process
from vorox.data.documents import BadRecord, Document, Message, PreferencePair, Ranges, Record, UnreadableRecord
from vorox.data.size_groups import batch_by_size

BUILT_IN: Final = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "plain": "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
}
"""Templates by name; only those of chatml are special tokens."""

_CHATML_AS_TEXT: Final = BUILT_IN["chatml"].replace(
    f"'{CHATML_TOKENS[1]}'", f"(eos_token if message['role'] == 'assistant' else '{CHATML_TOKENS[1]}')"
)
"""chatml for a tokenizer without ``<|im_end|>``: an answer ends with a token at which completions and exports stop."""

_JOINED = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The template of a preference pair of texts: prompt, answer, end of text."""

_THOUGHT = re.compile(r"<think>.*?</think>", re.DOTALL)

_OTHER_TEMPLATE = (
    "set tokenizer.chat_template to a file with a template that does, such as the chat_template.jinja of a model with "
    "tool calls or reasoning"
)

_ANSWER_RULE: Final = "answers/2"
"""Version of how answers are found in a text."""

_BATCH_CHARACTERS, _BATCHES_AHEAD, _RECORD_CHARACTERS = 1 << 20, 3, 256
"""Text that the child renders at once, how many batches it has while further records are read, and what one costs."""

START_MARK_OF_CHAT = re.compile(r'(\{\{ (bos_token|"([^"\\]|\\.)*") \}\})?')
"""What ``configured_source`` puts before a built-in template."""

_GENERATION = re.compile(r"{%-?\s*generation\s*-?%}")


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template and the tokens that it inserts.

    Attributes:
        source: The Jinja template.
        bos_token: Its ``bos_token``; empty if the tokenizer has none.
        eos_token: Its ``eos_token``: the end-of-text token.
        special_tokens: All special tokens of the tokenizer; a message that spells one is refused.
    """

    source: str
    bos_token: str
    eos_token: str
    special_tokens: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """SHA-256 of everything that determines text and answers, in hex; part of the recipe of caches."""
        decides = [_ANSWER_RULE, self.source, self.bos_token, self.eos_token]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ChatTemplate:
        return cls(value["source"], value["bos_token"], value["eos_token"], tuple(value["special_tokens"]))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, as ``apply_chat_template`` of transformers does.

        Raises:
            UnreadableRecord: The template refuses the conversation, or a message spells a special token.
        """
        (reply,) = self._ask([{"messages": _plain(messages), "add_generation_prompt": add_generation_prompt}])
        return reply["text"]

    def answer_ends(self) -> tuple[str, ...]:
        """Return the texts that end an answer: every special token, and what the template writes if that has none.

        Raises:
            UnreadableRecord: The template refuses a question with its answer.
        """
        pattern, after = any_of(self.special_tokens), self._after_answer()
        own = after.rstrip() if pattern is None or pattern.search(after) is None else ""
        return (*self.special_tokens, own) if own else self.special_tokens

    def turn_end(self) -> str:
        """Return what the template writes after an answer; empty if that is nothing, or if it refuses an answer."""
        try:
            return self._after_answer().strip()
        except (UnreadableRecord, ConfigError):  # it refuses an answer; or Jinja is not installed
            return ""

    def _after_answer(self) -> str:
        answer = "An answer."
        return self.render([Message("user", "A question."), Message("assistant", answer)]).rpartition(answer)[2]

    def render_answers(self, messages: Sequence[Message], tools: Sequence[object] = ()) -> tuple[str, Ranges]:
        """Return the text of a conversation, and the ranges of its characters that are trained on.

        Raises:
            UnreadableRecord: As ``render``; or the template changes an answer, so it cannot be found in the text; or it
                does not write the tools, the tool calls or the reasoning.
        """
        (reply,) = self._ask([{"messages": _plain(messages), "tools": tools, "marks_answers": True}])
        return reply["text"], _ranges(reply["answers"])

    def check_syntax(self) -> None:
        """Refuse a template that is not valid Jinja.

        Raises:
            ConfigError: The template has an error, or Jinja is not installed.
            UnreadableRecord: Compiling it exceeds a limit.
        """
        self._ask([{}])

    def reply_to(self, request: Mapping[str, Any], /) -> Reply:
        """Answer a request in this process; see ``template_process.Reply``."""
        try:
            if not request:
                _compiled(self.source)
                return {}
            if "pair" in request:
                prompt, chosen, rejected, is_text = request["pair"]
                pair = PreferencePair(_messages(prompt), _messages(chosen), _messages(rejected), is_text)
                text, answers, rejected_start = _render_pair(pair, self, request["tools"])
                return {"text": text, "answers": answers, "rejected_start": rejected_start}
            if "marks_answers" in request:
                text, answers = self.answers_here(_messages(request["messages"]), request["tools"])
                return {"text": text, "answers": answers}
            messages = _messages(request["messages"])
            return {"text": MARKS.sub("", self._render(messages, request["add_generation_prompt"]))}
        except UnreadableRecord as error:
            return {"error": str(error)}

    def _ask(self, requests: Sequence[Mapping[str, Any]]) -> list[Reply]:
        """Return the replies to some requests, from the child unless the template is Vorox's own."""
        if self.is_own:
            replies = [self.reply_to(request) for request in requests]
        else:
            process = template_process()
            replies = process.replies(self, requests, process.submit(self, requests))
        return [_accepted(reply) for reply in replies]

    @property
    def built_in_name(self) -> str | None:
        """The name of a template of ``BUILT_IN``, with what ``configured_source`` changes; ``None`` for another."""
        for name, source in (*BUILT_IN.items(), ("chatml", _CHATML_AS_TEXT)):
            if self.source.endswith(source) and START_MARK_OF_CHAT.fullmatch(self.source.removesuffix(source)):
                return name
        return None

    @property
    def is_own(self) -> bool:
        """Whether Vorox wrote the template."""
        return self.source == _JOINED or self.built_in_name is not None

    def answers_here(self, messages: Sequence[Message], tools: Sequence[object]) -> tuple[str, Ranges]:
        """Return what ``render_answers`` does, in this process."""
        messages = self._with_known_reasoning(messages)
        self._check_understood(messages, tools)
        text = self._render(messages, tools=tools)
        if _GENERATION.search(self.source):
            text, answers = without_marks(text)
        else:
            finder = AnswerFinder(self._render, REASONED in self.source, self.special_tokens)
            answers = finder.find(text, messages, tools)
        self._check_written(text, messages, tools)
        given = [message.is_trained for message in messages if message.role == "assistant"]
        if all(given):
            return text, answers
        if len(answers) != len(given):
            raise UnreadableRecord(
                "the chat template does not mark each answer, so those with the weight 0 are not known"
            )
        return text, tuple(one for one, is_trained in zip(answers, given, strict=True) if is_trained)

    def _with_known_reasoning(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages whose reasoning has the name that the template reads, if it reads one of the usual names."""
        known = next((key for key in REASONING_KEYS if self._names(key)), None)
        if known is None:
            return messages
        return [
            one._replace(further={known if key in REASONING_KEYS and not self._names(key) else key: value
                                  for key, value in one.further.items()})
            for one in messages
        ]  # fmt: skip

    def _names(self, key: str) -> bool:
        """Whether the template reads a field: ``thinking`` is no part of ``enable_thinking``."""
        return re.search(rf"(?<!\w){key}(?!\w)", self.source) is not None

    def _check_understood(self, messages: Sequence[Message], tools: Sequence[object]) -> None:
        """Refuse a conversation with fields that the template does not name."""
        given = [("the record", "tools")] if tools else []
        for number, message in enumerate(messages, 1):
            given += [(f"message {number}", key) for key in sorted(ANSWER_KEYS) if message.further.get(key)]
        for what, key in given:
            if not self._names(key):
                raise UnreadableRecord(f"{what} has {key!r}, which the chat template does not write: {_OTHER_TEMPLATE}")

    def _check_written(self, text: str, messages: Sequence[Message], tools: Sequence[object]) -> None:
        """Refuse a conversation of which the template leaves out a tool, a call, a message or its last reasoning."""
        names = [("a tool", _function_name(tool)) for tool in tools]
        for number, message in enumerate(messages, 1):
            calls = cast("Sequence[object]", message.further.get("tool_calls", ()))
            names += [(f"the tool call of message {number}", _function_name(call)) for call in calls]
        counts: dict[str, int] = {}
        for what, name in names:
            counts[name] = counts.get(name, 0) + 1
            if text.count(name) < counts[name]:
                raise UnreadableRecord(f"the chat template does not write {what}, {name!r}: {_OTHER_TEMPLATE}")
        self._check_arrived(messages, tools)
        last_question = max((index for index, one in enumerate(messages) if one.role == "user"), default=0)
        for index, message in enumerate(messages):
            written = [message.content] if message.role == "user" else []
            if message.role == "assistant":  # without calls, its content is an answer, which is found
                written = [_THOUGHT.sub("", message.content)] if "tool_calls" in message.further else []
            if index > last_question:  # templates leave out the reasoning of earlier turns
                written += [str(message.further.get(key) or "") for key in REASONING_KEYS]
            if not all(_is_written(part, text) for part in written):
                raise UnreadableRecord(
                    f"the chat template does not write all of message {index + 1}, of role {message.role!r}: "
                    f"{_OTHER_TEMPLATE}"
                )

    def _check_arrived(self, messages: Sequence[Message], tools: Sequence[object]) -> None:
        """Refuse a conversation of which the template leaves out a system message or a result, by marks in them."""
        numbers = [index for index, one in enumerate(messages) if one.role not in {"user", "assistant"} and one.content]
        if not numbers:
            return
        marked = [
            one._replace(content=f"{one.content}{END_MARK}") if index in numbers else one
            for index, one in enumerate(messages)
        ]
        if self._render(marked, tools=tools).count(END_MARK) < len(numbers):
            roles = ", ".join(sorted({messages[index].role for index in numbers}))
            raise UnreadableRecord(f"the chat template does not write all messages of role {roles}: {_OTHER_TEMPLATE}")

    def _render(
        self, messages: Sequence[Message], add_generation_prompt: bool = False, *, tools: Sequence[object] = ()
    ) -> str:
        given = [{"role": message.role, "content": message.content, **message.further} for message in messages]
        self._check_contents(messages, tools)
        template = _compiled(self.source)
        try:
            return template.render(
                messages=given, tools=list(tools) or None, documents=None,
                add_generation_prompt=add_generation_prompt, bos_token=self.bos_token, eos_token=self.eos_token,
            )  # fmt: skip
        except MemoryError:
            raise
        except Exception as error:  # a template may raise any exception
            raise UnreadableRecord(
                f"the chat template refuses the conversation: {error}; set tokenizer.chat_template to one that takes it"
            ) from error

    def _check_contents(self, messages: Sequence[Message], tools: Sequence[object]) -> None:
        pattern = any_of(self.special_tokens)
        if pattern is None:
            return
        for what, text in _texts_of(messages, tools):
            if found := pattern.search(text):
                raise UnreadableRecord(f"{what} spells the special token {found.group()!r}")


def rendered(record: Record, template: ChatTemplate | None) -> Record:
    """Return the record with its conversation rendered; other records unchanged."""
    return next(rendered_all([record], template))


def rendered_all(records: Iterable[Record], template: ChatTemplate | None) -> Iterator[Record]:
    """Yield the records in order, their conversations rendered; a template of others gets them in batches."""
    if template is None:
        yield from records
        return
    if template.is_own:
        for record in records:
            request = _request(record)
            yield record if request is None else _finished(record, request, template.reply_to(request))
        return
    process, waiting = template_process(), deque[tuple[list[Record], list[Mapping[str, Any]], Future[list[Reply]]]]()

    def finish() -> Iterator[Record]:
        batch, requests, future = waiting.popleft()
        replies = iter(process.replies(template, requests, future))
        given = iter(requests)
        for record in batch:
            is_conversation = isinstance(record, Document) and bool(record.messages)
            yield _finished(record, next(given), next(replies)) if is_conversation else record

    for batch in batch_by_size(((record, _characters(record)) for record in records), _BATCH_CHARACTERS):
        requests = [request for record in batch if (request := _request(record)) is not None]
        waiting.append((batch, requests, process.submit(template, requests)))
        if len(waiting) > _BATCHES_AHEAD:
            yield from finish()
    while waiting:
        yield from finish()


def _characters(record: Record) -> int:
    messages = messages_of(record.messages) if isinstance(record, Document) and record.messages else ()
    return _RECORD_CHARACTERS + sum(len(message.content) for message in messages)


def _request(record: Record) -> Mapping[str, Any] | None:
    """Return what ``ChatTemplate.reply_to`` gets for a record; ``None`` for other records than conversations."""
    if not isinstance(record, Document) or not record.messages:
        return None
    if isinstance(pair := record.messages, PreferencePair):
        prompt, chosen, rejected = map(_plain, (pair.prompt, pair.chosen, pair.rejected))
        return {"pair": [prompt, chosen, rejected, pair.is_text], "tools": record.tools}
    return {"messages": _plain(record.messages), "tools": record.tools, "marks_answers": True}


def _finished(record: Record, request: Mapping[str, Any], reply: Reply) -> Record:
    """Return a record with its text, or as a bad one."""
    assert isinstance(record, Document)
    try:
        for what, text in _texts_of(messages_of(record.messages), record.tools):
            if MARKS.search(text):
                raise UnreadableRecord(f"{what} has a noncharacter of Unicode, U+FDD0 or U+FDD1")
        answers = _ranges(_accepted(reply)["answers"])
        if not answers:
            raise UnreadableRecord("the chat template marks no answer")
    except UnreadableRecord as error:
        place = (record.file_index, record.ordinal, record.byte_offset, record.byte_length)
        return BadRecord(*place, None, str(error))
    is_started = "pair" in request and request["pair"][-1]
    return replace(
        record, text=reply["text"], answers=answers, messages=(), tools=(),
        rejected_start=reply.get("rejected_start", 0), is_started=is_started,
    )  # fmt: skip


def _accepted(reply: Reply) -> Reply:
    """Return a reply that is no refusal.

    Raises:
        UnreadableRecord: The conversation is refused.
        ConfigError: The template is wrong.
    """
    if "error" in reply:
        raise UnreadableRecord(str(reply["error"]))
    if "fault" in reply:
        raise ConfigError(**reply["fault"])
    return reply


def _ranges(pairs: Sequence[Sequence[int]]) -> Ranges:
    return tuple((int(start), int(end)) for start, end in pairs)


def _plain(messages: Sequence[Message]) -> list[list[Any]]:
    """Return messages as values of JSON."""
    return [[one.role, one.content, dict(one.further), one.is_trained] for one in messages]


def _messages(plain: Sequence[Sequence[Any]]) -> tuple[Message, ...]:
    return tuple(Message(*fields) for fields in plain)


def _texts_of(messages: Sequence[Message], tools: Sequence[object]) -> Iterator[tuple[str, str]]:
    """Yield every text that a template may write, with the message that it is from."""
    for number, message in enumerate(messages, 1):
        yield f"message {number}", message.content
        if message.further:
            yield f"message {number}", json.dumps(message.further, ensure_ascii=False, default=str)
    if tools:
        yield "a tool", json.dumps(tools, ensure_ascii=False, default=str)


def _is_written(content: str, text: str) -> bool:
    """Whether a text has a content: each line, or all of it as JSON; JSON in it may be written anew."""
    if all(line.strip() in text for line in content.splitlines()):
        return True
    escaped = (json.dumps(content.strip(), ensure_ascii=is_ascii)[1:-1] for is_ascii in (False, True))
    return any(one in text for one in escaped) or not isinstance(parse_json(content), str)


def _function_name(tool: object) -> str:
    """Return the name of a tool or of a call of one; empty if it has none."""
    whole = cast("dict[str, Any]", tool) if isinstance(tool, dict) else {}
    inner: Any = whole.get("function", whole)
    return str(cast("dict[str, Any]", inner).get("name", "")) if isinstance(inner, dict) else ""


def _render_pair(
    pair: PreferencePair, template: ChatTemplate, tools: Sequence[object] = ()
) -> tuple[str, Ranges, int]:  # fmt: skip
    """Return the joined texts of both conversations, their answers, and where the rejected one starts.

    Raises:
        UnreadableRecord: As ``ChatTemplate.render_answers``; or the template marks other answers than the messages.
    """
    template = replace(template, source=_JOINED) if pair.is_text else template
    prompt = [message._replace(is_trained=True) for message in pair.prompt]  # its answers are not trained on anyway
    num_before = sum(message.role == "assistant" for message in prompt)
    whole, found = "", list[tuple[int, int]]()
    rejected_start = 0
    for messages in (pair.chosen, pair.rejected):
        text, answers = template.answers_here((*prompt, *messages), tools)
        if len(answers) != num_before + sum(message.role == "assistant" for message in messages):
            raise UnreadableRecord("the chat template does not mark each answer, so those of the prompt are not known")
        rejected_start = len(whole)
        found += [(rejected_start + start, rejected_start + end) for start, end in answers[num_before:]]
        whole += text
    return whole, tuple(found), rejected_start


def configured_source(setting: str, start: str = "", *, has_turn_end: bool = True) -> str:
    """Return the Jinja template that ``tokenizer.chat_template`` names.

    Args:
        setting: The value of the setting.
        start: What a built-in template writes first: BOS, for a tokenizer that adds it to texts.
        has_turn_end: Whether ``<|im_end|>`` is a special token of the tokenizer. Without it, an answer of chatml ends
            with the end of text.

    Raises:
        ConfigError: It is neither a built-in template nor a file.
    """
    if setting in BUILT_IN:
        return start + (_CHATML_AS_TEXT if setting == "chatml" and not has_turn_end else BUILT_IN[setting])
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting!r} is neither a chat template ({', '.join(BUILT_IN)}) nor a file that can be read",
            where="tokenizer.chat_template", hint="name one of them, or a file with a Jinja template",
        ) from error  # fmt: skip


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """Compile a template.

    Raises:
        ConfigError: The template is not valid Jinja, or Jinja is not installed.
    """
    try:
        module = importlib.import_module("vorox.data.chat.jinja")
    except ImportError as error:
        raise ConfigError(
            "Chat templates need Jinja2, which is not installed", where="data.sources.chat_fields",
            hint=install_command("chat"),
        ) from error  # fmt: skip
    return module.compiled(source, START_MARK, END_MARK)
