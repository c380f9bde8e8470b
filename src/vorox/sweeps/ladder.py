"""A ladder: narrow models at several learning rates choose the rate of a wide one.

A configuration, widths and rates go in; an ordinary run per pair, its validation loss, and the settings of the wide
model come out. The narrowest width is the base of ``model.mup_base_hidden_size``. A repeated command continues an
interrupted run and repeats no finished one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vorox.core.config.resolve import model_label
from vorox.core.errors import ConfigError, NumericalError
from vorox.core.schema import RunConfig
from vorox.run import train

ConfigLoader = Callable[[Sequence[str]], RunConfig]
"""Loads the configuration with further overrides."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A run of the ladder.

    Attributes:
        hidden_size: Width of the model.
        lr: Peak learning rate, at the base width.
        loss: Validation loss after the last step; infinite if the run was not finite.
        run: The run directory; empty if it was not finite.
    """

    hidden_size: int
    lr: float
    loss: float
    run: str


class Ladder:
    """A ladder over the widths and learning rates of a configuration.

    Args:
        load: Loads the configuration with further overrides.
        widths: Hidden sizes.
        rates: Peak learning rates.
        target: Hidden size of the wide model; default: that of the configuration.

    Raises:
        ConfigError: A width or a setting contradicts the ladder, or a run would have no validation loss.
    """

    def __init__(
        self, load: ConfigLoader, widths: Sequence[int], rates: Sequence[float], target: int | None = None
    ) -> None:
        self._load = load
        self.widths, self.rates = sorted(set(widths)), sorted(set(rates))
        self._config = load([])
        self.target = self._config.model.hidden_size if target is None else target
        self._check()
        for width in (*self.widths, self.target):  # before anything is trained
            load(self.settings(width, self.rates[0]))

    def settings(self, width: int, lr: float) -> list[str]:
        """Return the overrides of a width: heads as wide as in the configuration, and an MLP in proportion."""
        model = self._config.model
        head_dim = model.head_dim or model.hidden_size // model.num_heads
        found = {"hidden_size": width, "num_heads": _whole(width, 1, head_dim, f"number of heads of {head_dim}", width)}
        if model.num_kv_heads is not None:
            found["num_kv_heads"] = _whole(
                found["num_heads"], model.num_kv_heads, model.num_heads, "number of key/value heads", width
            )
        if model.intermediate_size is not None:
            found["intermediate_size"] = _whole(
                width, model.intermediate_size, model.hidden_size, "width of its MLP", width
            )
        found["mup_base_hidden_size"] = self.widths[0]
        return [*(f"model.{key}={value}" for key, value in found.items()), "model.tie_embeddings=false",
                f"optimizer.lr={lr:g}"]  # fmt: skip

    def climb(self, report: Callable[[Rung], None], argv: Sequence[str]) -> list[Rung]:
        """Train all runs, narrow models first.

        Args:
            report: Called after every run.
            argv: The command, for the records of the runs.

        Raises:
            VoroxError: A run failed otherwise than by a loss that is not finite, or was stopped.
        """
        label = self._config.run.name or model_label(self._config)
        found: list[Rung] = []
        for width in self.widths:
            for lr in self.rates:
                config = self._load([*self.settings(width, lr), f"run.name={label}-ladder-{width}-{lr:g}"])
                try:
                    outcome = train(config, argv=list(argv))
                    loss, run = outcome.eval_losses[max(outcome.eval_losses)], str(outcome.run_directory)
                except NumericalError:
                    loss, run = math.inf, ""
                found.append(Rung(width, lr, loss, run))
                report(found[-1])
        return found

    def best(self, rungs: Sequence[Rung]) -> dict[int, Rung]:
        """Return the rung with the lowest finite loss of every width that has one."""
        finite = [rung for rung in rungs if math.isfinite(rung.loss)]
        return {rung.hidden_size: rung for rung in sorted(finite, key=lambda rung: -rung.loss)}

    def _check(self) -> None:
        config = self._config
        if not self.widths or not self.rates or self.widths[0] < 1 or self.rates[0] <= 0:
            raise ConfigError("A ladder needs widths and learning rates above zero", where="vorox ladder")
        if config.train.from_weights is not None or config.model.kind != "decoder":
            raise ConfigError(
                "A ladder trains native decoders from random weights", where="train.from_weights, model.kind",
                hint="remove the setting",
            )  # fmt: skip
        if not config.eval.at_end or not (config.data.validation.held_out_fraction or config.data.validation.sources):
            raise ConfigError(
                "Runs of a ladder are compared by the validation loss at their end", where="eval.at_end",
                hint="set eval.at_end=true, and hold out text",
            )  # fmt: skip


def _whole(number: int, numerator: int, denominator: int, what: str, width: int) -> int:
    """Return a size of a width, in proportion to that of the configuration."""
    value, rest = divmod(number * numerator, denominator)
    if rest or not value:
        raise ConfigError(
            f"hidden_size {width} has no whole {what}",
            where="--widths, --target",
            hint=f"try multiples of {denominator}",
        )
    return value
