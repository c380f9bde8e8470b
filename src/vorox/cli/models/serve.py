"""``vorox serve``: OpenAI's HTTP API for a trained model."""

from __future__ import annotations

from pathlib import Path

import typer

from vorox.api.model import find_model
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.platform.installation import install_command
from vorox.core.schema.train import Weights


def serve(
    run: str,
    host: str,
    port: int,
    token: str | None,
    no_token: bool,
    name: str | None,
    step: int | None,
    weights: Weights,
    device: str | None,
    root: str,
) -> None:
    try:
        from vorox.serving.server import OpenAIServer  # starlette and uvicorn are optional
        from vorox.web.listener import check_token, listen
        from vorox.web.running import server_of
    except ImportError as error:
        raise ConfigError(
            f"The server needs the package {error.name}", where="vorox serve", hint=install_command("serve")
        ) from error
    check_token(host, token, no_token)
    model = find_model(run, step=step, root=root, device=device, weights=weights, notices=PrintedNotices())
    model_id = name or Path(model.name).name
    listener, access = listen(host, port, token, no_token, command="vorox serve", has_pages=False)
    chat = "with its chat template" if model.tokenizer.chat_template else "none: the model has no chat template"
    lines = [
        f"Model {model_id}, {model.state}",
        "",
        f"  base URL  {access.url()}v1",
        f"  API key   {access.token or 'none needed'}",
        f"  chat      {chat}",
        "",
        "One request at a time uses the model; others wait. Ctrl-C stops the server.",
    ]
    typer.echo("\n".join(lines))
    server_of(OpenAIServer(model, model_id).application(access), stop_seconds=1).run(sockets=[listener])
