"""The server of vorox serve: an OpenAI-compatible API for one model.

Requests that ``web/access`` admits go in; completions come out, whole or as server-sent events. One request at a time
uses the model, on a thread of its own; others wait in order of arrival. A client that disconnects ends its request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from vorox.api.model import Model
from vorox.serving.answer_forms import AnswerForm, ChatForm, Choice, CompletionForm
from vorox.serving.api_requests import (
    GenerationRequest,
    RequestError,
    chat_request,
    completion_request,
    parse_json,
)
from vorox.training.inference.text_generation import Fragment, stream_text
from vorox.web.access import Access, AccessMiddleware
from vorox.web.body import BodyRefused, json_body

_log = logging.getLogger("uvicorn.error")
_MAX_BODY_BYTES = 1 << 22
_MAX_WAITING = 64


class ModelQueue:
    """Runs requests on the model, one at a time, in order of arrival.

    Args:
        model: The model.
    """

    def __init__(self, model: Model) -> None:
        self._model, self._lock, self._num_waiting = model, asyncio.Lock(), 0
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    def check_room(self) -> None:
        """Refuse a request if too many wait."""
        if self._num_waiting >= _MAX_WAITING:
            raise RequestError(
                429, f"{_MAX_WAITING} requests wait for the model; try again later", kind="rate_limit_error"
            )

    async def fragments(self, request: GenerationRequest) -> AsyncGenerator[Fragment]:
        """Yield the fragments of a request, when it is its turn.

        Raises:
            RequestError: The model failed; the traceback is in the server's log.
        """
        self._num_waiting += 1
        try:
            await self._lock.acquire()
        finally:
            self._num_waiting -= 1
        try:
            model = self._model
            found = stream_text(model.engine, model.tokenizer, request.prompts, request.settings, request.stop)
            loop = asyncio.get_running_loop()
            while (fragment := await loop.run_in_executor(self._thread, next, found, None)) is not None:
                yield fragment
        except Exception as error:
            _log.exception("A request failed")
            raise RequestError(500, f"{type(error).__name__}: {error}", kind="server_error") from error
        finally:
            self._lock.release()

    def close(self) -> None:
        """End the thread, after the token that it computes."""
        self._thread.shutdown(cancel_futures=True)


class OpenAIServer:
    """The endpoints.

    Args:
        model: The model.
        model_id: Its name in requests and answers.
    """

    def __init__(self, model: Model, model_id: str) -> None:
        self._model, self._id, self._created = model, model_id, int(time.time())
        self._queue = ModelQueue(model)

    def application(self, access: Access) -> Starlette:
        """Return the web application."""

        @asynccontextmanager
        async def lifespan(app: Starlette) -> AsyncIterator[None]:
            del app
            yield
            self._queue.close()

        def refuse(status: int, reason: str) -> Response:
            code = "invalid_api_key" if status == 401 else None
            return _failure(RequestError(status, reason, code=code))

        return Starlette(
            routes=[
                Route("/v1/models", self._models),
                Route("/v1/models/{name}", self._one_model),
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
            ],
            middleware=[Middleware(AccessMiddleware, access=access, refuse=refuse)],
            exception_handlers={
                404: lambda request, _: _failure(RequestError(404, f"Unknown URL {request.url.path}")),
                405: lambda request, _: _failure(RequestError(405, f"{request.method} is not allowed here")),
                RequestError: lambda _, error: _failure(error),  # pyright: ignore[reportArgumentType]
            },
            lifespan=lifespan,
        )

    async def _models(self, request: Request) -> Response:
        del request
        return _json({"object": "list", "data": [self._description()]})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._id:
            raise RequestError(404, f"The model {name!r} does not exist", param="model", code="model_not_found")
        return _json(self._description())

    def _description(self) -> dict[str, Any]:
        return {"id": self._id, "object": "model", "created": self._created, "owned_by": "vorox"}

    async def _completions(self, request: Request) -> Response:
        return await self._answer(request, completion_request, CompletionForm())

    async def _chat(self, request: Request) -> Response:
        return await self._answer(request, chat_request, ChatForm())

    async def _answer(
        self,
        request: Request,
        parse: Callable[[dict[str, Any], Model, str], GenerationRequest],
        form: AnswerForm,
    ) -> Response:
        body = parse_json(await _body(request))
        asked = await run_in_threadpool(parse, body, self._model, self._id)
        self._queue.check_room()
        head = {
            "id": f"{form.id_prefix}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": self._id,
            "system_fingerprint": f"step-{self._model.step}",
        }
        if asked.is_streamed:
            return StreamingResponse(self._events(asked, head, form), media_type="text/event-stream")
        texts, reasons, num_tokens = [""] * len(asked.prompts), [""] * len(asked.prompts), 0
        async with aclosing(self._queue.fragments(asked)) as fragments:
            async for index, text, reason in fragments:
                num_tokens += 1
                texts[index] += text
                reasons[index] = reason or ""
                if await request.is_disconnected():
                    return Response(status_code=499)  # the client has left
        choices = [form.choice(index, *found) for index, found in enumerate(zip(texts, reasons, strict=True))]
        return _json({**head, "object": form.whole, "choices": choices, "usage": _usage(asked, num_tokens)})

    async def _events(self, asked: GenerationRequest, head: dict[str, Any], form: AnswerForm) -> AsyncIterator[str]:
        """Yield the server-sent events of an answer."""
        extra, num_tokens = {"usage": None} if asked.has_usage else {}, 0

        def event(choices: list[Choice], extra: dict[str, Any]) -> str:
            return _event({**head, "object": form.chunk, "choices": choices, **extra})

        for index in range(len(asked.prompts)):
            if (opening := form.opening(index)) is not None:
                yield event([opening], extra)
        try:
            async with aclosing(self._queue.fragments(asked)) as fragments:
                async for index, text, reason in fragments:
                    num_tokens += 1
                    if text or reason:
                        yield event([form.part(index, text, reason)], extra)
        except RequestError as error:  # the status was sent: the error is an event
            yield _event(error.body)
            return
        if asked.has_usage:
            yield event([], {"usage": _usage(asked, num_tokens)})
        yield "data: [DONE]\n\n"


async def _body(request: Request) -> bytes:
    try:
        return await json_body(request, _MAX_BODY_BYTES)
    except BodyRefused as refused:
        raise RequestError(refused.status, refused.reason) from None


def _usage(asked: GenerationRequest, num_tokens: int) -> dict[str, int]:
    return {
        "prompt_tokens": asked.num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": asked.num_prompt_tokens + num_tokens,
    }


def _failure(error: RequestError) -> Response:
    return _json(error.body, error.status)


def _json(value: Any, status: int = 200) -> Response:
    return Response(json.dumps(value), status, media_type="application/json")


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"
