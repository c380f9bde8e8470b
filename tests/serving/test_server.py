"""The OpenAI API over a real socket: the text of ``vorox generate``, and errors for invalid requests."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vorox.cli import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("httpx")
pytest.importorskip("jinja2")
import httpx

from model_server import NAME, TOKEN, model_server
from vorox.web.listener import listen
from vorox.web.running import server_of


@pytest.fixture(scope="module")
def client(run: Path) -> Iterator[Any]:
    with model_server(run) as url:
        headers = {"Authorization": f"Bearer {TOKEN}"}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            yield client


def post(client: Any, path: str = "/completions", **body: Any) -> Any:
    return client.post(path, json={"model": NAME, **body})


def events(answer: Any) -> list[dict[str, Any]]:
    """The events of a stream, which ends as OpenAI's does."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    parts = answer.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


@pytest.mark.parametrize("words", [[], ["--temperature", "0.9", "--top-k", "20", "--top-p", "0.8", "--seed", "3"]])
def test_completions_are_those_of_vorox_generate(
    client: Any, run: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", str(run), "the run", "of", "-n", "2", "--tokens", "12", "--json", *words]) == 0
    expected = [found["completion"] for found in json.loads(capsys.readouterr().out)["completions"]]
    given = dict(zip([word[2:].replace("-", "_") for word in words[::2]], map(float, words[1::2]), strict=True))
    given |= {name: int(given[name]) for name in ("top_k", "seed") if name in given}
    body = {"prompt": ["the run", "of"], "n": 2, "max_tokens": 12, **given}
    answer = post(client, **body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert [choice["text"] for choice in found["choices"]] == expected
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert expected[0] != expected[1]
    assert (found["object"], found["model"], found["system_fingerprint"]) == ("text_completion", NAME, "step-4")
    usage = found["usage"]
    assert usage["prompt_tokens"] == len("the runof"), "each prompt once"
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]

    streamed = events(post(client, **body, stream=True, stream_options={"include_usage": True}))
    texts = ["", "", "", ""]
    for event in streamed[:-1]:
        (choice,) = event["choices"]
        assert event["usage"] is None
        texts[choice["index"]] += choice["text"]
    assert texts == expected
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["usage"] == usage
    assert len({event["id"] for event in streamed}) == 1


def test_token_ids_and_stop_strings(client: Any) -> None:
    ids = list(b"the")
    whole = post(client, prompt="the", max_tokens=40).json()["choices"][0]["text"]
    assert post(client, prompt=ids, max_tokens=40).json()["choices"][0]["text"] == whole
    assert post(client, prompt=[ids], max_tokens=40).json()["choices"][0]["text"] == whole
    stop = whole[10:12]
    answer = post(client, prompt="the", max_tokens=40, stop=["never said", stop]).json()
    (choice,) = answer["choices"]
    assert choice["text"] == whole[: whole.find(stop)]
    assert choice["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] < 40


def test_conversations_use_the_chat_template(client: Any) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "what "}, {"type": "text", "text": "now"}]},
    ]
    body = {"messages": messages, "max_completion_tokens": 20, "temperature": 0.5, "seed": 4}
    found = post(client, "/chat/completions", **body).json()
    (choice,) = found["choices"]
    assert choice["message"]["role"] == "assistant"
    assert found["object"] == "chat.completion"
    rendered = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwhat now<|im_end|>\n<|im_start|>assistant\n"
    count = len(re.findall(r"<\|im_\w+\|>|.", rendered, re.DOTALL))  # of a byte vocabulary
    assert found["usage"]["prompt_tokens"] == count

    streamed = events(post(client, "/chat/completions", **body, stream=True))
    deltas = [event["choices"][0]["delta"] for event in streamed]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == choice["message"]["content"]
    assert streamed[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert {event["object"] for event in streamed} == {"chat.completion.chunk"}
    answered = [*messages, choice["message"] | {"tool_calls": None}, {"role": "user", "content": "and then"}]
    assert post(client, "/chat/completions", messages=answered, max_tokens=3).status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "text"),
    [
        ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature", "valid number"),
        ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature", "greater than or equal"),
        ("completions", {"prompt": "a", "max_tokens": True}, 400, "max_tokens", "valid integer"),
        ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ("completions", {"prompt": {"a": 1}}, 400, "prompt", "prompt"),
        ("completions", {"prompt": []}, 400, "prompt", "at least 1"),
        ("completions", {"prompt": [1, "a"]}, 400, "prompt", "prompt"),
        ("completions", {"prompt": [[]]}, 400, "prompt", "no token"),
        ("completions", {"prompt": [999_999]}, 400, "prompt", "outside the vocabulary"),
        ("completions", {"prompt": "\ud800"}, 400, "prompt", "surrogate"),
        ("completions", {"prompt": "a", "stop": ["b", "\ud83d"]}, 400, "stop", "surrogate"),
        ("completions", {"prompt": "a", "user": "\ud83d"}, 400, "user", "surrogate"),
        ("completions", {"prompt": "a", "\ud83d": 1}, 400, "?", "surrogate"),
        ("completions", {"prompt": "a", "model": "\ud83d"}, 400, "model", "surrogate"),
        ("completions", {"prompt": "a", "min_p": 2}, 400, "min_p", "less than or equal to 1"),
        ("completions", {"prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty", "greater than 0"),
        ("chat/completions", {"messages": [{"role": "user", "content": "cut \ud83d"}]}, 400, "messages", "surrogate"),
        (
            "chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "\ud83d"}]}]}, 400,
            "messages", "surrogate",
        ),
        (
            "chat/completions", {"messages": [{"role": "user", "content": "a", "name": "b"}]}, 400, "messages",
            "messages.0.name is not supported",
        ),
        ("completions", {"prompt": "a", "n": 1000}, 400, "n", "less than or equal to 64"),
        ("completions", {"prompt": ["a"] * 65}, 400, "prompt", "at most 64"),
        ("completions", {"prompt": "a", "stop": ["a"] * 5}, 400, "stop", "at most 4"),
        ("completions", {"prompt": "a", "logprobs": 5}, 400, "logprobs", "not supported"),
        ("completions", {"prompt": "a", "logprobs": 0}, 400, "logprobs", "not supported"),
        (
            "chat/completions", {"messages": [{"role": "user", "content": "a"}], "logprobs": True}, 400, "logprobs",
            "not supported",
        ),
        ("completions", {"prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty", "not supported"),
        ("completions", {"prompt": "a", "colour": "red"}, 400, "colour", "not supported"),
        ("completions", {"prompt": "a", "stream_options": {}}, 400, "stream_options", "stream: true"),
        ("completions", {}, 400, "prompt", "required"),
        ("completions", {"prompt": "a", "model": "gpt-5"}, 404, "model", "does not exist"),
        ("chat/completions", {"messages": []}, 400, "messages", "at least 1"),
        ("chat/completions", {"messages": [{"role": "robot", "content": "a"}]}, 400, "messages", "role"),
        ("chat/completions", {"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "messages", "special"),
        ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [{}]}, 400, "tools", "support"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    client: Any, path: str, body: dict[str, Any], status: int, param: str, text: str
) -> None:
    answer = client.post(
        path, content=json.dumps({"model": NAME, **body}), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert text in error["message"]


def test_fields_with_neutral_values_are_accepted(client: Any) -> None:
    neutral = {"frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": None, "user": "me", "best_of": 1,
               "echo": False, "suffix": None, "logprobs": None, "stop": None, "n": None, "seed": None}  # fmt: skip
    assert post(client, prompt="a", max_tokens=2, **neutral).status_code == 200


def test_a_prompt_that_is_too_long(client: Any) -> None:
    answer = post(client, prompt="a" * 250, max_tokens=20)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "270" not in answer.text
    assert len(post(client, prompt="a" * 250).json()["choices"][0]["text"].encode()) <= 64, "as far as there is room"


def test_bodies_that_are_not_json(client: Any) -> None:
    as_json = {"Content-Type": "application/json"}
    for content, status in ((b"{", 400), (b"[1]", 400), (b"[" * 100_000, 400), (b"\xff", 400), (b" " * 5_000_000, 413)):
        answer = client.post("/completions", content=content, headers=as_json)
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error"
    answer = client.post("/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415, "a form of another site"


def test_models(client: Any) -> None:
    (model,) = client.get("/models").json()["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (NAME, "model", "vorox")
    assert client.get(f"/models/{NAME}").json() == model
    for path in ("/models/other", "/embeddings"):
        assert client.get(path).status_code == 404
        assert client.get(path).json()["error"]["message"]
    assert client.get("/completions").status_code == 405


def test_only_the_token_opens_it(client: Any) -> None:
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN + "x"},
                    {"Authorization": "", "Cookie": f"vorox_dash_{client.base_url.port}={TOKEN}"}):  # fmt: skip
        answer = client.get("/models", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
        assert TOKEN not in answer.text
    assert client.get(f"/models?token={TOKEN}", headers={"Authorization": ""}).status_code == 401, "not in a URL"
    for headers in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
        assert client.get("/models", headers=headers).status_code == 403
        assert client.post("/completions", headers=headers, json={}).status_code == 403


def test_requests_wait_for_each_other(client: Any) -> None:
    """Eight at once: each gets what it gets alone."""
    alone = [post(client, prompt=f"run {number}", max_tokens=30).json()["choices"] for number in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda number: post(client, prompt=f"run {number}", max_tokens=30), range(8)))
    assert [answer.json()["choices"] for answer in together] == alone


def test_a_client_that_leaves_frees_the_model(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from numpy_engine import NumpyDecoder

    feed, fed = NumpyDecoder.feed, []

    def slow_feed(self: NumpyDecoder, tokens: Any) -> Any:
        fed.append(time.monotonic())
        time.sleep(0.02)
        return feed(self, tokens)

    monkeypatch.setattr(NumpyDecoder, "feed", slow_feed)
    body = {"model": NAME, "prompt": "a", "max_tokens": 250, "temperature": 0}  # greedy: it never ends by itself
    with client.stream("POST", "/completions", json={**body, "stream": True}) as answer:
        next(answer.iter_lines())
    with pytest.raises(httpx.ReadTimeout):
        client.post("/completions", json=body, timeout=0.3)
    assert post(client, prompt="b", max_tokens=2).status_code == 200
    assert len(fed) < 150, "both were given up"


def test_errors_during_generation_are_answers(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from numpy_engine import NumpyDecoder

    def feed(self: NumpyDecoder, tokens: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(NumpyDecoder, "feed", feed)
    (event, rest) = post(client, prompt="a", stream=True).text.split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["type"] == "server_error"
    assert rest == ""
    answer = post(client, prompt="a")
    assert answer.status_code == 500
    assert "device lost" in answer.json()["error"]["message"]
    monkeypatch.undo()
    assert post(client, prompt="a", max_tokens=1).status_code == 200


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--host", "0.0.0.0", "--no-token"], "needs a token"),
        (["--token", "short"], "fewer than 8"),
        (["--host", "192.0.2.1"], "Cannot listen"),
    ],
)
def test_unsafe_or_impossible_addresses_are_refused(
    run: Path, words: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(run), *words]) == 2
    assert text in capsys.readouterr().err


def test_a_client_can_connect_before_the_server_has_started() -> None:
    """The URL is printed as soon as the socket listens; a request then waits for the server."""
    listener, access = listen("127.0.0.1", 0, "a-long-token", False, command="vorox serve", has_pages=False)
    with listener, socket.create_connection(("127.0.0.1", access.port), timeout=10) as client:
        assert client.getpeername() == listener.getsockname()


def test_a_server_closes_no_handler_of_another_library() -> None:
    """absl closes the stream that it logs to, which may be standard error."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.close = stream.close  # type: ignore[method-assign]
    logging.getLogger("of.another.library").addHandler(handler)
    server_of(lambda scope, receive, send: None, stop_seconds=1)
    assert not stream.closed
    logging.getLogger("of.another.library").removeHandler(handler)
