"""``vorox generate``: complete prompts with a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, WeightsOption, print_json

if TYPE_CHECKING:
    from pathlib import Path


def generate(
    run: Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help="Run id or prefix, a path, or 'latest'.")],
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT ...]", show_default=False, help="Prompts, the same as -p.")
    ] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="Prompt; repeatable. Default: eval.prompts."),
    ] = None,
    images: Annotated[
        list[str] | None,
        typer.Option("--image", help="Image of the prompt, which has <image> where it belongs; repeatable."),
    ] = None,
    num_tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Maximum number of tokens per completion.")
    ] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="Sampling temperature; 0: greedy.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Sample from the k most likely tokens; 0: all.")] = None,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this probability together.")
    ] = 1.0,
    num_samples: Annotated[int, typer.Option("--samples", "-n", min=1, help="Completions per prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(min=0, help="Sampling seed. Default: the run's.")] = None,
    step: Annotated[
        int | None, typer.Option("--step", help="Checkpoint to use. Default: the newest valid one.")
    ] = None,
    weights: WeightsOption = "model",
    device: Annotated[str | None, typer.Option(help="Device, instead of the run's runtime.device.")] = None,
    root: Root = DEFAULT_ROOT,
    as_json: AsJson = False,
) -> None:
    """Complete prompts. The same checkpoint, prompt and seed give the same text."""
    from vorox.api.model import find_model
    from vorox.cli.humanize import printable
    from vorox.core.errors import ConfigError
    from vorox.training.evaluation.sampling import complete
    from vorox.training.evaluation.sampling import generate as sample
    from vorox.training.inference.image_prompts import encode_image_prompt

    model = find_model(run, step=step, root=root, device=device, weights=weights, on_corrupt=report_skipped)
    given = [*(texts or ()), *(prompts or ())] or list(model.config.eval.prompts)
    chosen = [text for text in given for _ in range(num_samples)]
    if not chosen:
        raise ConfigError("No prompt is given", where="--prompt", hint='add -p "def main("')
    settings = model.sampling_settings(num_tokens, temperature, top_k, seed, top_p)
    if images:
        if len(given) > 1:
            raise ConfigError("Images belong to a single prompt", where="--image", hint="give one prompt")
        ids, pixels = encode_image_prompt(model.config, model.tokenizer, given[0], images, num_samples)
        completions = sample(model.engine, ids, settings, pixels)
        found = [(given[0], model.tokenizer.decode(completion)) for completion in completions]
    else:
        found = complete(model.engine, model.tokenizer, chosen, settings)
    if as_json:
        completions = [{"prompt": prompt, "completion": text} for prompt, text in found]
        print_json({"run": model.run_directory.name, "step": model.step, "completions": completions})
        return
    for number, (prompt, text) in enumerate(found):
        if number:
            typer.echo("-" * 40)
        gap = " " if model.config.tokenizer.kind == "none" else ""  # separate token ids
        typer.echo(printable(prompt + gap + text))


def report_skipped(path: Path, error: Exception) -> None:
    """Report a corrupt checkpoint that is skipped in favour of an older one."""
    typer.echo(f"Skipping {path.name}: {error}", err=True)
