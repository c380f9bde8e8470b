"""Column detection: from the first records of a source to what its columns mean.

Records as the readers yield them go in; settings of the source come out, with the columns that are not read. Only
names and values at the top level count. Invariants: a column is used only if both its name and its values fit the use;
a column that changes what a record means and is not understood is an error with its name and the setting to add.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from vorox.core.errors import ConfigError
from vorox.core.schema.data import SourceConfig
from vorox.data.chat.column_meaning import (
    ANSWERS,
    CHANGING,
    CHOICES,
    CONTEXTS,
    HISTORIES,
    IMAGES,
    LABELS,
    MESSAGES,
    PAIRS,
    QUESTIONS,
    SYSTEMS,
    TEXTS,
    TOOLS,
    VERDICTS,
    ReadColumns,
    as_truth,
    changes_meaning,
    holds_messages,
    in_section,
    is_call,
    is_messages,
    is_prose,
    parse_json,
    roles_of,
    without_nulls,
)

_DESCRIBING: Final = frozenset({
    "id", "_id", "uuid", "idx", "index", "key", "hash", "title", "name", "url", "uri", "link", "source", "source_id",
    "dataset", "subset", "config", "split", "category", "categories", "subcategory", "domain", "topic", "topics",
    "type", "task", "task_type", "task_name", "tags", "lang", "language", "languages", "license", "author", "authors",
    "date",
    "created", "created_at", "timestamp", "time", "model", "model_name", "generator", "meta", "metadata", "score",
    "scores", "rating", "ratings", "difficulty", "level", "quality", "prompt_id", "conversation_id", "question_id",
    "answer_id", "score_chosen", "score_rejected", "file", "path", "file_name", "version", "annotator", "user_id",
})  # fmt: skip
"""Columns that describe a record and are no part of it."""

_LETTER = re.compile(r"[^\W\d_]")


@dataclass(frozen=True, slots=True)
class Columns:
    """What the columns of a source mean.

    Attributes:
        settings: Settings of the source: ``text_field``, or ``chat_fields`` and those that belong to it.
        unread: The columns that are left out.
    """

    settings: Mapping[str, Any]
    unread: tuple[str, ...]


def detect_columns(rows: Sequence[Mapping[str, object]], where: str, given: Mapping[str, Any]) -> Columns:
    """Return what the columns of a source mean, from its first records.

    Args:
        rows: The records.
        where: Their file, for messages.
        given: The settings of the user, which decide what they name.

    Raises:
        ConfigError: The columns are ambiguous, none holds text, or one is not understood.
    """
    return _Detection(rows, where, given).run()


class _Detection:
    def __init__(self, rows: Sequence[Mapping[str, object]], where: str, given: Mapping[str, Any]) -> None:
        self._where, self._given = where, given
        self._rows = rows = [{name: without_nulls(value) for name, value in row.items()} for row in rows]
        self._ignored: Sequence[str] = given.get("ignored_fields", ())
        present = dict.fromkeys(name for row in rows for name in row)
        self._left_out = [name for name in present if name in self._ignored]
        names = [name for name in present if name not in self._ignored]
        self._values = {name: [row[name] for row in rows if row.get(name) is not None] for name in names}
        self._used: set[str] = set()
        self._repeated: set[str] = set()  # columns that say what others say

    def run(self) -> Columns:
        is_named = bool(self._given.keys() & {"text_field", "chat_fields"})
        settings = {} if is_named else self._settings()
        self._check_labels(self._given.get("chat_fields", ()))
        read = ReadColumns.of(SourceConfig.model_validate({**self._given, **settings, "paths": ("-",)}))
        used = {*read.read, *read.source.metadata_fields, read.source.images_field}
        unread = [name for name in self._values if name not in used]
        left_out = [
            name for name in unread
            if name in read.guarded and any(
                changes_meaning(read.source, name, row[name], row.get(read.source.text_field))
                for row in self._rows if row.get(name) is not None
            )
        ]  # fmt: skip
        if left_out and not is_named:
            raise self._not_understood(left_out[0], in_section(read.remedy(*left_out), "data.sources.0"))
        if left_out:  # because the user named the columns to read
            settings["ignored_fields"] = [*self._ignored, *left_out]
        return Columns(settings, (*unread, *self._left_out))

    def _settings(self) -> dict[str, Any]:
        """Return the settings of a source of which the user named no column."""
        settings = self._kind()
        self._check_texts(settings.get("chat_fields") or [settings["text_field"]])
        if "images_field" not in self._given:
            for name in self._named(IMAGES, self._has_value):
                raise self._not_understood(name, f"data.sources.0.images_field={name} to read its images")
        return settings

    def _check_texts(self, fields: Sequence[str]) -> None:
        """Refuse texts that are messages, as tables in csv have them: read as texts, their JSON is trained on."""
        for name in fields:
            is_whole = fields == [name] and self._is_messages(name)
            values = [value for value in self._values[name] if value != ""]
            if not is_whole and values and all(map(holds_messages, values)):
                raise ConfigError(
                    f"Column {name!r} holds messages written as texts, which would be read as texts", where=self._where,
                    hint="write the lists themselves: to_json(orient='records', lines=True) or to_parquet instead of "
                    "to_csv, after json.loads(TEXT) of each that is JSON",
                )  # fmt: skip

    def _check_labels(self, fields: Sequence[str]) -> None:
        """Refuse good and bad answers of which nothing says what they mean."""
        labels = [*self._named(LABELS, self._is_label), *self._named(VERDICTS, self._is_verdict)]
        labels = [name for name in labels if name not in fields]
        if fields and labels and "label_field" not in self._given:
            raise self._error(
                f"Column {labels[0]!r} marks good and bad answers (KTO), and a bad one would be trained on",
                f"data.sources.0.label_field={labels[0]} to train on the good ones only, or "
                f"data.sources.0.ignored_fields=[{labels[0]}] to train on all",
            )

    def _kind(self) -> dict[str, Any]:
        pair = self._pair()
        if pair:
            return pair
        sides = [name for name in self._named(PAIRS) if self._has_value(name)]
        if len(sides) > 1:
            raise self._error(
                f"The records hold preference pairs in a form that is not read: {', '.join(map(repr, sides))}",
                "data.sources.0.preference_pairs=true after writing them as columns prompt, chosen and rejected, "
                "each a text or a list of messages",
            )
        chats, texts = self._conversation(), self._named(TEXTS[:1], self._is_text)
        if chats and texts and not self._is_rendering(texts[0], chats["chat_fields"]):
            fields = ",".join(chats["chat_fields"])
            raise self._error(
                f"The text is ambiguous: {texts[0]!r} holds text, and {', '.join(map(repr, chats['chat_fields']))} "
                "conversations",
                f"data.sources.0.text_field={texts[0]}, or data.sources.0.chat_fields=[{fields}]",
            )
        if chats:
            return chats
        text = self._text()
        for name in self._values if text.lower() in QUESTIONS else ():
            if name != text and self._is_prose(name):
                raise self._not_understood(name, f"data.sources.0.text_field={text} to train on {text!r} alone")
        return {"text_field": self._use(text)}

    # Conversations

    def _conversation(self) -> dict[str, Any]:
        """Return the settings of a conversation; empty if the records hold none."""
        found = self._named(MESSAGES, self._is_messages)
        sides = [] if found else self._sides()
        if not found and not sides:
            found = [name for name in self._values if self._is_messages(name)]
        prompts = [name for name in found if name.lower() not in ANSWERS and self._unanswered(name)]
        if len(found) == 2 and len(prompts) == 1 and self._named(ANSWERS, found.__contains__):
            found = prompts
        if len(found) > 1:
            options = " or ".join(f"data.sources.0.chat_fields=[{name}]" for name in found)
            raise self._error(f"Several columns hold messages: {', '.join(found)}", options)
        fields = [found[0], *self._answer_to(found[0])] if found else sides
        if len(fields) == 2 and self._is_messages(fields[1]) and self._starts_with(*fields):
            self._repeated.add(fields[0])
            fields = fields[1:]
        for name in fields:
            self._use(name)
        return {"chat_fields": fields, **self._further(fields, is_whole=len(fields) == 1)} if fields else {}

    def _unanswered(self, name: str) -> list[Mapping[str, object]]:
        """Return the records in which the messages of a column end with a question, or with the result of a tool."""
        return [row for row in self._rows if roles_of(row.get(name))[-1:] in (["user"], ["tool"])]

    def _answer_to(self, messages: str) -> list[str]:
        """Return the column that answers messages, if these end with the user.

        Raises:
            ConfigError: Several may be it, or one with an unknown name; or only some of the messages end so.
        """
        rows = self._unanswered(messages)
        is_prompt = len(rows) == sum(bool(roles_of(row.get(messages))) for row in self._rows)
        further = [
            name for name in self._values
            if any(row.get(name) not in (None, "", [], {}) for row in rows) and not self._is_said(name, [messages])
        ]  # fmt: skip
        answers = [name for name in self._named(ANSWERS) if name in further]
        if is_prompt and len(answers) == 1 and self._is_answer(answers[0]):
            return answers
        described = {*_DESCRIBING, *CHANGING, *PAIRS}
        others = [name for name in further if name.lower() not in described and self._is_prose(name)]
        candidates = answers or (others if is_prompt else [])
        if not candidates:
            return []
        remedies: list[str] = []
        if is_prompt and self._is_answer(candidates[0]):
            remedies.append(f"data.sources.0.chat_fields=[{messages},{candidates[0]}] to train on it")
        if any("assistant" in roles_of(row.get(messages)) for row in self._rows):
            remedies.append(f"data.sources.0.chat_fields=[{messages}] to train on the answers within {messages!r} only")
        raise self._error(
            f"{messages!r} ends with the user, and the answer may be in {', '.join(map(repr, candidates[:8]))}",
            ", or ".join(remedies) or f"the answer to the end of {messages!r} in the data",
        )

    def _sides(self) -> list[str]:
        """Return the columns of question, context and answer; empty if there are none."""
        answers, questions = self._named(ANSWERS, self._is_answer), self._named(QUESTIONS, self._is_side)
        contexts = self._named(CONTEXTS, self._is_optional_text)
        if not questions and "input" in contexts:
            questions = ["input"]
            contexts.remove("input")
        if not questions or not answers:
            return []
        if len(questions) > 1 or len(answers) > 1 or len(contexts) > 1:
            every = ", ".join(map(repr, (*questions, *contexts, *answers)))
            raise self._error(
                f"The columns of question and answer are ambiguous: {every}",
                f"data.sources.0.chat_fields=[{questions[0]},{answers[0]}], or the columns of question, context and "
                "answer",
            )
        return [questions[0], *contexts, answers[0]]

    def _further(self, fields: Sequence[str], *, is_whole: bool) -> dict[str, Any]:
        """Return the settings for the columns beside a conversation.

        Args:
            fields: The columns of the conversation.
            is_whole: Whether these hold whole messages, so that other text only describes them.
        """
        settings: dict[str, Any] = {}
        for setting, names, fits in (
            ("system_field", SYSTEMS, self._is_optional_text),
            ("history_field", HISTORIES, self._is_history),
            ("tools_field", TOOLS, self._is_tools),
        ):
            found = [name for name in self._named(names, fits) if name not in fields]
            if setting not in self._given and found and self._has_value(found[0]):
                settings[setting] = self._use(found[0])
        self._check_labels(fields)
        read = "".join(f" data.sources.0.{setting}={name}" for setting, name in settings.items())
        plain = f"data.sources.0.chat_fields=[{','.join(fields)}]{read} to leave it out"
        for name in self._values:
            if name in self._used | self._repeated or name in self._given.values() or not self._has_value(name):
                continue
            if name.lower() in CHOICES and not is_whole:
                raise self._not_understood(name, plain)
            changes = name.lower() in CHANGING and name not in self._named(IMAGES)
            if changes and not (is_whole and name.lower() in {"input", *CONTEXTS} and not self._is_prose(name)):
                raise self._not_understood(name, self._as_context(name, fields, plain))
            is_repeated = self._is_rendering(name, fields) or self._is_said(name, fields[:1])
            if not is_whole and name.lower() not in _DESCRIBING and self._is_prose(name) and not is_repeated:
                raise self._not_understood(name, self._as_context(name, fields, plain))
        return settings

    def _as_context(self, name: str, fields: Sequence[str], plain: str) -> str:
        if len(fields) != 2 or not self._is_optional_text(name) or self._is_messages(fields[0]):
            return plain
        return f"data.sources.0.chat_fields=[{fields[0]},{name},{fields[1]}] to read it as context, or {plain}"

    def _pair(self) -> dict[str, Any]:
        """Return the settings of preference pairs; empty if the records hold none."""
        both = [name for name in ("chosen", "rejected") if self._is_side(name)]
        if len(both) < 2:
            return {}
        fields = [*self._prompt(both), *both]
        for name in fields:
            self._use(name)
        settings: dict[str, Any] = {"chat_fields": fields, "preference_pairs": True}
        for name in self._values:
            if name in self._used | self._repeated or not self._has_value(name):
                continue
            if name.lower() in SYSTEMS and self._is_messages("chosen") and "system_field" not in self._given:
                settings["system_field"] = self._use(name)
            elif name.lower() in TOOLS and self._is_messages("chosen") and self._is_tools(name):
                settings["tools_field"] = self._use(name)
            elif (name.lower() in CHANGING and name not in self._named(IMAGES)) or (
                name.lower() not in _DESCRIBING and self._is_prose(name)
                and not (name.lower() in MESSAGES and self._is_said(name, fields[:-1]))
                and not any(self._is_rendering(name, [field]) for field in both)
            ):  # fmt: skip
                chosen = ",".join(fields)
                raise self._not_understood(
                    name, f"data.sources.0.preference_pairs=true data.sources.0.chat_fields=[{chosen}] to leave it out"
                )
        return settings

    def _prompt(self, both: Sequence[str]) -> list[str]:
        """Return the column with the prompt of preference pairs; empty if both answers start with it.

        Raises:
            ConfigError: Several may be it, the answers may repeat it, or it and they are not both texts or messages.
        """
        questions, are_messages = self._named(QUESTIONS, self._is_side), self._is_messages(both[0])
        firsts = {roles[0] for name in both for value in self._values[name] if (roles := roles_of(value))}
        if are_messages:  # whole conversations, which start with the prompt
            repeated = [name for name in questions if all(self._starts_with(name, side) for side in both)]
            self._repeated.update(repeated)
            questions = [name for name in questions if name not in repeated]
        talks = [name for name in self._values if name not in both and self._unanswered(name)]
        talks = [name for name in talks if name not in self._repeated and not self._is_said(name, both[:1])]
        if not questions and len(talks) == 1 and firsts <= {"assistant"}:
            questions = talks
        whole = f"data.sources.0.preference_pairs=true data.sources.0.chat_fields=[{','.join(both)}]"
        if len(questions) > 1:
            fields = ",".join([*([] if are_messages else questions[:1]), *both])
            raise self._error(
                f"The prompt of the pairs is ambiguous: {', '.join(map(repr, questions))}",
                f"data.sources.0.preference_pairs=true data.sources.0.chat_fields=[{fields}]",
            )
        if not questions:
            return []
        apart = f"data.sources.0.preference_pairs=true data.sources.0.chat_fields=[{','.join([questions[0], *both])}]"
        if are_messages and not self._is_messages(questions[0]):
            raise self._not_understood(questions[0], "the prompt to both lists of messages in the data")
        if not are_messages and self._is_messages(questions[0]):
            raise self._not_understood(
                questions[0],
                f"{both[0]} and {both[1]} as lists of messages {{role: assistant, content: ...}} to the data: "
                f"{questions[0]!r} is their prompt, and a pair is all texts or all lists",
            )
        if (self._unanswered(questions[0]) and not firsts <= {"assistant"}) or self._are_begun(questions[0], both):
            raise self._error(
                f"{both[0]!r} and {both[1]!r} may repeat the prompt {questions[0]!r}",
                f"{whole} to read it from them, or {apart} to write it before both",
            )
        return questions

    # Text

    def _text(self) -> str:
        """Return the column with the text.

        Raises:
            ConfigError: It is ambiguous, or there is none.
        """
        for name in self._named(TEXTS[:1], self._is_string):
            return name
        candidates = [
            name for name in self._values
            if self._is_text(name) and not name.startswith(("Unnamed: ", "__index_level_"))
        ]  # fmt: skip
        usual = [name for name in candidates if name.lower() in TEXTS]
        rest = [name for name in candidates if name.lower() not in _DESCRIBING and self._is_prose(name)]
        if len(usual) == 1 and set(rest) <= set(usual):
            return usual[0]
        if len(candidates) == 1:
            self._check_alone(candidates[0])
            return candidates[0]
        if candidates:
            shown = [name for name in candidates if name in rest] or candidates
            raise self._error(
                f"The text column is ambiguous: {', '.join(candidates[:8])} hold text",
                f"data.sources.0.text_field={shown[0]}, or another column; a question and its answer are "
                "data.sources.0.chat_fields=[QUESTION,ANSWER]",
            )
        raise self._no_text()

    def _check_alone(self, text: str) -> None:
        """Refuse a column of text, not named as one, beside lists or objects that may be what is meant; questions."""
        further = [name for name in self._values if name.lower() not in _DESCRIBING and self._is_prose(name)]
        others = [] if text.lower() in TEXTS else [name for name in further if name != text]
        if others:
            held = ", ".join(f"{name!r} ({self._value_type(name)})" for name in others[:8])
            raise self._error(
                f"The text is ambiguous: {text!r} holds text, beside {held}",
                f"data.sources.0.text_field={text} to train on {text!r} alone; conversations are lists of messages "
                "{role, content} in one column",
            )

        if text.lower() in QUESTIONS:
            raise self._error(
                f"{text!r} holds questions, without answers to train on",
                f"data.sources.0.text_field={text} to train on them as documents",
            )

    def _no_text(self) -> ConfigError:
        inner = next(self._inner_texts(), None)
        held = ", ".join(f"{name!r} ({self._value_type(name)})" for name in list(self._values)[:8])
        if inner is not None:
            hint = f"data.sources.0.text_field={inner}, if that is the text"
        else:
            hint = "data.sources.0.text_field=COLUMN, or data.sources.0.chat_fields=[COLUMN] for messages"
        return self._error(f"No column holds text; the records have {held or 'no columns'}", hint)

    def _inner_texts(self) -> Iterator[str]:
        for name, values in self._values.items():
            for value in values:
                inner = cast("dict[str, object]", value) if isinstance(value, dict) else {}
                for key in sorted(inner, key=lambda key: (key not in TEXTS, key)):
                    if isinstance(inner[key], str):
                        yield f"{name}.{key}"

    # What values are

    def _named(self, names: Sequence[str], fits: Any = None) -> list[str]:
        """Return the columns with one of some names, whatever their case, whose values fit, in the order of names."""
        found = sorted(
            (name for name in self._values if name.lower() in names), key=lambda name: names.index(name.lower())
        )  # fmt: skip
        return [name for name in found if fits is None or fits(name)]

    def _use(self, name: str) -> str:
        self._used.add(name)
        return name

    def _has_value(self, name: str) -> bool:
        return any(value not in ("", [], {}) for value in self._values.get(name, ()))

    def _is_string(self, name: str) -> bool:
        values = self._values.get(name, [])
        return bool(values) and all(isinstance(value, str) for value in values)

    def _is_text(self, name: str) -> bool:
        """Whether a column holds text, and not numbers written as text, dates or messages as JSON."""
        values = cast("list[str]", self._values.get(name, []))
        return self._is_string(name) and any(_LETTER.search(value) for value in values) and not self._is_messages(name)

    def _is_optional_text(self, name: str) -> bool:
        """Whether every value that a column has is text: it may be empty in all of the first records."""
        return self._is_string(name) or (name in self._values and not self._values[name])

    def _is_prose(self, name: str) -> bool:
        return any(map(is_prose, self._values.get(name, ())))

    def _is_messages(self, name: str) -> bool:
        values = [value for value in self._values.get(name, ()) if value not in ([], "[]")]
        return bool(values) and all(map(is_messages, values))

    def _is_side(self, name: str) -> bool:
        return (self._is_string(name) and self._has_value(name)) or self._is_messages(name)

    def _is_answer(self, name: str) -> bool:
        """Whether a column holds texts, messages, lists of texts, or the answers of SQuAD: ``{text: [...], ...}``.

        Beside tools, it may hold lists of calls.
        """
        if self._is_side(name):
            return True
        has_tools = any(map(self._has_value, self._named(TOOLS, self._is_tools)))
        for value in self._values.get(name, ()):
            texts = cast("dict[str, object]", value).get("text") if isinstance(value, dict) else value
            if not isinstance(texts, list) or not all(
                isinstance(one, str) or (has_tools and is_call(one)) for one in cast("list[object]", texts)
            ):
                return False
        return self._has_value(name)

    def _is_history(self, name: str) -> bool:
        values = [parse_json(value) if isinstance(value, str) else value for value in self._values.get(name, ())]
        turns = [turn for value in values if isinstance(value, list) for turn in cast("list[object]", value)]
        is_turn = [isinstance(turn, list | tuple) and len(cast("list[object]", turn)) == 2 for turn in turns]
        return all(isinstance(value, list) or value == "" for value in values) and all(is_turn)

    def _is_tools(self, name: str) -> bool:
        values = [parse_json(value) if isinstance(value, str) else value for value in self._values.get(name, ())]
        tools = [tool for value in values if isinstance(value, list) for tool in cast("list[object]", value)]
        return all(isinstance(value, list) or value == "" for value in values) and all(
            isinstance(tool, dict) for tool in tools
        )

    def _is_label(self, name: str) -> bool:
        values = self._values.get(name, [])
        return bool(values) and all(as_truth(value) is not None for value in values)

    def _is_verdict(self, name: str) -> bool:
        return self._is_label(name) and not all(map(as_truth, self._values[name]))

    def _value_type(self, name: str) -> str:
        kinds = {
            "str": "text without letters", "list": "a list", "dict": "an object", "bytes": "bytes", "bool": "booleans",
            "int": "numbers", "float": "numbers",
        }  # fmt: skip
        return next((kinds.get(type(value).__name__, "other values") for value in self._values[name]), "empty")

    def _is_rendering(self, name: str, fields: Sequence[str]) -> bool:
        """Whether a column repeats all that the others say, as the column text of Alpaca does."""
        rows = [row for row in self._rows if isinstance(row.get(name), str)]
        return bool(rows) and all(
            re.search(rf"(?<!\w){re.escape(part.strip())}(?!\w)", cast("str", row[name]))
            for row in rows
            for field in fields
            for part in _texts(row.get(field))
        )

    def _starts_with(self, question: str, answer: str) -> bool:
        """Whether the messages of a column start with the text or the messages of another one."""
        for row in self._rows:
            asked, texts = row.get(question), _texts(row.get(answer))
            parts = [asked] if isinstance(asked, str) and not is_messages(asked) else _texts(asked)
            if texts and asked and parts not in (texts[: len(parts)], texts[1 : len(parts) + 1]):  # a system message
                return False
        return True

    def _are_begun(self, question: str, answers: Sequence[str]) -> bool:
        """Whether the texts of some columns all start with that of another one."""
        rows = [[row.get(name) for name in (question, *answers)] for row in self._rows]
        texts = [cast("list[str]", row) for row in rows if all(isinstance(text, str) for text in row)]
        return bool(texts) and all(asked and text.startswith(asked) for asked, *both in texts for text in both)

    def _is_said(self, name: str, fields: Sequence[str]) -> bool:
        """Whether other columns hold all texts of a column, each as one of theirs or within a text."""
        rows = [row for row in self._rows if row.get(name) not in (None, "", [], {})]
        for row in rows:
            values = [row.get(field) for field in fields]
            said = {text.strip() for value in values for text in _texts(value)}
            within = [value for value in values if isinstance(value, str) and not is_messages(value)]
            texts = {text.strip() for text in _texts(row[name])} - {""}
            if not texts or not all(text in said or any(text in value for value in within) for text in texts):
                return False
        return bool(rows)

    # Errors

    def _not_understood(self, name: str, remedy: str) -> ConfigError:
        return self._error(f"Column {name!r} may change what a record means, and is not read", remedy)

    def _error(self, what: str, remedy: str) -> ConfigError:
        return ConfigError(what, where=self._where, hint=f"add {remedy}")


def _texts(value: object) -> list[str]:
    """Return the texts in a value: of a text, of messages, of lists."""
    value = parse_json(value) if isinstance(value, str) else value
    if isinstance(value, str):
        return [value]
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        part = fields.get("text", "") if "type" in fields else ""  # of a content
        return _texts(fields.get("content", fields.get("value", part)))
    return [text for one in cast("list[object]", value) for text in _texts(one)] if isinstance(value, list) else []
