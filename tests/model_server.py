"""A server of OpenAI's API in this process, as ``vorox serve`` sets it up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eventually import wait_until
from vorox.api.model import find_model
from vorox.serving.server import OpenAIServer
from vorox.training.materialize import StateNotices
from vorox.web.listener import listen
from vorox.web.running import server_of

TOKEN = "correct-horse-battery"
NAME = "tiny"


@contextmanager
def model_server(run: Path) -> Iterator[str]:
    """The base URL of a server with the newest checkpoint of a run, as ``NAME``; it accepts ``TOKEN``."""
    model = find_model(str(run), step=None, root="runs", device=None, notices=StateNotices())
    listener, access = listen("127.0.0.1", 0, TOKEN, False, command="vorox serve", has_pages=False)
    server = server_of(OpenAIServer(model, NAME).application(access), stop_seconds=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)  # the socket refuses connections before
        yield f"{access.url()}v1"
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
