"""``vorox chat``: talk to a model on the terminal, or through a pipe, one line a message."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator

import typer

from vorox.api.model import find_model
from vorox.cli.terminal.humanize import printable
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError, VoroxError
from vorox.core.schema.train import Weights
from vorox.training.inference.conversation import Conversation

_COMMANDS = {
    "/reset": "forget the conversation",
    "/seed N": "sample with another seed",
    "/temperature X": "0: always the most likely token",
    "/help": "show this list",
    "/quit": "end; so does Ctrl-D",
}
_PROMPT = "> "


def chat(
    run: str,
    system: str | None,
    num_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float,
    seed: int | None,
    step: int | None,
    weights: Weights,
    device: str | None,
    root: str,
) -> None:
    model = find_model(run, step=step, root=root, device=device, weights=weights, notices=PrintedNotices())
    settings = model.sampling_settings(num_tokens, temperature, top_k, seed, top_p)
    conversation = Conversation(model.engine, model.tokenizer, settings, system=system, num_tokens=num_tokens)
    if system is not None and not conversation.has_template:
        raise ConfigError("The model has no chat template for a system message", where="--system", hint="leave it out")
    kind = "its chat template" if conversation.has_template else "no chat template: it continues what you type"
    typer.echo(f"{model.state.capitalize()}, {kind}. /help lists commands; Ctrl-C stops an answer.", err=True)
    for line in _lines():
        if line.startswith("/"):
            if not _obey(line, conversation):
                return
        elif line.strip():
            _answer(conversation, line)


def _lines() -> Iterator[str]:
    """Yield the lines of standard input, with a prompt if it is a terminal."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if not sys.stdin.isatty():
        yield from (line.rstrip("\r\n") for line in sys.stdin)
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() line editing and history
    while True:
        try:
            yield input(_PROMPT)
        except EOFError:
            typer.echo("")
            return
        except KeyboardInterrupt:
            typer.echo("\n/quit or Ctrl-D ends.")


def _obey(line: str, conversation: Conversation) -> bool:
    """Carry out a command; return whether the conversation continues."""
    name, _, value = line.partition(" ")
    if name == "/quit":
        return False
    if name == "/reset":
        conversation.reset()
        typer.echo("The conversation is forgotten.", err=True)
    elif name in ("/seed", "/temperature"):
        try:
            if name == "/seed":
                conversation.change(seed=int(value))
            else:
                conversation.change(temperature=float(value))
        except ValueError:
            typer.echo(f"{name} needs a number from 0, not {value!r}.", err=True)
    else:
        if name != "/help":
            typer.echo(f"Unknown command {name}.", err=True)
        typer.echo("\n".join(f"  {command:<16}{meaning}" for command, meaning in _COMMANDS.items()), err=True)
    return True


def _answer(conversation: Conversation, line: str) -> None:
    """Print the answer to a line while it grows; Ctrl-C ends it, and what was printed stays in the conversation."""
    try:
        with contextlib.closing(conversation.answer(line)) as texts:
            for text in texts:
                typer.echo(printable(text), nl=False)
        typer.echo("")
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        typer.echo(" [stopped]")
    except VoroxError as error:
        typer.echo(str(error), err=True)
