"""A trained model in Python: logits, generation, validation loss, weights and taps, for either engine."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vorox import backends
from vorox.core.atomic import MANIFEST_NAME
from vorox.core.config import config_from_record
from vorox.core.distributed_context import DistributedContext
from vorox.core.engine import Engine, Tap, TapPoint, Weights, attach_taps, exchange_average
from vorox.core.errors import ConfigError
from vorox.core.log import RunLog
from vorox.core.run_context import recorded_config
from vorox.core.run_layout import RunLayout, run_of_checkpoint
from vorox.core.run_lookup import find_run, is_run, run_argument
from vorox.core.schema import LossConfig, RunConfig
from vorox.core.staged_directory import read_manifest
from vorox.data.cache.report import PrepareProgress
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.adapter_spec import AdapterSpec, base_fingerprint
from vorox.models.engine_state import read_average, read_weights
from vorox.models.spec import ModelSpec
from vorox.models.stored_spec import spec_from_json
from vorox.run import choose_micro_batch, make_workload
from vorox.training.auto_micro_batch import with_micro_batch
from vorox.training.checkpoints.adapter_base import check_base, load_base
from vorox.training.checkpoints.derived import is_derived
from vorox.training.checkpoints.store import Checkpoint, latest_valid, verify
from vorox.training.evaluation.evaluate import Evaluation
from vorox.training.inference.language_model import LanguageModel
from vorox.training.inference.model_source import weights_directory

if TYPE_CHECKING:
    from vorox.api.runs import Run

__all__ = ["Evaluation", "Model", "create_model", "load_model"]


def create_model(source: RunConfig, *, device: str | None = None, on_progress: PrepareProgress | None = None) -> Model:
    """Create a model with the initial weights that a run of a configuration starts from, for a loop of your own.

    Args:
        source: A configuration returned by ``load_config``.
        device: Replaces ``runtime.device``.
        on_progress: Called with the progress of preparing tokenizer and data.
    """
    config = source
    if device is not None:
        config = source.model_copy(update={"runtime": source.runtime.model_copy(update={"device": device})})
    config = with_micro_batch(config, choose_micro_batch(config, "never", DistributedContext()))
    with closing(make_workload(config, DistributedContext(), RunLog(None), on_progress)) as workload:
        return Model(config, workload.engine, workload.corpus.tokenizer, workload.spec, 0)


def load_model(
    source: str | Path | Run = "latest",
    *,
    step: int | None = None,
    root: str | Path = "runs",
    device: str | None = None,
    weights: Weights = "model",
) -> Model:
    """Load the model of a checkpoint.

    Args:
        source: A run returned by ``open_run``; the path of a run directory, of a checkpoint in one or of averaged or
            pruned weights; a run id or a unique part of it; or ``latest``.
        step: Step of the checkpoint. ``None``: the newest valid one.
        root: Directory of the runs, where an id or ``latest`` is looked up.
        device: Replaces the run's ``runtime.device``, for example ``cpu``.
        weights: ``ema`` for the moving average of the parameters (``train.ema_decay``).

    Raises:
        ConfigError: The run or checkpoint does not exist, or the run's backend is not installed.
        CheckpointError: The checkpoint is corrupt.
    """
    name = source if isinstance(source, str | Path) else source.directory
    return find_model(str(name), step=step, root=root, device=device, weights=weights, on_corrupt=_warn_of_corrupt)


def find_model(
    name: str,
    *,
    step: int | None,
    root: str | Path,
    device: str | None,
    on_corrupt: Callable[[Path, Exception], None],
    weights: Weights = "model",
) -> Model:
    """Load a model like ``load_model``, and call ``on_corrupt`` with each corrupt checkpoint that is skipped."""
    derived = find_derived(name, step)
    if derived is not None:
        config = derived_config(derived)
        if device is not None:
            config = config.model_copy(update={"runtime": config.runtime.model_copy(update={"device": device})})
        engine, spec = open_engine(config, derived), spec_from_json(derived.metadata["spec"])
        read = read_weights if weights == "model" else read_average  # derived weights have none
        engine.import_weights(read(derived.path, spec))
        tokenizer = load_tokenizer(derived.path, end_of_text=config.tokenizer.end_of_text)
        return Model(config, engine, tokenizer, spec, derived.step)
    directory, checkpoint = find_checkpoint_named(name, step, root, on_corrupt)
    config = recorded_config(directory, [] if device is None else [f"runtime.device={device}"])
    engine = open_engine(config, checkpoint)
    engine.load(checkpoint.path)
    if weights == "ema":
        exchange_average(engine, config)
    tokenizer = load_tokenizer(checkpoint.path, end_of_text=config.tokenizer.end_of_text)
    spec = spec_from_json(checkpoint.metadata["spec"])
    return Model(config, engine, tokenizer, spec, checkpoint.step, checkpoint.path)


class Model(LanguageModel):
    """A model with its weights and tokenizer, from ``load_model`` or ``create_model``.

    Attributes:
        config: The run's configuration.
        step: Number of optimizer steps that the model was trained for.
        path: The checkpoint; ``None`` for a new model.
        spec: The architecture, with the name and shape of every parameter.
        tokenizer: The tokenizer of the model.
        engine: The engine that runs the model, for anything that this class does not cover.
    """

    def __init__(
        self, config: RunConfig, engine: Engine, tokenizer: Tokenizer, spec: ModelSpec, step: int,
        path: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(engine, tokenizer, config, spec, step)
        self.path = path

    def __repr__(self) -> str:
        return f"Model({str(self.path or 'new')!r}, {self.spec.num_parameters:,} parameters, {self.engine.name})"

    @property
    def run_directory(self) -> Path:
        """Directory of the run that trained the model."""
        if self.path is None:
            raise ConfigError(
                "This model belongs to no run", where="model.run_directory", hint="vorox.load_model loads one of a run"
            )
        return self.path.parent.parent

    @property
    def module(self) -> Any:
        """The ``torch.nn.Module`` of the model, for hooks and for optimizers of your own.

        Raises:
            ConfigError: The engine is not PyTorch's.
        """
        return self._torch("module").model

    def forward(self, input_ids: Any) -> Any:
        """Return the logits of rows as a tensor with gradients, fp32 ``[B, T, V]``, without dropout.

        Args:
            input_ids: Integers ``[B, T]``: a tensor or an array.

        Raises:
            ConfigError: The engine is not PyTorch's, or the rows are too long.
        """
        return self._torch("forward").forward(np.asarray(input_ids, dtype=np.int32))

    def _torch(self, name: str) -> Any:
        if self.engine.name != "torch":
            raise ConfigError(
                f"Backend {self.engine.name} has no torch module", where=f"model.{name}",
                hint="use backend=torch; model.attach and model.logits work with either engine",
            )  # fmt: skip
        return self.engine

    def attach(self, point: TapPoint, layer: int, function: Callable[[Any], Any]) -> Callable[[], None]:
        """Attach a tap: call a function with the residual stream at a point of a layer, in every forward pass.

        Args:
            point: ``block_input``, ``after_attention`` or ``after_mlp``.
            layer: Index of the layer, from 0.
            function: Receives the residual stream ``x_BTD`` as a tensor of the engine's framework. A tensor that it
                returns replaces the stream; ``None`` leaves it unchanged.

        Returns:
            A function that detaches the tap.

        Raises:
            ConfigError: The point or layer does not exist, or the engine does not support taps.
        """
        return attach_taps(self.engine, [Tap(point, layer, function)])

    def weights(self) -> dict[str, npt.NDArray[np.float32]]:
        """Return a float32 copy of every parameter by canonical name; ``spec`` lists names and shapes."""
        return {name: array.copy() for name, array in self.engine.export_weights()}

    def set_weights(self, weights: Mapping[str, npt.NDArray[np.float32]]) -> None:
        """Replace parameters by canonical name; parameters that are not named keep their values.

        Raises:
            CheckpointError: A name is unknown or a shape differs.
        """
        self.engine.import_weights(({**self.weights(), **weights}).items())


def find_derived(name: str, step: int | None = None) -> Checkpoint | None:
    """Return the averaged or pruned weights in a directory, verified; ``None`` if ``name`` is not one.

    Raises:
        ConfigError: A step is named.
    """
    path = Path(name)
    if not (path / MANIFEST_NAME).is_file() or not is_derived(read_manifest(path)["metadata"]):
        return None
    if step is not None:
        raise ConfigError("Averaged or pruned weights have no steps", where=name, hint="leave the step out")
    return verify(path)


def derived_config(derived: Checkpoint) -> RunConfig:
    """Return the configuration of the run whose checkpoints were averaged or pruned."""
    return config_from_record(derived.metadata["settings"])


def find_checkpoint_named(
    name: str, step: int | None, root: str | Path, on_corrupt: Callable[[Path, Exception], None]
) -> tuple[Path, Checkpoint]:
    """Return a run, by name or by the path of one of its checkpoints, and the checkpoint (see ``find_checkpoint``)."""
    path = _checkpoint_named(name)
    if path is not None and step is None:
        return path.parent.parent, verify(path)
    directory = find_run(root, name) if path is None else path.parent.parent
    return directory, find_checkpoint(directory, step, on_corrupt=on_corrupt)


def _checkpoint_named(name: str) -> Path | None:
    """Return the path of a checkpoint directory in a run; ``None`` if ``name`` is not one."""
    path = Path(name)
    directory = run_of_checkpoint(path)
    return path if directory is not None and path.is_dir() and is_run(directory) else None


def find_checkpoint(
    run_directory: Path, step: int | None, *, on_corrupt: Callable[[Path, Exception], None]
) -> Checkpoint:
    """Return the checkpoint of a step, or the newest valid one.

    Args:
        run_directory: The run.
        step: Step of the checkpoint. ``None``: the newest valid one.
        on_corrupt: Called with each corrupt checkpoint that is skipped.

    Raises:
        ConfigError: The run has no such checkpoint.
        CheckpointError: The checkpoint is corrupt.
    """
    if step is not None:
        path = RunLayout(run_directory).checkpoint(step)
        if not path.is_dir():
            raise ConfigError(
                f"Run has no checkpoint of step {step:,}", where=str(run_directory),
                hint=f"list its checkpoints with `vorox checkpoints list {run_argument(run_directory)}`",
            )  # fmt: skip
        return verify(path)
    found = latest_valid(run_directory, on_corrupt=on_corrupt)
    if found is None:
        raise ConfigError(
            f"Run {run_directory.name} has no checkpoint yet", where=str(run_directory),
            hint=f"while it trains, request one with `vorox checkpoints save {run_argument(run_directory)}`",
        )  # fmt: skip
    return found


def open_engine(config: RunConfig, checkpoint: Checkpoint) -> Engine:
    """Create an engine for the model of a checkpoint; the caller loads the weights.

    It runs in this process, also for a run of several. Its loss is the cross entropy, also of a run with DPO, whose
    reference is not read. It does not multiply in 8-bit floats, which this device may lack.
    """
    config = backends.config_for_one_process(config)
    if config.loss.name == "dpo":
        config = config.model_copy(update={"loss": LossConfig()})
    precision = config.precision.model_copy(update={"float8": None, "float8_emulate": False})
    config = config.model_copy(update={"precision": precision})
    spec = spec_from_json(checkpoint.metadata["spec"])
    if isinstance(spec, AdapterSpec):
        check_base(config, spec, base_fingerprint(weights_directory(config)))
    engine = backends.load(config.backend).create(config, spec, DistributedContext())
    load_base(config, spec, engine)
    return engine


def _warn_of_corrupt(path: Path, error: Exception) -> None:
    warnings.warn(f"Skipping corrupt checkpoint {path.name}: {error}", stacklevel=3)
