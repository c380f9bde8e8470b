"""Column names of the field's data sets, and which columns change what a record means.

Detection and the readers share these names. A column that may change what a record means (a label, a weight, tools, a
system message, images, another conversation) is *guarded* where no setting of its source reads it: a record that has a
value there is unreadable, so that nothing of it is trained on without that column. ``ignored_fields`` names the guarded
columns that the user leaves out.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from vorox.core.config.schema_fields import nearest
from vorox.core.schema.data import SourceConfig
from vorox.data.documents import UnreadableRecord

TEXTS = ("text", "content", "body", "document", "article")
MESSAGES = ("messages", "conversations", "conversation")
QUESTIONS = ("instruction", "prompt", "question", "query", "problem", "user", "human", "inputs")
ANSWERS = ("output", "response", "completion", "answer", "answers", "solution", "target", "targets", "assistant")
PAIRS = (
    "chosen", "rejected", "preferred_output", "non_preferred_output", "chosen_response", "rejected_response",
)  # fmt: skip
_BAD = frozenset({"rejected", "non_preferred_output", "rejected_response"})
CONTEXTS = ("input", "context", "passage")
SYSTEMS = ("system", "system_prompt", "system_message")
HISTORIES = ("history",)
TOOLS = ("tools", "functions")
LABELS = ("label", "kto_tag")
"""Columns by which TRL and LLaMA-Factory mark good and bad completions."""

VERDICTS = ("is_correct", "correct", "is_accepted", "accepted")
"""Columns whose false values mark wrong answers; with other values, they are the answer or its number."""

IMAGES = ("image", "images")
_IMAGE_FILES = ("file_name", "file_names", "image_path", "image_paths", "image_file")
"""Columns with the paths of images beside the records, as in an image folder with a metadata.jsonl."""
_IMAGE_NAME = re.compile(r"\.(?:png|jpe?g|webp|gif|bmp|tiff?|ppm)$", re.IGNORECASE)

_WEIGHTS = ("weight", "weights", "loss_weight", "loss_weights", "sample_weight", "sample_weights")
CHANGING: Final = frozenset({
    *_WEIGHTS, "train", "mask", "loss_mask", "labels", "videos", "video", "audio", "audios",
    "reasoning", "reasoning_content", "thinking", "chain_of_thought", "cot", "rationale", "chat_template_kwargs",
    "assistant_mask", "include_in_loss", "loss_on",
    *CONTEXTS, *SYSTEMS, *HISTORIES, *TOOLS, *LABELS, *IMAGES,
})  # fmt: skip
"""Columns that change what a conversation means, besides its messages."""

CHOICES: Final = frozenset({
    "choices", "options", "endings", *"abcde",
    *(
        f"{stem}{separator}{mark}"
        for stem in ("option", "choice", "ending", "op", "sol", "answer") for separator in ("", "_")
        for mark in "abcde01234"
    ),
})  # fmt: skip
"""Columns with the possible answers of a question, without which its letter or number says nothing."""

_TARGETS = frozenset({*ANSWERS, "code", "canonical_solution", "summary", "highlights"})
"""Columns with what a model should write after the text beside them, as in MBPP."""

_TOKEN_MASKS = ("labels", "mask", "loss_mask")
"""Columns with the tokens or spans that are trained on."""

_SPEAKERS = ("role", "from", "speaker")
"""Columns by which a row is one message of a conversation in many rows, as in OpenAssistant's trees."""

_GUARDED_BESIDE_TEXT = frozenset({*_WEIGHTS, *MESSAGES, *PAIRS, *IMAGES, *_IMAGE_FILES, *_SPEAKERS, *_TOKEN_MASKS})
_GUARDED_BESIDE_CHATS = CHANGING | CHOICES | {*MESSAGES, *PAIRS, *_IMAGE_FILES}

ROLES: Final[Mapping[str, str]] = {
    "system": "system", "developer": "system", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "model": "assistant", "function_call": "assistant", "tool": "tool", "function": "tool",
    "observation": "tool", "ipython": "tool",
}  # fmt: skip
"""The role of a message, by its name in the record."""

_SPEAKING = frozenset({*ROLES, "prompter"})

FURTHER_FIELDS = ("system_field", "history_field", "tools_field", "label_field")
"""Settings of a source that name further columns of its conversations."""

_SETTINGS = {
    **dict.fromkeys(SYSTEMS, "system_field"), **dict.fromkeys(HISTORIES, "history_field"),
    **dict.fromkeys(TOOLS, "tools_field"), **dict.fromkeys(LABELS, "label_field"),
    **dict.fromkeys((*IMAGES, *_IMAGE_FILES), "images_field"),
}  # fmt: skip
"""The setting that reads a column, by the name of the column."""

OTHER_FILES: Final = (
    "if other files of the source have the column, rename it in this one, move this one away, or give it a source of "
    "its own instead"
)
"""Remedy for a file with other columns, for which no setting of its source must change."""

_PRINTED = re.compile(r"\s*\[?\s*\{\s*'(?:role|from|content|value)'\s*:")
"""Begins a message, or a list of them, as Python prints it."""

_WORDS = re.compile(r"\S+\s+\S+\s+\S+")


def named_columns(source: SourceConfig) -> Iterator[tuple[str, str]]:
    """Yield the columns that the settings of a source name, each with its setting."""
    one = "text_field" if source.tokens_field is None else "tokens_field"
    settings = ("chat_fields", *FURTHER_FIELDS) if source.chat_fields else (one,)
    for setting in (*settings, "images_field", "metadata_fields"):
        value: str | tuple[str, ...] | None = getattr(source, setting)
        for name in (value,) if isinstance(value, str) else value or ():
            yield name, setting


def missing_column(source: SourceConfig, name: str, setting: str, present: Sequence[str]) -> str:
    """Return what to set instead of a column that is missing: the most similar of those that are there."""
    near = nearest(name, [one for one in present if one != name], 1)
    value: str | tuple[str, ...] = getattr(source, setting)
    if not near:
        return f"set the source's {setting} to {'one' if isinstance(value, str) else 'some'} of them"
    renamed = near[0] if isinstance(value, str) else f"[{','.join(near[0] if one == name else one for one in value)}]"
    return f"set the source's {setting}={renamed}"


def missing_in_file(source: SourceConfig, name: str, setting: str, present: Sequence[str]) -> str:
    """Return the remedy for a file without a column; a setting of the source applies to all of its files."""
    return f"{missing_column(source, name, setting, present)}; {OTHER_FILES}"


def in_section(text: str, key: str) -> str:
    """Return a remedy with the key of its source in the configuration, such as ``data.sources.0``."""
    return text.replace("the source's ", f"{key}.").replace(" and set its ", f" and set {key}.")


@dataclass(frozen=True, slots=True)
class ReadColumns:
    """The columns of a source.

    Attributes:
        source: Its configuration.
        read: The columns of its text or conversations, in the order of the settings.
        guarded: Names of columns that it does not read and that may change what a record means.
        only_text: The column of its text, if neither conversations nor metadata are read.
    """

    source: SourceConfig
    read: tuple[str, ...]
    guarded: frozenset[str]
    only_text: str | None = None

    @classmethod
    def of(cls, source: SourceConfig) -> ReadColumns:
        """Return the columns of a source."""
        if source.tokens_field is not None:
            return cls(source, (source.tokens_field,), frozenset())
        further = [name for setting in FURTHER_FIELDS if (name := getattr(source, setting)) is not None]
        read = (*source.chat_fields, *further) if source.chat_fields else (source.text_field,)
        names = _GUARDED_BESIDE_CHATS if source.chat_fields else _GUARDED_BESIDE_TEXT
        if not source.chat_fields and source.text_field in TEXTS:  # another name is the user's choice among the columns
            names |= _TARGETS
        names = CHANGING | {*_IMAGE_FILES} if source.preference_pairs else names
        known = {*read, *(name.partition(".")[0] for name in read), source.images_field}
        known |= {*source.metadata_fields, *source.ignored_fields}
        spelled = {form for name in names for form in (name, name.capitalize(), name.title(), name.upper())}
        only_text = None if source.chat_fields or source.metadata_fields else source.text_field
        return cls(source, read, frozenset(spelled - known), only_text)

    def among(self, present: Iterable[str]) -> tuple[str, ...]:
        """Return the columns to read of a record or file: its own, and the guarded ones that are there."""
        return (*self.read, *(name for name in present if name in self.guarded))

    def check_guarded(self, values: Mapping[str, object], text: object = None) -> None:
        """Refuse a record with values in guarded columns.

        Args:
            values: The values of guarded columns, among others.
            text: The text of the record, if it is not among them.

        Raises:
            UnreadableRecord: It has some; the message names them all.
        """
        if self.guarded.isdisjoint(values):
            return
        names = [
            name
            for name, value in values.items()
            if name in self.guarded
            and changes_meaning(self.source, name, value, values.get(self.source.text_field, text))
        ]
        if names:
            what = f"column {names[0]!r}" if len(names) == 1 else f"columns {', '.join(map(repr, names))}"
            verb = "is" if len(names) == 1 else "are"
            raise UnreadableRecord(
                f"{what} may change what the record means and {verb} not read: set "
                f"{self.remedy(*names, of_texts=not any(map(is_messages, map(values.get, self.read))))}"
            )

    def remedy(self, name: str, *others: str, of_texts: bool = False) -> str:
        """Return the settings that read the first of some guarded columns, or leave all of them out.

        Args:
            name: The column.
            others: Further guarded columns.
            of_texts: Whether the columns that are read hold texts: pairs of texts have no messages besides.
        """
        setting, fields = _SETTINGS.get(name.lower()), self.source.chat_fields
        if self.source.preference_pairs and of_texts and setting != "images_field":
            setting = None
        reads = "" if setting is None else f"the source's {setting}={name}, or "
        if not fields and name.lower() in _TARGETS:
            reads = f"the source's chat_fields=[{self.source.text_field},{name}] to train on it as the answer, or "
        if name.lower() in CONTEXTS and len(fields) == 2 and not self.source.preference_pairs:
            reads = f"the source's chat_fields=[{fields[0]},{name},{fields[1]}] to read it as context, or "
        ignored = ",".join((*self.source.ignored_fields, name, *others))
        without = "it" if not others else "them"
        remedy = f"{reads}the source's ignored_fields=[{ignored}] to train without {without}"
        if not fields and name.lower() in _SPEAKERS:
            remedy += "; to train on its conversations, write each as one row with a list of messages {role, content}"
        return remedy


def changes_meaning(source: SourceConfig, name: str, value: object, text: object = None) -> bool:
    """Return whether a value of a guarded column changes what its record means, beside the text of the record."""
    value = without_nulls(value)
    if value is None or value in ("", [], {}):
        return False
    kind = name.lower()
    if kind in LABELS:
        return as_truth(value) is not True
    if kind in _IMAGE_FILES:
        paths = cast("list[object]", value) if isinstance(value, list) else [value]
        return any(isinstance(path, str) and _IMAGE_NAME.search(path) for path in paths)
    if not source.chat_fields and kind in _WEIGHTS:
        return _is_other_weight(value)
    if not source.chat_fields and kind in _SPEAKERS:
        return isinstance(value, str) and value.lower() in _SPEAKING
    if not source.chat_fields and kind in _TOKEN_MASKS:
        return isinstance(value, list)  # else the classes of a text
    if not source.chat_fields and kind in _TARGETS:
        is_part = isinstance(value, str) and isinstance(text, str) and value.strip() in text
        return is_prose(value) and not is_part  # the text of Alpaca repeats the answer
    if kind in CHOICES:
        return len(source.chat_fields) != 1  # messages have them inside
    if kind in MESSAGES:
        return is_messages(value)
    if kind in PAIRS and isinstance(value, bool):  # a flag of good and bad answers
        return value is (kind in _BAD)
    if kind in PAIRS or (kind in CONTEXTS and len(source.chat_fields) == 1):  # beside messages, a category
        return is_prose(value)
    return True


def _is_other_weight(value: object) -> bool:
    """Return whether a value is a number, or a list of numbers, other than 1 and NaN."""
    if isinstance(value, list):
        return any(map(_is_other_weight, cast("list[object]", value)))
    try:
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else 1.0
    except (ValueError, OverflowError):
        return False
    return number != 1 and not math.isnan(number)


def is_prose(value: object) -> bool:
    """Return whether a value is more than a category: several words, a list or an object."""
    return (
        _WORDS.search(value) is not None if isinstance(value, str) else isinstance(value, list | dict) and value != []
    )


def is_messages(value: object) -> bool:
    """Return whether a value is a list of messages or its JSON text, and not empty."""
    value = parse_json(value) if isinstance(value, str) else value
    messages = cast("Sequence[object]", value) if isinstance(value, list) else ()
    return bool(messages) and all(map(_is_message, messages))


def holds_messages(value: object) -> bool:
    """Return whether a text is messages, as JSON, inside an object as JSON, or as Python and numpy print them."""
    if not isinstance(value, str):
        return False
    whole = parse_json(value)
    inside = cast("Mapping[str, object]", whole).items() if isinstance(whole, dict) else ()
    return (
        is_messages(value)
        or _PRINTED.match(value) is not None
        or any(key in MESSAGES and is_messages(one) for key, one in inside)
    )


def roles_of(value: object) -> list[str | None]:
    """Return the roles of a list of messages or its JSON text, ``None`` for an unknown one; empty for another value."""
    value = parse_json(value) if isinstance(value, str) else value
    messages = cast("Sequence[Mapping[str, object]]", value) if is_messages(value) else ()
    return [ROLES.get(str(message.get("role", message.get("from")))) for message in messages]


def _is_message(value: object) -> bool:
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    role = fields.get("role", fields.get("from"))
    return isinstance(role, str) and (role in ROLES or "content" in fields or "value" in fields)


def is_call(value: object) -> bool:
    """Return whether a value is a call of a tool, ``{name, arguments}``."""
    fields = cast("dict[str, object]", value) if isinstance(value, dict) else {}
    return isinstance(fields.get("name"), str) and isinstance(fields.get("arguments"), dict | str)


def as_truth(value: object) -> bool | None:
    """Return a label or flag as a truth value: booleans, 0 and 1, also as text; ``None`` for anything else."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return bool(value) if value in (0, 1) else None
    return {"true": True, "1": True, "false": False, "0": False}.get(value.lower()) if isinstance(value, str) else None


def without_nulls(value: object) -> object:
    """Return a value without the null fields of its objects: every struct of a column has the fields of all others.

    Tables of structs have such nulls also where they are written as JSON. A JSON text within a value is left as it is.
    """
    top = [value]
    unread: list[dict[Any, object] | list[object]] = [top]  # no recursion: what others wrote may be nested deeply
    while unread:
        inside = unread.pop()
        for key, one in inside.items() if isinstance(inside, dict) else enumerate(inside):
            if isinstance(one, dict):
                fields = cast("dict[Any, object]", one)
                unread.append({name: inner for name, inner in fields.items() if inner is not None})
            elif isinstance(one, list):
                unread.append([*cast("list[object]", one)])
            else:
                continue
            inside[key] = unread[-1]
    return top[0]


def parse_json(text: str) -> object:
    """Return the value of a JSON text; any other text unchanged."""
    if text.lstrip()[:1] not in {"[", "{"}:
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
