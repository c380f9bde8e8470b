"""Head ablation: zero each attention head in turn and measure the validation loss of a finished run.

    python examples/ablate_a_head.py RUN [--layer 0]

A head contributes through its columns of the output projection, so zeroing them removes it. Parameters have the same
names in both engines, so the script works with either.
"""

from __future__ import annotations

import argparse

import vorox


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print and return the validation loss of the whole model, and without each head of a layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--layer", type=int, default=0)
    options = parser.parse_args(arguments)
    run = vorox.open_run(options.run)
    model = vorox.load_model(run)

    def mean_loss() -> float:
        return model.evaluate(run.validation_batches()).loss

    losses = {"whole": mean_loss()}
    parameter = f"blocks.{options.layer}.attention.output.weight"
    weight = model.weights()[parameter]
    width = weight.shape[1] // run.config.model.num_heads
    for head in range(run.config.model.num_heads):
        ablated = weight.copy()
        ablated[:, head * width : (head + 1) * width] = 0.0
        model.set_weights({parameter: ablated})
        losses[f"without head {head}"] = mean_loss()
    for name, loss in losses.items():
        print(f"{name:<16} validation loss {loss:.4f}")
    return losses


if __name__ == "__main__":
    main()
