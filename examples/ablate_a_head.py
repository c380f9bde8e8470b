"""Which attention heads does a model need? Each one silenced in turn, on a finished run of either engine.

    python examples/ablate_a_head.py RUN [--layer 0]

A head speaks through its columns of the output projection; with zeros there it says nothing. Weights travel under
canonical names, so no line here knows the framework.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vorox.cli.generate import find_checkpoint, open_engine
from vorox.core.run_context import recorded_config
from vorox.data.dataset import prepare
from vorox.training import feed


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print and return the validation loss of the whole model and without each head of a layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--layer", type=int, default=0)
    options = parser.parse_args(arguments)
    config = recorded_config(options.run)
    validation = feed.validation_set(config, prepare(config, build=False))
    assert validation is not None, "the run holds nothing out"
    checkpoint = find_checkpoint(options.run, None)
    engine = open_engine(config, checkpoint)
    engine.load(checkpoint.path)
    weights = {name: array.copy() for name, array in engine.export_weights()}

    def mean_loss() -> float:
        values = [engine.eval_step(batch) for batch in validation()]
        return sum(value.loss_sum for value in values) / sum(value.num_target_tokens for value in values)

    found = {"whole": mean_loss()}
    name = f"blocks.{options.layer}.attention.output.weight"
    width = weights[name].shape[1] // config.model.num_heads
    for head in range(config.model.num_heads):
        silenced = weights[name].copy()
        silenced[:, head * width : (head + 1) * width] = 0.0
        engine.import_weights((weights | {name: silenced}).items())
        found[f"without head {head}"] = mean_loss()
    for what, loss in found.items():
        print(f"{what:<16} validation loss {loss:.4f}")  # noqa: T201
    return found


if __name__ == "__main__":
    main()
