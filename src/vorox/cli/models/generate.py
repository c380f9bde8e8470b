"""``vorox generate``: complete prompts with a checkpoint."""

from __future__ import annotations

import typer

from vorox.api.model import find_model
from vorox.cli.terminal.humanize import printable
from vorox.cli.terminal.output import print_json
from vorox.cli.terminal.state_notices import PrintedNotices
from vorox.core.errors import ConfigError
from vorox.core.schema.train import Weights
from vorox.training.inference.image_prompts import encode_image_prompt
from vorox.training.inference.sampling import complete
from vorox.training.inference.sampling import generate as sample


def generate(
    run: str,
    texts: list[str] | None,
    prompts: list[str] | None,
    images: list[str] | None,
    num_tokens: int | None,
    temperature: float | None,
    top_k: int | None,
    top_p: float,
    num_samples: int,
    seed: int | None,
    step: int | None,
    weights: Weights,
    device: str | None,
    root: str,
    as_json: bool,
) -> None:
    model = find_model(run, step=step, root=root, device=device, weights=weights, notices=PrintedNotices())
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
        print_json({"run": model.name, "step": model.step, "completions": completions})
        return
    for number, (prompt, text) in enumerate(found):
        if number:
            typer.echo("-" * 40)
        gap = " " if model.config.tokenizer.kind == "none" else ""  # separate token ids
        typer.echo(printable(prompt + gap + text))
