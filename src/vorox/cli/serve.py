"""``vorox serve``: OpenAI's HTTP API for a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vorox.cli.generate import report_skipped
from vorox.cli.output import DEFAULT_ROOT, Root, WeightsOption

DEFAULT_PORT = 8000


def serve(
    run: Annotated[str, typer.Argument(metavar="RUN|PATH", help="Run id or prefix, a path, or 'latest'.")],
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0: a free one.")] = DEFAULT_PORT,
    token: Annotated[
        str | None,
        typer.Option("--token", envvar="VOROX_TOKEN", help="API key. Default: a new random one.",
                     show_default=False),
    ] = None,
    no_token: Annotated[bool, typer.Option("--no-token", help="Require none; only on this machine's address.")] = False,
    name: Annotated[
        str | None, typer.Option("--name", help="Model in requests. Default: the run's directory.", show_default=False)
    ] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint to use. Default: the newest valid one.")
    ] = None,
    weights: WeightsOption = "model",
    device: Annotated[str | None, typer.Option(help="Device, instead of the run's runtime.device.")] = None,
    root: Root = DEFAULT_ROOT,
) -> None:  # fmt: skip
    """Serve a model with an OpenAI-compatible API: completions and chat completions, whole or streamed."""
    from vorox.core.errors import ConfigError
    from vorox.core.installation import install_command

    try:
        import uvicorn

        from vorox.serving.server import OpenAIServer
        from vorox.web.listener import check_token, listen
    except ImportError as error:
        raise ConfigError(
            f"The server needs the package {error.name}", where="vorox serve", hint=install_command("serve")
        ) from error
    from vorox.api.model import find_model

    check_token(host, token, no_token)
    model = find_model(run, step=step, root=root, device=device, weights=weights, on_corrupt=report_skipped)
    model_id = name or (Path(run).resolve() if model.path is None else model.run_directory).name
    listener, access = listen(host, port, token, no_token, command="vorox serve", has_pages=False)
    chat = "with its chat template" if model.tokenizer.chat_template else "none: the model has no chat template"
    lines = [
        f"Model {model_id} of step {model.step:,}",
        "",
        f"  base URL  {access.url()}v1",
        f"  API key   {access.token or 'none needed'}",
        f"  chat      {chat}",
        "",
        "One request at a time uses the model; others wait. Ctrl-C stops the server.",
    ]
    typer.echo("\n".join(lines))
    config = uvicorn.Config(
        OpenAIServer(model, model_id).application(access), log_level="warning", timeout_graceful_shutdown=1
    )
    uvicorn.Server(config).run(sockets=[listener])
