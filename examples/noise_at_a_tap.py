"""Noise sensitivity: add noise to the residual stream of one layer at a time and measure the validation loss.

    python examples/noise_at_a_tap.py RUN [--point after_attention] [--strength 0.1]

Works on finished runs of both engines; only the function that adds the noise depends on the framework.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import vorox


def torch_noise(strength: float) -> Callable[[Any], Any]:
    import torch

    generator = torch.Generator().manual_seed(0)  # a separate generator leaves the engine's untouched

    def add(x_BTD: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(x_BTD.shape, generator=generator).to(x_BTD)
        return x_BTD + strength * x_BTD.std() * noise

    return add


def jax_noise(strength: float) -> Callable[[Any], Any]:
    import jax

    def add(x_BTD: jax.Array) -> jax.Array:
        return x_BTD + strength * x_BTD.std() * jax.random.normal(jax.random.key(0), x_BTD.shape, x_BTD.dtype)

    return add


NOISE = {"torch": torch_noise, "jax": jax_noise}


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Print and return the validation loss without noise and with noise at each layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run")
    parser.add_argument("--point", default="after_attention")
    parser.add_argument("--strength", type=float, default=0.1, help="In standard deviations of the stream.")
    options = parser.parse_args(arguments)
    run = vorox.open_run(options.run)
    model = vorox.load_model(run)

    def mean_loss() -> float:
        return model.evaluate(run.validation_batches()).loss

    losses = {"nowhere": mean_loss()}
    for layer in range(run.config.model.num_layers):
        detach = model.attach(options.point, layer, NOISE[run.config.backend](options.strength))
        losses[f"layer {layer}"] = mean_loss()
        detach()
    for place, loss in losses.items():
        print(f"noise {place:<10} validation loss {loss:.4f}")
    return losses


if __name__ == "__main__":
    main()
