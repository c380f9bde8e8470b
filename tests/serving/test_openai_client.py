"""OpenAI's Python package against the server: its types, its streams and its errors."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tiny_runs
from vorox.cli import main

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("jinja2")
pytest.importorskip("openai")
import openai

from model_server import NAME, TOKEN, model_server

MESSAGES: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what now"}]


def connect(url: str, token: str = TOKEN) -> openai.OpenAI:
    """The package's client, without its retries and without the proxies of this machine."""
    http = openai.DefaultHttpxClient(trust_env=False)
    return openai.OpenAI(base_url=url, api_key=token, max_retries=0, timeout=60, http_client=http)


@pytest.fixture(scope="module")
def url(run: Path) -> Iterator[str]:
    with model_server(run) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with connect(url) as client:
        yield client


def generated(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """The completions of ``vorox generate``."""
    capsys.readouterr()
    assert main(["generate", *words, "--json"]) == 0
    return [found["completion"] for found in json.loads(capsys.readouterr().out)["completions"]]


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object, model.owned_by) == (NAME, "model", "vorox")
    assert client.models.retrieve(NAME) == model
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-5")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


def test_completions_whole_and_streamed(client: openai.OpenAI, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tokens", "12", "--temperature", "0.9", "--seed", "3"]
    expected = generated(capsys, str(run), "the run", "of", *words)
    given: Any = {"model": NAME, "prompt": ["the run", "of"], "max_tokens": 12, "temperature": 0.9, "seed": 3}
    whole = client.completions.create(**given)
    assert [choice.text for choice in whole.choices] == expected
    assert {choice.finish_reason for choice in whole.choices} == {"length"}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.prompt_tokens == len("the runof")

    chunks = list(client.completions.create(**given, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert len(chunks) > 3, "token by token, not at once"
    assert chunks[-1].usage == whole.usage


def test_conversations_whole_and_streamed(client: openai.OpenAI) -> None:
    given: Any = {"model": NAME, "messages": MESSAGES, "max_completion_tokens": 20, "temperature": 0.5, "seed": 4}
    whole = client.chat.completions.create(**given)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    chunks = list(client.chat.completions.create(**given, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].choices[0].finish_reason == choice.finish_reason
    with client.chat.completions.stream(**given) as stream:  # the package's own accumulation of deltas
        final = stream.get_final_completion().choices[0]
    assert (final.message.content, final.finish_reason) == (choice.message.content, choice.finish_reason)

    answered: Any = [*MESSAGES, choice.message, {"role": "user", "content": "and then"}]
    again = client.chat.completions.create(model=NAME, messages=answered, max_tokens=3)
    assert again.usage is not None
    assert whole.usage is not None
    assert again.usage.prompt_tokens > whole.usage.prompt_tokens
    assert again.usage.completion_tokens <= 3


def test_stop_ends_an_answer(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=NAME, prompt="the", max_tokens=40).choices[0].text
    stop = whole[10:12]
    found = client.completions.create(model=NAME, prompt="the", max_tokens=40, stop=["never said", stop])
    assert found.choices[0].text == whole[: whole.find(stop)]
    assert found.choices[0].finish_reason == "stop"
    streamed = client.completions.create(model=NAME, prompt="the", max_tokens=40, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == found.choices[0].text


def test_another_token_is_refused(url: str) -> None:
    with connect(url, "wrong-horse-battery") as stranger, pytest.raises(openai.AuthenticationError) as refused:
        stranger.models.list()
    assert refused.value.code == "invalid_api_key"
    assert TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"max_tokens": 0}, "max_tokens", None),
        ({"max_tokens": 100_000}, "prompt", "context_length_exceeded"),
        ({"temperature": -1}, "temperature", None),
        ({"logprobs": 5}, "logprobs", "unsupported_parameter"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "unsupported_parameter"),
    ],
)
def test_what_the_server_cannot_do_is_an_error_of_the_package(
    client: openai.OpenAI, given: dict[str, Any], param: str, code: str | None
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=NAME, prompt="a", **given)
    assert (refused.value.param, refused.value.code) == (param, code)


def test_an_error_in_a_stream_is_an_error_of_the_package(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numpy_engine import NumpyDecoder

    def feed(self: NumpyDecoder, tokens: Any) -> Any:
        raise RuntimeError("device lost")

    monkeypatch.setattr(NumpyDecoder, "feed", feed)
    with pytest.raises(openai.APIError, match="device lost"):
        list(client.completions.create(model=NAME, prompt="a", stream=True))
    with pytest.raises(openai.InternalServerError, match="device lost"):
        client.completions.create(model=NAME, prompt="a")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.skipif(sys.platform == "win32", reason="no SIGINT for a child process")
def test_the_command_serves_a_trained_model(tmp_path: Path) -> None:
    """``vorox serve`` as a process, with the URL and the key that it prints."""
    vorox = [sys.executable, "-u", "-m", "vorox"]
    tiny_runs.configuration(tmp_path)
    subprocess.run([*vorox, "train", "tiny.yaml", "runtime.rehearsal=false"], cwd=tmp_path, check=True)
    words = ["generate", "latest", "--prompt", "def ", "--tokens", "8", "--seed", "1", "--json"]
    generated = subprocess.run([*vorox, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    serve = [*vorox, "serve", "latest", "--port", "0"]
    with subprocess.Popen(serve, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            found = dict[str, str]()
            for line in server.stdout:
                label, _, value = line.strip().partition("  ")
                found[label] = value.strip()
                if label == "API key":
                    break
            with connect(found["base URL"], found["API key"]) as client:
                (model,) = client.models.list().data
                assert model.id.startswith("tiny-")
                answer = client.completions.create(model=model.id, prompt="def ", max_tokens=8, seed=1)
                assert answer.choices[0].text == json.loads(generated)["completions"][0]["completion"]
                with pytest.raises(openai.BadRequestError, match="chat template"):
                    client.chat.completions.create(model=model.id, messages=MESSAGES)
        finally:
            server.send_signal(signal.SIGINT)
    assert server.returncode == 130
