"""Conversations that call tools. The oracle is ``apply_chat_template`` of transformers, with its own loss mask."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chats
import dataset_folders
from vorox.core.errors import DataError
from vorox.core.schema.data import SourceConfig
from vorox.data.cache.units.document_tokens import encode
from vorox.data.chat.template import BUILT_IN, ChatTemplate, rendered
from vorox.data.documents import BadRecord, Document, Record
from vorox.data.text.format_detection import detect_source
from vorox.data.text.sources import list_source
from vorox.data.text.unit_reader import read_units
from vorox.data.text.unit_splitter import split_into_units

QWEN = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}
    {%- else %}{{- 'You are helpful.' }}{%- endif %}
    {{- "\n\n# Tools\n\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\n</tools><|im_end|>\n" }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' }}{% generation %}
        {%- if message.content %}{{- message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {%- if message.content or not loop.first %}{{- '\n' }}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}{{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
    {%- elif message.role == "tool" %}
        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\n<tool_response>\n' }}{{- message.content }}{{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

LLAMA = r"""
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|im_start|>system\n\n" }}{%- if tools is not none %}{{- "Environment: ipython\n" }}{%- endif %}
{{- system_message }}{{- "<|im_end|>" }}
{%- if tools is not none %}
    {%- set first_user_message = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
    {{- '<|im_start|>user\n\n' -}}{{- "Given the following functions, respond with JSON.\n\n" }}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\n\n" }}{%- endfor %}
    {{- first_user_message + "<|im_end|>"}}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {%- if message.role == 'assistant' %}
            {{- '<|im_start|>assistant\n\n' }}
            {%- generation %}{{- message['content'] | trim + '<|im_end|>' }}{% endgeneration %}
        {%- else %}
            {{- '<|im_start|>' + message['role'] + '\n\n'+ message['content'] | trim + '<|im_end|>' }}
        {%- endif %}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\n\n' -}}{% generation %}{{- '{"name": "' + tool_call.name + '", ' }}
        {{- '"parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}{{- "<|im_end|>" }}{% endgeneration %}
    {%- else %}
        {{- "<|im_start|>ipython\n\n" }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}{{- "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n\n' }}{%- endif %}
"""

HERMES = r"""
{{- "<|im_start|>system\n" }}
{{- "You are a function calling AI model. <tools> " }}
{%- if tools %}{%- for tool in tools %}
    {%- if tool.function is defined %}{%- set tool = tool.function %}{%- endif %}
    {{- '{"type": "function", "function": {"name": "' + tool.name + '", "description": ' }}
    {{- tool.description | tojson }}
    {{- ', "parameters": ' }}{{- tool.parameters | tojson }}{{- '}}' }}{%- if not loop.last %}{{- "\n" }}{%- endif %}
{%- endfor %}{%- endif %}
{{- " </tools><|im_end|>\n" }}
{%- for message in messages %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" and not message.tool_calls is defined %}
        {{- '<|im_start|>assistant\n' }}
        {%- generation %}{{- message.content + '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>' + message.role + '\n' }}{% generation %}
        {%- for tool_call in message.tool_calls %}
            {{- '<tool_call>\n' }}{{- tool_call.function | tojson }}{{- '\n</tool_call>' }}
            {%- if not loop.last %}{{- '\n' }}{%- endif %}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\n<tool_response>\n' }}
        {{- message.content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""

QWEN3 = r"""
{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\n\n' }}
    {%- endif %}
    {{- "# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>" }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call><|im_end|>\n" }}
{%- else %}
    {%- if messages[0].role == 'system' %}
        {{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string and not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- else %}
            {%- if '</think>' in content %}
                {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
                {%- set content = content.split('</think>')[-1].lstrip('\n') %}
            {%- endif %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index %}
            {%- if loop.last or (not loop.last and reasoning_content) %}
                {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
            {%- else %}
                {{- '<|im_start|>' + message.role + '\n' + content }}
            {%- endif %}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\n' + content }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and content) or (not loop.first) %}
                    {{- '\n' }}
                {%- endif %}
                {%- if tool_call.function %}
                    {%- set tool_call = tool_call.function %}
                {%- endif %}
                {{- '<tool_call>\n{"name": "' }}
                {{- tool_call.name }}
                {{- '", "arguments": ' }}
                {%- if tool_call.arguments is string %}
                    {{- tool_call.arguments }}
                {%- else %}
                    {{- tool_call.arguments | tojson }}
                {%- endif %}
                {{- '}\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\n<tool_response>\n' }}
        {{- content }}
        {{- '\n</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}
            {{- '<|im_end|>\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\n\n</think>\n\n' }}
    {%- endif %}
{%- endif %}
"""  # noqa: E501
"""The template of Qwen3."""

QWEN3_MARKED = (
    QWEN3[: QWEN3.index('    {%- elif message.role == "assistant"')]
    + r"""
    {%- elif message.role == "assistant" %}
        {%- set in_content = '</think>' in content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif in_content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- set thought = '' %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {%- set thought = '<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' %}
            {%- set content = content.lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if not (message.reasoning_content or in_content or message.tool_calls) %}
            {{- thought }}{%- set thought = '' %}
        {%- endif %}
        {%- generation %}{{- thought + content }}
        {%- for tool_call in message.tool_calls %}
            {%- if content or not loop.first %}{{- '\n' }}{%- endif %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '<tool_call>\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>' }}{% endgeneration %}{{- '\n' }}
"""
    + QWEN3[QWEN3.index('    {%- elif message.role == "tool"') :]
)
"""The same with marks: around whole turns with calls or reasoning, and around the contents of others."""

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f'Return the {name} "of" a <city>, in °C.',
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
    for name in ("weather", "population")
]


def call(chooser: random.Random) -> dict[str, Any]:
    arguments = {"city": chooser.choice(["Paris", "Zürich", "東京"]), "days": chooser.randint(1, 9), "unit": None}
    return {"type": "function", "function": {"name": chooser.choice(["weather", "population"]), "arguments": arguments}}


def with_texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with arguments as JSON text, as OpenAI writes them: a null in there is one that was meant."""
    return [
        {**one, "tool_calls": [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in one["tool_calls"]
        ]} if "tool_calls" in one else one
        for one in messages
    ]  # fmt: skip


def conversation(chooser: random.Random, most_calls: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "be kind"}] if chooser.random() < 0.5 else []
    for turn in range(chooser.randint(1, 3)):
        messages.append({"role": "user", "content": chats.text(chooser)})
        for _ in range(chooser.randint(turn == 0, 2)):
            count = chooser.randint(1, most_calls)
            messages.append({"role": "assistant", "tool_calls": [call(chooser) for _ in range(count)]})
            messages += [{"role": "tool", "content": json.dumps({"degrees": chooser.randint(-9, 9)})}] * count
        messages.append({"role": "assistant", "content": chats.text(chooser)})
    return messages


def read(directory: Path, records: list[dict[str, Any]], **settings: Any) -> list[Record]:
    file = directory / "calls.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    values = {"chat_fields": ("messages",), "tools_field": "tools", **settings}
    config = SourceConfig(name="calls", format="jsonl", paths=(str(file),), **values)
    source = list_source(config)
    units = split_into_units(source, "train", source.holdout, 1 << 20)
    return list(read_units(source, units, "train", source.holdout))


@pytest.mark.parametrize("has_marks", [True, False], ids=["marked", "unmarked"])
@pytest.mark.parametrize(
    ("template", "most_calls"), [(QWEN, 2), (LLAMA, 1), (HERMES, 2)], ids=["qwen", "llama", "hermes"]
)
def test_tool_calls_have_the_ids_and_the_mask_of_transformers(
    template: str, most_calls: int, has_marks: bool, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    chooser = random.Random(random.randrange(1 << 30))
    conversations = [conversation(chooser, most_calls) for _ in range(25)]
    records = [
        {"messages": with_texts(one), "tools": TOOLS if n % 2 else json.dumps(TOOLS)}
        for n, one in enumerate(conversations)
    ]
    ours = chats.tokenizer()
    ours.save(tmp_path)
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer = ours.with_chat_template(template if has_marks else chats.unmarked(template))
    for found, messages in zip(read(tmp_path, records), conversations, strict=True):
        expected = theirs.apply_chat_template(
            messages, tools=TOOLS, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        (document,), (ids,) = encode([rendered(found, tokenizer.chat_template)], (), tokenizer)  # type: ignore[list-item]
        assert isinstance(document, Document), document
        assert ids.tolist() == expected["input_ids"]
        mask = np.zeros(len(ids), np.bool_)
        for start, end in document.target_tokens:
            mask[start:end] = True
        assert 0 < mask.sum() < len(mask)
        np.testing.assert_array_equal(mask, expected["assistant_masks"], err_msg=str(messages))


def reasoned(chooser: random.Random, message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer with reasoning in a field of its own, within its content, empty, or without any."""
    thought = f"{chats.text(chooser)}\n"
    inside = {"content": f"<think>\n{thought}</think>\n\n{message.get('content', '')}"}
    return message | chooser.choice([{}, {"reasoning_content": thought}, {"reasoning_content": ""}, inside])


def test_turns_of_qwen3_have_the_mask_of_transformers(tmp_path: Path) -> None:
    """Its template writes a turn otherwise at the end of a conversation, before a tool's result and before a question.

    Its marked copy gives the same text, so the marks of transformers are those of the answers.
    """
    transformers = pytest.importorskip("transformers")
    chooser = random.Random(random.randrange(1 << 30))
    conversations: list[list[dict[str, Any]]] = []
    for _ in range(60):
        messages = conversation(chooser, 2)[: chooser.choice([None, -1])]
        messages = (
            messages if messages[-1]["role"] == "assistant" else [*messages, {"role": "assistant", "content": "a"}]
        )
        conversations.append([reasoned(chooser, one) if one["role"] == "assistant" else one for one in messages])
    ours = chats.tokenizer()
    ours.save(tmp_path)
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    template = ours.with_chat_template(QWEN3).chat_template
    records = [{"messages": with_texts(one), "tools": TOOLS} for one in conversations]
    for found, messages in zip(read(tmp_path, records), conversations, strict=True):
        (document,), (ids,) = encode([rendered(found, template)], (), ours)  # type: ignore[list-item]
        assert isinstance(document, Document), (document, messages)
        whole, expected = (
            theirs.apply_chat_template(
                messages, tools=TOOLS, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
            )
            for source in (QWEN3, QWEN3_MARKED)
        )
        assert ids.tolist() == whole["input_ids"] == expected["input_ids"]
        mask = np.zeros(len(ids), np.bool_)
        for start, end in document.target_tokens:
            mask[start:end] = True
        np.testing.assert_array_equal(mask, expected["assistant_masks"], err_msg=str(messages))


USER, TOOL = {"role": "user", "content": "How warm is it?"}, {"role": "tool", "content": "31"}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
TEMPLATE = ChatTemplate(chats.unmarked(QWEN), "", "<end>", ("<end>", "<|im_end|>"))


def text_and_answers(record: Record, template: ChatTemplate = TEMPLATE) -> tuple[str, list[str]]:
    found = rendered(record, template)
    assert isinstance(found, Document), found
    return found.text, [found.text[start:end] for start, end in found.answers]


@pytest.mark.parametrize(
    "messages",
    [
        [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}]},
        ],
        [
            USER,
            {"role": "assistant", "tool_calls": [{"function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}]},
        ],
        [USER, {"role": "assistant", "tool_calls": [CALL]}],
        [USER, {"role": "assistant", "content": None, "function_call": {**CALL, "arguments": '{"city": "Paris"}'}}],
        [{"from": "human", "value": USER["content"]}, {"from": "function_call", "value": json.dumps(CALL)}],
    ],
    ids=["openai", "arguments as text", "flat", "function_call", "sharegpt"],
)
def test_every_spelling_of_a_call_is_rendered_alike(messages: list[dict[str, Any]], tmp_path: Path) -> None:
    rest = [TOOL, {"role": "assistant", "content": "31 degrees."}]
    if "from" in messages[0]:
        rest = [{"from": "observation", "value": "31"}, {"from": "gpt", "value": "31 degrees."}]
    (record,) = read(tmp_path, [{"messages": [*messages, *rest], "tools": TOOLS}])
    text, answers = text_and_answers(record)
    assert answers == [
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>',
        "31 degrees.<|im_end|>",
    ]
    assert "<tool_response>\n31\n</tool_response>" in text


def test_what_a_template_does_not_write_is_refused(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "31"}
    calls = {"role": "assistant", "tool_calls": [CALL]}
    thought = {"role": "assistant", "content": "31", "reasoning_content": "It is summer."}
    plain = ChatTemplate(BUILT_IN["chatml"], "", "<end>", ())
    reasons: list[str] = []
    for record in ({"messages": [USER, calls, TOOL, answer]}, {"messages": [USER, answer], "tools": TOOLS},
                   {"messages": [USER, thought]}):  # fmt: skip
        (found,) = read(tmp_path, [record])
        bad = rendered(found, plain)
        assert isinstance(bad, BadRecord)
        reasons.append(bad.reason)
    assert "message 2 has 'tool_calls', which the chat template does not write" in reasons[0]
    assert "the record has 'tools', which the chat template does not write" in reasons[1]
    assert "message 2 has 'reasoning_content', which the chat template does not write" in reasons[2]
    hidden = ChatTemplate("{# tools tool_calls #}" + BUILT_IN["chatml"], "", "<end>", ())
    (found,) = read(tmp_path, [{"messages": [USER, {**calls, "content": ""}]}])
    bad = rendered(found, hidden)
    assert isinstance(bad, BadRecord)
    assert "does not write the tool call of message 2, 'weather'" in bad.reason
    for record in (
        {"messages": [USER, {**calls, "tool_calls": [{"function": {"name": "weather", "arguments": {"x": "<end>"}}}]}]},
        {"messages": [USER, answer], "tools": [{"name": "weather <end>"}]},
    ):
        (found,) = read(tmp_path, [record])
        bad = rendered(found, TEMPLATE)
        assert isinstance(bad, BadRecord)
        assert "spells the special token '<end>'" in bad.reason


LOSSY = (
    "{% for m in messages %}{% if m.role != 'tool' %}<{{ m.role }}>{% if m.tool_calls %}"
    "{{ m.tool_calls[0].function.name }}({{ m.tool_calls[0].function.arguments | tojson }})"
    "{% else %}{{ m.content }}{% endif %}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""The first call of a message, nothing beside it, no results: as templates of Llama 3.1 and Phi-3 do."""


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([{"role": "assistant", "tool_calls": [CALL, CALL]}], "the tool call of message 2, 'weather'"),
        ([{"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}],
         "all of message 2, of role 'assistant'"),
        ([{"role": "assistant", "tool_calls": [CALL]}, TOOL, {"role": "assistant", "content": "warm"}],
         "all messages of role tool"),
        ([{"role": "assistant", "tool_calls": [CALL]}, {**TOOL, "content": '[{"results": 1}]'},
          {"role": "assistant", "content": "warm"}], "all messages of role tool"),
        ([{"role": "assistant", "tool_calls": [CALL]}, {**TOOL, "content": "r"}, {"role": "assistant", "content": "r"}],
         "all messages of role tool"),
    ],
    ids=["second call", "content beside a call", "result", "result as JSON", "short result"],
)  # fmt: skip
def test_a_part_of_a_turn_that_a_template_leaves_out_is_refused(
    messages: list[dict[str, Any]], what: str, tmp_path: Path
) -> None:
    (found,) = read(tmp_path, [{"messages": [USER, *messages]}])
    bad = rendered(found, ChatTemplate(LOSSY, "", "</s>", ("</s>",)))
    assert isinstance(bad, BadRecord)
    assert f"the chat template does not write {what}" in bad.reason
    (one,) = read(tmp_path, [{"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}])
    assert not isinstance(rendered(one, ChatTemplate(LOSSY, "", "</s>", ("</s>",))), BadRecord)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_under_any_name_is_written_or_refused(name: str, tmp_path: Path) -> None:
    """Qwen3's template reads ``reasoning_content``, and has ``enable_thinking`` in it."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant>"
        "{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}"
    )
    (found,) = read(tmp_path, [{"messages": [USER, {"role": "assistant", "content": "31", name: "It is summer."}]}])
    assert text_and_answers(found, ChatTemplate(template, "", "</s>", ("</s>",)))[1] == [
        "<think>It is summer.</think>31</s>"
    ]
    drops = template.replace("{{ m.reasoning_content }}", "{{ m.reasoning_content and '' }}")
    bad = rendered(found, ChatTemplate(drops, "", "</s>", ("</s>",)))
    assert isinstance(bad, BadRecord)
    assert "does not write all of message 2" in bad.reason


def test_reasoning_is_trained_with_its_answer(tmp_path: Path) -> None:
    template = ChatTemplate(
        "{% for m in messages %}<{{ m.role }}>\n{% if m.reasoning_content and loop.last %}[{{ m.reasoning_content }}]"
        "{% endif %}{{ m.content }}</s>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>\n{% endif %}", "", "", (),
    )  # fmt: skip
    thought = {"role": "assistant", "content": "31", "reasoning_content": "It is summer."}
    (last, amid) = read(tmp_path, [{"messages": [USER, thought]}, {"messages": [USER, thought] * 2}])
    assert text_and_answers(last, template)[1] == ["[It is summer.]31</s>"]
    assert text_and_answers(amid, template)[1] == ["31</s>", "[It is summer.]31</s>"]


def test_reasoning_within_a_content_is_written_or_refused(tmp_path: Path) -> None:
    """A template that drops the reasoning of the last answer would train on half of it; of an earlier one, it may."""
    thought = {"role": "assistant", "content": "<think>\nIt is summer.\n</think>\n\n31"}
    (last, amid) = read(tmp_path, [{"messages": [USER, thought]}, {"messages": [USER, thought] * 2}])
    assert text_and_answers(last, ChatTemplate(QWEN3, "", "", ()))[1] == [f"{thought['content']}<|im_end|>"]
    assert text_and_answers(amid, ChatTemplate(QWEN3, "", "", ()))[1] == [
        "31<|im_end|>",
        f"{thought['content']}<|im_end|>",
    ]
    drops = "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1].strip() }}</s>{% endfor %}"
    bad = rendered(last, ChatTemplate(drops, "", "", ()))
    assert isinstance(bad, BadRecord)
    assert "the chat template changes an answer" in bad.reason
    assert text_and_answers(last)[1] == [f"{thought['content']}<|im_end|>"], "a template that knows no reasoning"


def test_empty_reasoning_is_none(tmp_path: Path) -> None:
    answer = {"role": "assistant", "content": "31"}
    without, empty = read(
        tmp_path, [{"messages": [USER, {**answer, **more}]} for more in ({}, {"reasoning_content": ""})]
    )
    for source in (BUILT_IN["chatml"], QWEN3):
        template = ChatTemplate(source, "", "", ())
        assert text_and_answers(empty, template) == text_and_answers(without, template)
        assert text_and_answers(empty, template)[1] == ["31<|im_end|>"]


def records_of(file: Path, kind: Any) -> list[Record]:
    values = {"chat_fields": ("messages",), "tools_field": "tools"}
    source = list_source(SourceConfig(name="calls", format=kind, paths=(str(file),), **values))  # type: ignore[arg-type]
    units = split_into_units(source, "train", source.holdout, 1 << 20)
    return list(read_units(source, units, "train", source.holdout))


def test_nulls_that_a_table_adds_are_written_in_no_format(tmp_path: Path) -> None:
    """Every struct of a table has the fields of all; written as JSON, the others are null. The oracle is transformers,
    with the calls and tools from before they were a table."""
    transformers = pytest.importorskip("transformers")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ours = chats.tokenizer()
    ours.save(tmp_path)
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    names = {"weather": "city", "time": "zone"}
    tools = [
        {"type": "function", "function": {
            "name": name, "description": "d",
            "parameters": {"type": "object", "properties": {one: {"type": "string"}}, "required": [one]},
        }} for name, one in names.items()
    ]  # fmt: skip
    given: list[dict[str, Any]] = []
    for place in ("Paris", "UTC"):
        called = [
            {"type": "function", "function": {"name": name, "arguments": {one: place}}} for name, one in names.items()
        ]
        messages = [USER, {"role": "assistant", "tool_calls": called}, TOOL, {"role": "assistant", "content": "31"}]
        given.append({"messages": messages, "tools": tools})
    table = arrow.Table.from_pylist(given)
    rows = table.to_pylist()
    assert '"zone": null' in json.dumps(rows)
    parquet.write_table(table, tmp_path / "a.parquet")
    with arrow.ipc.new_stream(tmp_path / "a.arrow", table.schema) as stream:
        stream.write_table(table)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "a.json").write_text(json.dumps(rows))
    columns = {"messages": "json", "tools": "json"}
    dataset_folders.write_mds(tmp_path / "mds", [{k: json.dumps(v) for k, v in row.items()} for row in rows], columns)
    template = ours.with_chat_template(QWEN).chat_template
    for kind in ("parquet", "arrow", "jsonl", "json", "mds"):
        file = tmp_path / (f"a.{kind}" if kind != "mds" else kind)
        detected = detect_source([str(file)]).source
        assert (detected["chat_fields"], detected["tools_field"]) == (["messages"], "tools"), kind
        found = records_of(file, kind)
        (_, ids) = encode([rendered(one, template) for one in found], (), ours)  # type: ignore[misc]
        expected = [theirs.apply_chat_template(one["messages"], tools=tools, chat_template=QWEN) for one in given]
        assert [one.tolist() for one in ids] == [one["input_ids"] for one in expected], kind


@pytest.mark.parametrize("depth", [900, 3000])
def test_arguments_that_are_nested_deeply_are_read_or_named(depth: int, tmp_path: Path) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    calls = f'{{"role": "assistant", "content": "a", "tool_calls": [{{"name": "f", "arguments": {deep}}}]}}'
    (tmp_path / "a.jsonl").write_text(f'{{"messages": [{json.dumps(USER)}, {calls}]}}\n')
    (found,) = records_of(tmp_path / "a.jsonl", "jsonl")
    assert not isinstance(found, BadRecord) or "nested too deeply" in found.reason
    if isinstance(found, BadRecord):
        with pytest.raises(DataError, match="nested too deeply"):
            detect_source([str(tmp_path / "a.jsonl")])


@pytest.mark.parametrize("as_text", [True, False])
def test_a_list_of_calls_beside_tools_is_an_answer_that_calls_them(as_text: bool, tmp_path: Path) -> None:
    """As in xLAM and APIGen: query, answers, tools. The oracle is transformers with the same calls."""
    transformers = pytest.importorskip("transformers")
    ours = chats.tokenizer()
    ours.save(tmp_path)
    theirs: Any = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    calls = [CALL, {"name": "population", "arguments": {"city": "東京"}}]
    write: Any = json.dumps if as_text else lambda value: value
    record = {"query": "How warm is it?", "answers": write(calls), "tools": write(TOOLS)}
    settings = {"chat_fields": ("query", "answers")}
    (text,) = read(tmp_path, [{**record, "answers": "[1] is no call"}], **settings)
    (found,) = read(tmp_path, [record], **settings)
    detected = detect_source([str(tmp_path / "calls.jsonl")]).source
    assert (tuple(detected["chat_fields"]), detected["tools_field"]) == (settings["chat_fields"], "tools")
    (document,), (ids,) = encode([rendered(found, ours.with_chat_template(QWEN).chat_template)], (), ours)  # type: ignore[list-item]
    messages = [USER, {"role": "assistant", "tool_calls": [{"type": "function", "function": one} for one in calls]}]
    expected = theirs.apply_chat_template(
        messages, tools=TOOLS, chat_template=QWEN, return_dict=True, return_assistant_tokens_mask=True
    )
    assert ids.tolist() == expected["input_ids"]
    assert isinstance(document, Document)
    trained = [number for start, end in document.target_tokens for number in range(start, end)]
    assert trained == np.flatnonzero(expected["assistant_masks"]).tolist()
    assert text_and_answers(text)[1] == ["[1] is no call<|im_end|>"]
    without, none = (
        read(tmp_path, [{**record, **more}], **settings)[0] for more in ({"tools": None}, {"answers": write([])})
    )
    assert isinstance(none, BadRecord)
    assert "an empty list of tool calls" in none.reason
    if as_text:
        assert text_and_answers(without)[1] == [json.dumps(calls) + "<|im_end|>"]


@pytest.mark.parametrize("write", [json.dumps, repr], ids=["json", "python"])
def test_tools_that_the_system_message_lists_are_not_written_twice(write: Any, tmp_path: Path) -> None:
    """As in hermes-function-calling-v1."""
    answer = {"role": "assistant", "content": "31"}

    def one(system: str) -> Record:
        (found,) = read(tmp_path, [{"messages": [{"role": "system", "content": system}, USER, answer], "tools": TOOLS}])
        return found

    found = one(f"You call functions. <tools> {write(TOOLS)} </tools>")
    assert isinstance(found, BadRecord)
    assert "set its ignored_fields=[tools]" in found.reason
    for system in ("You call weather and population.", f"You call functions. {write(TOOLS[:1])}"):
        assert text_and_answers(one(system))[0].count("# Tools") == 1


# Flags that say what is trained on


def test_messages_of_weight_0_are_read_and_not_trained_on(tmp_path: Path) -> None:
    wrong, right = {"role": "assistant", "content": "WRONG"}, {"role": "assistant", "content": "right", "weight": 1}
    right |= {"rejected": False, "ignore": None, "include_in_loss": True}
    flags: list[dict[str, Any]] = [
        {"include_in_loss": False},
        {"weight": 0},
        {"weight": 0.0},
        {"train": False},
        {"training": False},
    ]
    for flag in flags:
        chat = [USER, {**wrong, **flag}, USER, right]
        (found, *left_out) = read(tmp_path, [{"messages": chat}, {"messages": chat[:2]}])
        assert not left_out, "a conversation without a trained answer is left out"
        for template in (TEMPLATE, ChatTemplate(QWEN, "", "<end>", ())):
            text, answers = text_and_answers(found, template)
            assert "WRONG" in text
            assert answers == ["right<|im_end|>"]


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ({"weight": 0.5}, "message 2 has weight 0.5; only 0 and 1"),
        ({"train": "perhaps"}, "message 2 has train 'perhaps'"),
        ({"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": False}]}, "message 2 has 'train_detail'"),
        ({"rejected": True}, "message 2 has 'rejected', which changes what is trained on"),
        ({"ignore": True}, "message 2 has 'ignore', which changes what is trained on"),
        ({"mask": 1}, "message 2 has 'mask', which changes what is trained on"),
    ],
)
def test_flags_that_are_not_understood_are_refused(flag: dict[str, Any], reason: str, tmp_path: Path) -> None:
    (found,) = read(tmp_path, [{"messages": [USER, {"role": "assistant", "content": "a", **flag}]}])
    assert isinstance(found, BadRecord)
    assert reason in found.reason
    (found,) = read(tmp_path, [{"messages": [{**USER, "train": True}, {"role": "assistant", "content": "a"}]}])
    assert isinstance(found, BadRecord)
    assert "message 1 has train True, but is no answer" in found.reason


def test_the_columns_of_a_conversation_add_to_it(tmp_path: Path) -> None:
    record = {
        "instruction": "add", "input": "2 and 2", "output": "four", "system": "be brief",
        "history": [["hello", "hi"], ["bye", "see you"]],
    }  # fmt: skip
    fields = ("instruction", "input", "output")
    settings = {"chat_fields": fields, "tools_field": None, "system_field": "system", "history_field": "history"}
    (found,) = read(tmp_path, [record], **settings)
    text, answers = text_and_answers(found, ChatTemplate(BUILT_IN["plain"], "", "|", ()))
    assert text == (
        "System: be brief\nUser: hello\nAssistant: hi|\nUser: bye\nAssistant: see you|\n"
        "User: add\n\n2 and 2\nAssistant: four|\n"
    )
    assert answers == ["hi|", "see you|", "four|"]
    (bad,) = read(tmp_path, [{**record, "history": [["only one"]]}], **settings)
    assert isinstance(bad, BadRecord)
    assert "'history' is not a list of [question, answer] pairs: turn 1 is none" in bad.reason


def test_a_false_label_is_never_trained_on(tmp_path: Path) -> None:
    records = [{"prompt": f"q{n}", "completion": f"a{n}", "label": n % 2 == 0} for n in range(4)]
    chat: dict[str, Any] = {"chat_fields": ("prompt", "completion"), "tools_field": None}
    good = read(tmp_path, records, **chat, label_field="label")
    assert [(one.ordinal, one.messages[1].content) for one in good] == [(0, "a0"), (2, "a2")]  # type: ignore[union-attr,index]
    unmarked = read(tmp_path, records, **chat)
    assert [isinstance(one, BadRecord) for one in unmarked] == [False, True, False, True]
    assert "label_field=label" in unmarked[1].reason  # type: ignore[union-attr]
