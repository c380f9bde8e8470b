"""Which attention heads does a model need? Each one silenced in turn, on a finished run of either engine.

    python examples/ablate_a_head.py RUN [--layer 0]

A head speaks through its columns of the output projection; with zeros there it says nothing. Weights travel under
canonical names, so no line here knows the framework.
"""

from __future__ import annotations

import argparse

import vorox


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print and return the validation loss of the whole model and without each head of a layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--layer", type=int, default=0)
    options = parser.parse_args(arguments)
    run = vorox.open_run(options.run)
    model = vorox.load_model(run)

    def mean_loss() -> float:
        return model.evaluate(run.validation_batches()).loss

    found = {"whole": mean_loss()}
    name = f"blocks.{options.layer}.attention.output.weight"
    weight = model.weights()[name]
    width = weight.shape[1] // run.config.model.num_heads
    for head in range(run.config.model.num_heads):
        silenced = weight.copy()
        silenced[:, head * width : (head + 1) * width] = 0.0
        model.set_weights({name: silenced})
        found[f"without head {head}"] = mean_loss()
    for what, loss in found.items():
        print(f"{what:<16} validation loss {loss:.4f}")  # noqa: T201
    return found


if __name__ == "__main__":
    main()
