"""Chat templates: conversations rendered as text, with the ranges of their answers

Messages and a Jinja template go in, as transformers renders it; a text and ranges of its characters come out. An answer
is what the template marks with ``{% generation %}``; in a template without these marks, the content of an assistant's
message and the token that ends it. Invariants: the text is a function of messages and template alone, so a template
cannot read the date; no content becomes a special token.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

from vorox.core.errors import ConfigError, DataError
from vorox.core.installation import install_command
from vorox.data.documents import BadRecord, Document, Message, PreferencePair, Ranges, Record, UnreadableRecord
from vorox.data.text.conversations import messages_of

CHAT_TEMPLATE_NAME = "chat_template.jinja"

BUILT_IN: Final = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "plain": "{% for message in messages %}{{ message['role'] | capitalize + ': ' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}",
}
"""Templates by name; only those of chatml are special tokens."""

_JOINED = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)
"""The template of a preference pair of texts: prompt, answer, end of text."""

_START, _END = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, which mark answers while a text is rendered."""

_MARKS = re.compile(f"[{_START}{_END}]")
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
        """SHA-256 of everything that determines the text, in hex; part of the recipe of caches."""
        return hashlib.sha256(json.dumps([self.source, self.bos_token, self.eos_token]).encode()).hexdigest()

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> str:
        """Return the text of a conversation, as ``apply_chat_template`` of transformers does.

        Raises:
            UnreadableRecord: The template refuses the conversation, or a message spells a special token.
        """
        return _MARKS.sub("", self._render(messages, add_generation_prompt))

    def answer_ends(self) -> tuple[str, ...]:
        """Return the texts that end an answer: every special token, and what the template writes if that has none.

        Raises:
            UnreadableRecord: The template refuses a question with its answer.
        """
        answer, pattern = "An answer.", _any_of(self.special_tokens)
        after = self.render([Message("user", "A question."), Message("assistant", answer)]).rpartition(answer)[2]
        own = after.rstrip() if pattern is None or pattern.search(after) is None else ""
        return (*self.special_tokens, own) if own else self.special_tokens

    def render_answers(self, messages: Sequence[Message]) -> tuple[str, Ranges]:
        """Return the text of a conversation, and the ranges of its characters that are trained on.

        Raises:
            UnreadableRecord: As ``render``; or the template changes an answer, so it cannot be found in the text.
        """
        if _GENERATION.search(self.source):
            return _without_marks(self._render(messages))
        text = self._render(messages)
        for strip in (False, True):  # some templates remove the white space around a content
            marked = [_marked(message, strip) for message in messages]
            found, answers = _without_marks(self._render(marked))
            if found == text and len(answers) == sum(message.role == "assistant" for message in messages):
                return text, self._with_end_tokens(text, answers, marked)
        raise UnreadableRecord(
            "the chat template changes an answer, so it cannot be found in the text: mark answers in the template "
            "with {% generation %} and {% endgeneration %}"
        )

    def _with_end_tokens(self, text: str, answers: Ranges, marked: Sequence[Message]) -> Ranges:
        """Extend answers by what the template writes after an answer at the end of a conversation."""
        last = max(index for index, message in enumerate(marked) if message.role == "assistant")
        end = self._render(marked[: last + 1]).rpartition(_END)[2].rstrip()
        return tuple((start, stop + len(end) * text.startswith(end, stop)) for start, stop in answers)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        given = [{"role": message.role, "content": message.content} for message in messages]
        self._check_contents(messages)
        template = _compiled(self.source)
        try:
            return template.render(
                messages=given, tools=None, documents=None, add_generation_prompt=add_generation_prompt,
                bos_token=self.bos_token, eos_token=self.eos_token,
            )  # fmt: skip
        except Exception as error:  # a template may raise any exception
            raise UnreadableRecord(f"the chat template refuses the conversation: {error}") from error

    def _check_contents(self, messages: Sequence[Message]) -> None:
        pattern = _any_of(self.special_tokens)
        for number, message in enumerate(messages, 1):
            if pattern is not None and (found := pattern.search(message.content)):
                raise UnreadableRecord(f"message {number} spells the special token {found.group()!r}")


def rendered(record: Record, template: ChatTemplate | None) -> Record:
    """Return the record with its conversation rendered; other records unchanged."""
    if template is None or not isinstance(record, Document) or not record.messages:
        return record
    try:
        for number, message in enumerate(messages_of(record.messages), 1):
            if _MARKS.search(message.content):
                raise UnreadableRecord(f"message {number} has a noncharacter of Unicode, U+FDD0 or U+FDD1")
        rejected_start = 0
        if isinstance(record.messages, PreferencePair):
            text, answers, rejected_start = _render_pair(record.messages, template)
        else:
            text, answers = template.render_answers(record.messages)
        if not answers:
            raise UnreadableRecord("the chat template marks no answer")
    except UnreadableRecord as error:
        place = (record.file_index, record.ordinal, record.byte_offset, record.byte_length)
        return BadRecord(*place, None, str(error))
    return replace(record, text=text, answers=answers, messages=(), rejected_start=rejected_start)


def _render_pair(pair: PreferencePair, template: ChatTemplate) -> tuple[str, Ranges, int]:
    """Return the joined texts of both conversations, their answers, and where the rejected one starts.

    Raises:
        UnreadableRecord: As ``ChatTemplate.render_answers``; or the template marks other answers than the messages.
    """
    template = replace(template, source=_JOINED) if pair.is_text else template
    num_before = sum(message.role == "assistant" for message in pair.prompt)
    whole, found = "", list[tuple[int, int]]()
    rejected_start = 0
    for messages in (pair.chosen, pair.rejected):
        text, answers = template.render_answers((*pair.prompt, *messages))
        if len(answers) != num_before + sum(message.role == "assistant" for message in messages):
            raise UnreadableRecord("the chat template does not mark each answer, so those of the prompt are not known")
        rejected_start = len(whole)
        found += [(rejected_start + start, rejected_start + end) for start, end in answers[num_before:]]
        whole += text
    return whole, tuple(found), rejected_start


def read_chat_template(directory: Path) -> tuple[str | None, str]:
    """Return the chat template and the ``bos_token`` in a tokenizer's directory; ``None`` if it has no template.

    Raises:
        DataError: A file is not valid.
    """
    config: dict[str, Any] = {}
    file = directory / "tokenizer_config.json"
    try:
        if file.is_file():
            config = cast("dict[str, Any]", json.loads(file.read_bytes()))
        source: Any = config.get("chat_template")
        if isinstance(source, list):  # several templates by name
            named = cast("list[dict[str, str]]", source)
            source = next((entry["template"] for entry in named if entry["name"] == "default"), None)
        own = directory / CHAT_TEMPLATE_NAME
        if own.is_file():
            source = own.read_text(encoding="utf-8")
        bos: Any = config.get("bos_token")
        bos = cast("dict[str, Any]", bos).get("content") if isinstance(bos, dict) else bos
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError("The chat template of the tokenizer cannot be read", where=str(file)) from error
    return source if isinstance(source, str) else None, bos if isinstance(bos, str) else ""


def configured_source(setting: str) -> str:
    """Return the Jinja template that ``tokenizer.chat_template`` names.

    Raises:
        ConfigError: It is neither a built-in template nor a file.
    """
    if setting in BUILT_IN:
        return BUILT_IN[setting]
    try:
        return Path(setting).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{setting!r} is neither a chat template ({', '.join(BUILT_IN)}) nor a file that can be read",
            where="tokenizer.chat_template", hint="name one of them, or a file with a Jinja template",
        ) from error  # fmt: skip


def check_syntax(template: ChatTemplate) -> None:
    """Refuse a template that is not valid Jinja.

    Raises:
        ConfigError: The template has an error, or Jinja is not installed.
    """
    _compiled(template.source)


def _marked(message: Message, strip: bool) -> Message:
    if message.role != "assistant":
        return message
    content = message.content.strip() if strip else message.content
    return Message(message.role, f"{_START}{content}{_END}")


def _without_marks(text: str) -> tuple[str, Ranges]:
    """Return a text without its marks, and the ranges between them."""
    places = [match.start() - before for before, match in enumerate(_MARKS.finditer(text))]
    return _MARKS.sub("", text), tuple(zip(places[::2], places[1::2], strict=False))


@functools.lru_cache(maxsize=16)
def _any_of(tokens: tuple[str, ...]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, tokens))) if tokens else None


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> Any:
    """Compile a template.

    Raises:
        ConfigError: The template is not valid Jinja, or Jinja is not installed.
    """
    try:
        module = importlib.import_module("vorox.data.chat_jinja")
    except ImportError as error:
        raise ConfigError(
            "Chat templates need Jinja2, which is not installed", where="data.sources.chat_fields",
            hint=install_command("chat"),
        ) from error  # fmt: skip
    return module.compiled(source, _START, _END)
