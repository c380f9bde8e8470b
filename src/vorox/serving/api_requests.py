"""Requests in OpenAI's form: parsed strictly, and turned into prompts and sampling settings.

A JSON body goes in; a ``GenerationRequest`` comes out. A field that would change the answer and is not supported is
refused unless it has its neutral value; nothing is ignored except what cannot change an answer.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vorox.api.model import Model
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.files import json_reader
from vorox.data.documents import Message
from vorox.training.inference.conversation import ANSWER_TOKENS
from vorox.training.inference.sampling import SamplingSettings, check_prompt, encode_prompts
from vorox.training.inference.text_generation import answer_stop_strings, encode_conversation

_MAX_COMPLETIONS = 64
_LAST_SEED = 2**63 - 1
Encoded = TypeVar("Encoded")
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (None,), "best_of": (None, 1), "echo": (None, False), "frequency_penalty": (None, 0),
    "function_call": (None, "none"), "functions": (None, []), "logit_bias": (None, {}), "logprobs": (None, False),
    "min_tokens": (None, 0), "modalities": (None, ["text"]), "parallel_tool_calls": (None, False, True),
    "prediction": (None,), "presence_penalty": (None, 0), "reasoning_effort": (None,),
    "response_format": (None, {"type": "text"}), "suffix": (None, ""), "tool_choice": (None, "none", "auto"),
    "tools": (None, []), "top_logprobs": (None, 0), "web_search_options": (None,),
}  # fmt: skip
"""Fields that are not supported, with the values that change nothing."""
_WITHOUT_EFFECT = {
    "metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user", "verbosity",
}  # fmt: skip
"""Fields that do not change what a model of this server answers."""


class RequestError(Exception):
    """A request that is refused, in OpenAI's form.

    Args:
        status: HTTP status.
        message: What is wrong.
        param: The field.
        code: OpenAI's code of the error.
        kind: OpenAI's type of the error.

    Attributes:
        status: HTTP status.
        body: The answer.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _Sampling(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    model: str
    n: Annotated[int, Field(ge=1, le=_MAX_COMPLETIONS)] | None = None
    seed: Annotated[int, Field(ge=0, le=_LAST_SEED)] | None = None
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None


Item = TypeVar("Item")
_NotEmpty = Annotated[list[Item], Field(min_length=1)]


class _Completion(_Sampling):
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt: str | _NotEmpty[str] | _NotEmpty[int] | _NotEmpty[list[int]]


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    type: Literal["text"]
    text: str


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_Part]
    # What OpenAI's package adds to an answer that is sent back.
    annotations: Annotated[list[None], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    refusal: None = None
    tool_calls: None = None

    def message(self) -> Message:
        parts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        return Message("system" if self.role == "developer" else self.role, "".join(parts))


class _Chat(_Sampling):
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    messages: Annotated[list[_Message], Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What to generate.

    Attributes:
        prompts: Token ids of every completion, equal ones for several completions of a prompt.
        num_prompt_tokens: Tokens of all different prompts, for the usage counts.
        settings: Sampling settings.
        stop: Strings that end a completion.
        is_streamed: Whether the answer is a stream of events.
        has_usage: Whether that stream ends with the usage counts.
    """

    prompts: list[list[int]]
    num_prompt_tokens: int
    settings: SamplingSettings
    stop: list[str]
    is_streamed: bool
    has_usage: bool


def parse_json(body: bytes) -> dict[str, Any]:
    """Return the object of a request's body.

    Raises:
        RequestError: It is not a JSON object.
    """
    try:
        value = json_reader.parse_json(body, "the body")
    except ValueError as error:
        raise RequestError(400, "The body is not JSON") from error
    if not isinstance(value, dict):
        raise RequestError(400, "The body is not a JSON object")
    for name, field in value.items():
        try:
            json.dumps([name, field], ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            shown = name.encode(errors="replace").decode()
            raise RequestError(
                400, f"{shown} has half a surrogate pair, which UTF-8 cannot encode", param=shown
            ) from error
    return value


def completion_request(body: dict[str, Any], model: Model, model_id: str) -> GenerationRequest:
    """Return the request of ``/v1/completions``.

    Raises:
        RequestError: A field is missing, wrong or unsupported, or a prompt is too long.
    """
    given = _validated(_Completion, body, model_id)
    prompt = given.prompt
    if isinstance(prompt, list) and all(isinstance(one, int) for one in prompt):
        prompts = [cast("list[int]", prompt)]
    elif isinstance(prompt, list) and isinstance(prompt[0], list):
        prompts = cast("list[list[int]]", prompt)
    else:
        texts = [prompt] if isinstance(prompt, str) else cast("list[str]", prompt)
        prompts = _encoded(lambda: encode_prompts(model.tokenizer, texts), "prompt")
    return _request(given, prompts, given.max_tokens, model.config.eval.sample_tokens, [], model, "prompt")


def chat_request(body: dict[str, Any], model: Model, model_id: str) -> GenerationRequest:
    """Return the request of ``/v1/chat/completions``.

    Raises:
        RequestError: As ``completion_request``; or the model has no chat template, or it refuses the conversation.
    """
    given = _validated(_Chat, body, model_id)
    messages = [message.message() for message in given.messages]
    prompt = _encoded(lambda: encode_conversation(model.tokenizer, messages), "messages")
    max_tokens = given.max_completion_tokens or given.max_tokens
    ends = answer_stop_strings(model.tokenizer)
    return _request(given, [prompt], max_tokens, ANSWER_TOKENS, ends, model, "messages")


Given = TypeVar("Given", bound=_Sampling)


def _validated(schema: type[Given], body: dict[str, Any], model_id: str) -> Given:
    for name, neutral in _NEUTRAL.items():
        if name in body and not _is_one_of(body[name], neutral) and name not in schema.model_fields:
            raise RequestError(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")
    known = {name: value for name, value in body.items() if name not in _WITHOUT_EFFECT and name not in _NEUTRAL}
    try:
        given = schema.model_validate(known)
    except ValidationError as error:
        raise _refused(error) from error
    if given.model != model_id:
        raise RequestError(
            404, f"The model {given.model!r} does not exist; this server has {model_id!r}", param="model",
            code="model_not_found",
        )  # fmt: skip
    if given.stream_options is not None and not given.stream:
        raise RequestError(400, "stream_options needs stream: true", param="stream_options")
    return given


def _is_one_of(value: Any, values: Sequence[Any]) -> bool:
    """Whether a value is one of some; 0 is not false, since ``logprobs: 0`` requests those of the chosen tokens."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def _refused(error: ValidationError) -> RequestError:
    """Return the refusal of the first wrong field; one of several types has a message for each."""
    found = error.errors(include_url=False, include_input=False)
    param = found[0]["loc"][0] if found[0]["loc"] else None
    own = [one for one in found if one["loc"][:1] == found[0]["loc"][:1]]
    place = ".".join(map(str, found[0]["loc"])) if len(own) == 1 else str(param)
    if len(own) == 1 and own[0]["type"] == "extra_forbidden":
        unsupported = f"{place} is not supported by this server"
        return RequestError(400, unsupported, param=str(param), code="unsupported_parameter")
    reasons = "; or ".join(dict.fromkeys(one["msg"] for one in own))
    return RequestError(400, f"{place}: {reasons}", param=None if param is None else str(param))


def _encoded(encode: Callable[[], Encoded], param: str) -> Encoded:
    try:
        return encode()
    except VoroxError as error:
        raise RequestError(400, str(error), param=param) from error


def _request(
    given: _Sampling,
    prompts: list[list[int]],
    max_tokens: int | None,
    default_tokens: int,
    ends: Sequence[str],
    model: Model,
    param: str,
) -> GenerationRequest:
    num_samples = given.n or 1
    if len(prompts) * num_samples > _MAX_COMPLETIONS:
        raise RequestError(400, f"A request has at most {_MAX_COMPLETIONS} completions", param=param)
    room_tokens = model.spec.max_positions_tokens - max(map(len, prompts))
    num_tokens = max_tokens or max(1, min(default_tokens, room_tokens))
    top_p = 1.0 if given.top_p is None else given.top_p
    settings = model.sampling_settings(num_tokens, given.temperature, given.top_k, given.seed, top_p)
    settings = replace(settings, min_p=given.min_p or 0.0)
    if given.repetition_penalty is not None:  # else that of the model's generation_config.json
        settings = replace(settings, repetition_penalty=given.repetition_penalty)
    for prompt in prompts:
        try:
            check_prompt(prompt, settings, where=param)
        except ConfigError as error:
            is_long = len(prompt) + num_tokens > settings.max_positions_tokens
            code = "context_length_exceeded" if is_long else None
            raise RequestError(400, str(error), param=param, code=code) from error
    stop = [given.stop] if isinstance(given.stop, str) else given.stop or []
    options = given.stream_options
    return GenerationRequest(
        prompts=[prompt for prompt in prompts for _ in range(num_samples)],
        num_prompt_tokens=sum(map(len, prompts)),
        settings=settings,
        stop=[*ends, *stop],
        is_streamed=bool(given.stream),
        has_usage=options is not None and options.include_usage,
    )
