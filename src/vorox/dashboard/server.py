"""The web server of the dashboard: pages, answers as JSON, and events when the files of a run change.

Requests that ``access`` admits go in. ``Answers`` has one method per question, by the name in ``/api/NAME``; an export
calls the same methods. No framework is loaded here; a prompt runs in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mimetypes
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from vorox.core.errors import ConfigError, DataError, VoroxError
from vorox.core.files.json_lines import finite_json
from vorox.core.files.json_reader import parse_json
from vorox.dashboard import prompting
from vorox.dashboard.exports import snapshot
from vorox.dashboard.pages import comparison_page, resource_page, run_pages
from vorox.dashboard.pages.chart_marks import chart_marks
from vorox.dashboard.pages.data_pages import DataPages, queue_names
from vorox.dashboard.pages.rank_activity import RankActivity, stalls
from vorox.dashboard.pages.re_execution_page import re_execution
from vorox.dashboard.runs import prometheus
from vorox.dashboard.runs.run_index import RunIndex, signature_of
from vorox.experiments.artifacts import find_checkpoints, verify_checkpoint
from vorox.web.access import Access, AccessMiddleware
from vorox.web.body import BodyRefused, json_body

POLL_SECONDS = 1.0
_STOP_POLL_SECONDS = 0.1
_KEEP_ALIVE_POLLS = 15
_MAX_COMPARED = 8
_MAX_BODY_BYTES = 1 << 17
_EXPORT_POINTS = 600
_MAX_SETTING = 1 << 53

Query = Mapping[str, str]


class Answers:
    """The answers to the page's questions.

    Args:
        index: The runs.
    """

    def __init__(self, index: RunIndex) -> None:
        self.index, self.data, self.activity = index, DataPages(), RankActivity()

    def get(self, name: str, query: Query) -> Any:
        """Return the answer to a question.

        Raises:
            VoroxError: The question or a run in it is unknown, or its files cannot be read.
        """
        questions: dict[str, Callable[[Query], Any]] = {
            "runs": lambda _: {"root": str(self.index.root), "runs": self.index.rows()},
            "run": lambda query: run_pages.overview(self._directory(query)),
            "curves": self._curves,
            "events": self._events,
            "samples": lambda query: run_pages.samples(self._directory(query)),
            "health": self._health,
            "ranks": lambda query: self.activity.read(self._directory(query)),
            "plan": lambda query: resource_page.plan_and_actual(self._directory(query), self.index.series(query["id"])),
            "checkpoints": lambda query: run_pages.checkpoints(
                self._directory(query), self.index.series(query.get("id", ""))
            ),
            "data": self._data,
            "documents": lambda query: self.data.documents(self._directory(query), _number(query, "step", 1)),
            "steps": self._steps,
            "re_execution": self._re_execution,
            "compare": self._compare,
        }
        if name not in questions:
            raise ConfigError(f"Unknown question {name}", where="/api")
        return questions[name](query)

    def post(self, name: str, body: Mapping[str, Any]) -> Any:
        """Handle a POST request: verify a checkpoint, or prompt one."""
        directory = self.index.directory(str(body.get("id", "")))
        if name == "verify":
            (found, *_) = find_checkpoints(directory, [str(body.get("name", ""))])
            found = verify_checkpoint(found)
            return {"name": found.name, "state": found.state, "problem": found.problem}
        if name == "generate":
            values = {key: body.get(key) for key in ("step", "tokens", "temperature", "seed")}
            if not all(map(_is_setting, values.values())):
                raise ConfigError("Sampling settings are numbers", where="generate")
            step, tokens, seed = (int(values[key] or 0) for key in ("step", "tokens", "seed"))
            prompt, temperature = str(body.get("prompt", "")), float(values["temperature"] or 0)
            return prompting.generate(directory, step, prompt, tokens, temperature, seed)
        raise ConfigError(f"Unknown request {name}", where="/api")

    def export(self) -> str:
        """Return all runs as one self-contained page."""
        answers: dict[str, Any] = {"runs": self.get("runs", {})}
        for run_id in self.index.directories():
            for name in ("run", "curves", "events", "samples", "health", "plan", "checkpoints", "data", "re_execution"):
                query = {"id": run_id, "points": str(_EXPORT_POINTS)}
                try:
                    answers[f"{name}?id={run_id}"] = self.get(name, query)
                except Exception as error:  # of one page of one run, which others may have written
                    answers[f"{name}?id={run_id}"] = {"error": str(error)}
        return snapshot.page(finite_json(answers))

    def _directory(self, query: Query) -> Path:
        return self.index.directory(query.get("id", ""))

    def _curves(self, query: Query) -> Any:
        series = self.index.series(query.get("id", ""), preview="preview" in query)
        names = query["names"].split(",") if query.get("names") else _shown(series.names)
        last_step = _number(query, "to", 0)
        return run_pages.curves(
            series, names,
            num_points=min(max(_number(query, "points", 1000), 16), 20_000),
            smoothing=None
            if query.get("smoothing", "auto") == "auto"
            else min(max(_number(query, "smoothing", 900), 0), 999) / 1000,
            first_step=_number(query, "from", 0),
            last_step=last_step or None,
        )  # fmt: skip

    def _data(self, query: Query) -> Any:
        directory, series = self._directory(query), self.index.series(query.get("id", ""))
        curves = run_pages.curves(series, queue_names(series), num_points=400)["metrics"]
        return {**self.data.mixture(directory, series.last_step), "curves": curves}

    def _events(self, query: Query) -> Any:
        directory = self._directory(query)
        found = run_pages.events(directory)
        return {"events": found, "marks": chart_marks(directory, found)}

    def _health(self, query: Query) -> Any:
        directory = self._directory(query)
        found = run_pages.health(directory, self.index.series(query.get("id", "")))
        return {**found, "stalls": stalls(directory), "activity": self.activity.read(directory)}

    def _re_execution(self, query: Query) -> Any:
        directory = self._directory(query)
        return re_execution(directory, run_pages.events(directory), self.index.directories())

    def _steps(self, query: Query) -> Any:
        ordinal = _number(query, "ordinal", 0) if query.get("ordinal") else None
        return self.data.steps(self._directory(query), query.get("uri", ""), ordinal)

    def _compare(self, query: Query) -> Any:
        ids = list(dict.fromkeys(query.get("ids", "").split("/")))[:_MAX_COMPARED]
        return comparison_page.compare([(one, self.index.directory(one), self.index.series(one)) for one in ids])


def _shown(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("activation/")]


def _is_setting(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MAX_SETTING


def _number(query: Query, name: str, default: int) -> int:
    try:
        return int(query.get(name, default))
    except ValueError:
        raise ConfigError(f"{name} is not a whole number", where=f"/api?{name}=") from None


def application(index: RunIndex, access: Access, is_stopping: Callable[[], bool] = lambda: False) -> Starlette:
    """Return the web application.

    Args:
        index: The runs.
        access: Who may use it.
        is_stopping: Whether the server stops, which ends the stream of events.
    """
    mimetypes.add_type("text/javascript", ".js")
    answers = Answers(index)

    async def get(request: Request) -> Response:
        return await _answer(lambda: answers.get(request.path_params["name"], request.query_params))

    async def post(request: Request) -> Response:
        try:
            body = parse_json(await json_body(request, _MAX_BODY_BYTES), "the body")
        except BodyRefused as refused:
            return _json({"error": refused.reason}, refused.status)
        except ValueError:
            return _json({"error": "The body is not JSON"}, 400)
        return await _answer(lambda: answers.post(request.path_params["name"], body if isinstance(body, dict) else {}))

    async def live(request: Request) -> Response:
        del request
        return StreamingResponse(_changes(index, is_stopping), media_type="text/event-stream")

    async def metrics(request: Request) -> Response:
        del request
        rows = await run_in_threadpool(index.rows)
        return Response(prometheus.exposition(rows, time.time()), media_type=prometheus.CONTENT_TYPE)

    async def page(request: Request) -> Response:
        del request
        return FileResponse(snapshot.STATIC / "index.html")

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        del app
        first = asyncio.create_task(run_in_threadpool(index.rows))  # read all runs before the page requests them
        yield
        await asyncio.wait([first], timeout=0)
        answers.data.close()

    routes = [
        Route("/", page),
        Route("/metrics", metrics),
        Route("/api/live", live),
        Route("/api/{name}", get, methods=["GET"]),
        Route("/api/{name}", post, methods=["POST"]),
        Mount("/static", StaticFiles(directory=snapshot.STATIC)),
    ]
    return Starlette(routes=routes, middleware=[Middleware(AccessMiddleware, access=access)], lifespan=lifespan)


async def _answer(question: Callable[[], Any]) -> Response:
    try:
        return _json(await run_in_threadpool(question))
    except VoroxError as error:
        # What a run lacks, such as a plan or a cache, is an answer, not a fault of the request.
        status = 200 if isinstance(error, DataError) else 400
        return _json({"error": error.what, "where": error.where, "hint": error.hint}, status)
    except OSError as error:
        return _json({"error": f"A file cannot be read: {error.strerror}", "where": str(error.filename)}, 500)
    except Exception as error:  # others may have written the files of a run
        return _json({"error": f"The run cannot be read: {type(error).__name__}: {error}"}, 500)


def _json(value: Any, status: int = 200) -> Response:
    text = json.dumps(finite_json(value), separators=(",", ":"), allow_nan=False, default=str)
    return Response(text, status, media_type="application/json")


async def _changes(index: RunIndex, is_stopping: Callable[[], bool]) -> AsyncIterator[str]:
    """Yield a server-sent event with the ids of the runs whose files have changed, at most one per second.

    The first event, ``watching``, says that no later change is missed: a page that read a run before reads it again.
    """

    def signatures() -> dict[str, Any]:
        return {run_id: signature_of(path) for run_id, path in index.directories().items()}

    known, quiet_polls = await run_in_threadpool(signatures), 0
    yield "event: watching\ndata: {}\n\n"
    while await _is_running_after(POLL_SECONDS, is_stopping):
        found = await run_in_threadpool(signatures)
        changed = [run_id for run_id in {**known, **found} if known.get(run_id) != found.get(run_id)]
        known, quiet_polls = found, quiet_polls + 1
        if changed:
            yield f"event: changed\ndata: {json.dumps(changed)}\n\n"
        elif quiet_polls % _KEEP_ALIVE_POLLS == 0:
            yield ": keep-alive\n\n"


async def _is_running_after(seconds: float, is_stopping: Callable[[], bool]) -> bool:
    """Sleep, or less if the server stops; return whether it still runs."""
    ends_at = time.monotonic() + seconds
    while not is_stopping():
        if time.monotonic() >= ends_at:
            return True
        await asyncio.sleep(_STOP_POLL_SECONDS)
    return False
