"""``vorox generate``: continue texts with a checkpoint of a run. Parsing and printing only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, print_json

if TYPE_CHECKING:
    from pathlib import Path


def generate(
    run: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="Id, the beginning of one, a path, or 'latest'.")
    ],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT ...]", show_default=False, help="Texts to continue, as -p.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Text to continue; may be repeated. Default: eval.prompts."),
    ] = None,
    num_tokens: Annotated[int | None, typer.Option("--tokens", min=1, help="Most tokens of a completion.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 takes the likeliest token.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Draw from so many likeliest tokens; 0 from all.")] = None,
    num_samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Completions of each prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the draws; that of the run.")] = None,
    step: Annotated[int | None, typer.Option("--step", help="Checkpoint to use; the newest valid one.")] = None,
    device: Annotated[str | None, typer.Option(help="runtime.device instead of the run's.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Continue texts. The same run, prompt and seed give the same text."""
    from vorox.api.model import find_model
    from vorox.cli.humanize import printable
    from vorox.core.errors import ConfigError
    from vorox.training.sampling import complete

    model = find_model(run, step=step, root=root, device=device, on_corrupt=passed_over)
    given = [*(texts or ()), *(prompts or ())] or list(model.config.eval.prompts)
    chosen = [text for text in given for _ in range(num_samples)]
    if not chosen:
        raise ConfigError("there is no text to continue", where="--prompt", hint='add -p "def main("')
    settings = model.sampling_settings(num_tokens, temperature, top_k, seed)
    found = complete(model.engine, model.tokenizer, chosen, settings)
    if as_json:
        completions = [{"prompt": prompt, "completion": text} for prompt, text in found]
        print_json({"run": model.run_directory.name, "step": model.step, "completions": completions})
        return
    for number, (prompt, text) in enumerate(found):
        if number:
            typer.echo("-" * 40)
        gap = " " if model.config.tokenizer.kind == "none" else ""  # token ids stand apart
        typer.echo(printable(prompt + gap + text))


def passed_over(path: Path, error: Exception) -> None:
    """Show a corrupt checkpoint that an older one takes the place of."""
    typer.echo(f"passing over {path.name}: {error}", err=True)
