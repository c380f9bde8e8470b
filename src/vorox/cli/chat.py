"""``vorox chat``: talk to a model on the terminal, or through a pipe, one line a message."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.generate import report_skipped
from vorox.cli.output import DEFAULT_ROOT, Root, WeightsOption

if TYPE_CHECKING:
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
    run: Annotated[str, typer.Argument(metavar="RUN|PATH", help="Run id or prefix, a path, or 'latest'.")],
    system: Annotated[str | None, typer.Option("--system", help="System message.", show_default=False)] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Maximum number of tokens per answer.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from the k most likely tokens; 0: all.")] = None,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this probability together.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Sampling seed. Default: the run's.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint to use. Default: the newest valid one.")
    ] = None,
    weights: WeightsOption = "model",
    device: Annotated[str | None, typer.Option(help="Device, instead of the run's runtime.device.")] = None,
    root: Root = DEFAULT_ROOT,
) -> None:
    """Chat with a model; without a chat template, it continues what you type."""
    from vorox.api.model import find_model
    from vorox.core.errors import ConfigError
    from vorox.training.inference.conversation import Conversation

    model = find_model(run, step=step, root=root, device=device, weights=weights, on_corrupt=report_skipped)
    settings = model.sampling_settings(num_tokens, temperature, top_k, seed, top_p)
    conversation = Conversation(model.engine, model.tokenizer, settings, system=system, num_tokens=num_tokens)
    if system is not None and not conversation.has_template:
        raise ConfigError("The model has no chat template for a system message", where="--system", hint="leave it out")
    kind = "its chat template" if conversation.has_template else "no chat template: it continues what you type"
    typer.echo(f"Step {model.step:,}, {kind}. /help lists commands; Ctrl-C stops an answer.", err=True)
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
    from vorox.cli.humanize import printable
    from vorox.core.errors import VoroxError

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
