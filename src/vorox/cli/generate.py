"""``vorox generate``: continue texts with a checkpoint of a run. Parsing and printing only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from vorox.cli.output import DEFAULT_ROOT, AsJson, Root, print_json

if TYPE_CHECKING:
    from pathlib import Path

    from vorox.core.engine import Engine
    from vorox.core.schema import RunConfig
    from vorox.training.checkpointing import Checkpoint


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
    from vorox.cli.quantities import printable
    from vorox.core.errors import ConfigError
    from vorox.core.run_context import recorded_config
    from vorox.core.run_lookup import find_run
    from vorox.data.tokenizers.loading import load
    from vorox.training.checkpointing import verify
    from vorox.training.sampling import SamplingSettings, complete

    path = checkpoint_named(run)
    directory = find_run(root, run) if path is None else path.parent.parent
    config = recorded_config(directory, [] if device is None else [f"runtime.device={device}"])
    given = [*(texts or ()), *(prompts or ())] or list(config.eval.prompts)
    chosen = [text for text in given for _ in range(num_samples)]
    if not chosen:
        raise ConfigError("there is no text to continue", where="--prompt", hint='add -p "def main("')
    checkpoint = find_checkpoint(directory, step) if path is None or step is not None else verify(path)
    tokenizer = load(checkpoint.path, end_of_text=config.tokenizer.end_of_text)
    engine = open_engine(config, checkpoint)
    engine.load(checkpoint.path)
    evaluation = config.eval
    chosen_top_k = evaluation.sample_top_k if top_k is None else top_k or None
    settings = SamplingSettings(
        max_new_tokens=num_tokens or evaluation.sample_tokens,
        temperature=evaluation.sample_temperature if temperature is None else temperature,
        top_k=chosen_top_k,
        seed=config.run.seed if seed is None else seed,
        vocab_size=tokenizer.vocab_size,
        end_of_text_id=tokenizer.end_of_text_id,
        max_positions_tokens=int(checkpoint.metadata["spec"]["max_positions_tokens"]),
    )
    found = complete(engine, tokenizer, chosen, settings)
    if as_json:
        completions = [{"prompt": prompt, "completion": text} for prompt, text in found]
        print_json({"run": directory.name, "step": checkpoint.step, "completions": completions})
        return
    for number, (prompt, text) in enumerate(found):
        if number:
            typer.echo("-" * 40)
        gap = " " if config.tokenizer.kind == "none" else ""  # token ids stand apart
        typer.echo(printable(prompt + gap + text))


def checkpoint_named(name: str) -> Path | None:
    """The checkpoint of a run that a path names; ``None`` where it names none."""
    from pathlib import Path

    from vorox.core.run_layout import run_of_checkpoint
    from vorox.core.run_lookup import is_run

    path = Path(name)
    directory = run_of_checkpoint(path)
    return path if directory is not None and path.is_dir() and is_run(directory) else None


def find_checkpoint(directory: Path, step: int | None) -> Checkpoint:
    """The newest valid checkpoint of a run, or that of a step.

    Raises:
        ConfigError: There is none.
        CheckpointError: It is corrupt.
    """
    from vorox.core.errors import ConfigError
    from vorox.core.run_layout import RunLayout
    from vorox.training.checkpointing import latest_valid, verify

    if step is not None:
        path = RunLayout(directory).checkpoint(step)
        if not path.is_dir():
            raise ConfigError(
                f"there is no checkpoint of step {step:,}", where=str(directory),
                hint=f"see vorox checkpoints list {directory.name}",
            )  # fmt: skip
        return verify(path)
    found = latest_valid(
        directory, on_corrupt=lambda path, error: typer.echo(f"passing over {path.name}: {error}", err=True)
    )
    if found is None:
        raise ConfigError(f"the run {directory.name} has no checkpoint yet", where=str(directory))
    return found


def open_engine(config: RunConfig, checkpoint: Checkpoint) -> Engine:
    """An engine for the model of a checkpoint, with weights yet to be loaded."""
    from vorox import backends
    from vorox.core.distributed_context import DistributedContext
    from vorox.models.spec import ModelSpec

    spec = ModelSpec(**checkpoint.metadata["spec"])
    return backends.load(config.backend).create(config, spec, DistributedContext())
