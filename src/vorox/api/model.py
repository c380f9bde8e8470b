"""A trained model in Python: logits, generation, validation loss, weights and taps, for either engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt

from vorox import backends
from vorox.api.arguments import check_argument
from vorox.api.checkpoints import WarningNotices, find_checkpoint, holds_derived
from vorox.api.configuration import Configuration, as_config
from vorox.core.engine import Engine, Tap, TapPoint, attach_taps, exchange_average
from vorox.core.errors import ConfigError
from vorox.core.ranks.distributed_context import DistributedContext
from vorox.core.run_layout import run_of_checkpoint
from vorox.core.schema import LossConfig, RunConfig
from vorox.core.schema.train import Weights
from vorox.data.cache.building.report import PrepareProgress
from vorox.data.storage import scheme_of
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.data.tokenizers.store import load_untrained
from vorox.data.tokenizers.tokenizer import Tokenizer
from vorox.models.huggingface.adapter_spec import AdapterSpec, base_fingerprint
from vorox.models.spec import ModelSpec
from vorox.models.stored.engine_state import read_average, read_weights
from vorox.models.stored.spec import spec_from_json
from vorox.planned_run import choose_micro_batch, resolve_model
from vorox.planning.auto_micro_batch import with_micro_batch
from vorox.records.log import RunLog
from vorox.records.run_lookup import split_step
from vorox.run import make_workload, with_states
from vorox.training.checkpoints.store import Checkpoint
from vorox.training.inference.language_model import LanguageModel
from vorox.training.materialize import StateNotices
from vorox.training.origin import configuration
from vorox.training.origin.model_origin import (
    explaining_moved_model,
    hint_for_name,
    is_model_directory,
    refuse_adapter,
    weights_directory,
)
from vorox.training.steps.evaluate import Evaluation
from vorox.training.weights.adapter_base import check_base, load_base
from vorox.training.weights.init_from import init_from_weights

if TYPE_CHECKING:
    from vorox.api.runs import Run

__all__ = ["Evaluation", "Model", "create_model", "load_model"]


def create_model(
    source: Configuration, *, device: str | None = None, on_progress: PrepareProgress | None = None
) -> Model:
    """Create a model with the initial weights that a run of a configuration starts from, for a loop of your own.

    Args:
        source: A configuration returned by ``load_config``, or any argument of ``load_config``.
        device: Replaces ``runtime.device``.
        on_progress: Called with the progress of preparing tokenizer and data.
    """
    config = as_config(source)
    if device is not None:
        check_argument("vorox.create_model", "device", device, (str,))
        config = as_config(config, {"runtime.device": device})
    config = with_micro_batch(config, choose_micro_batch(config, "never", DistributedContext()))

    def create() -> Model:
        with closing(make_workload(config, DistributedContext(), RunLog(None), on_progress)) as workload:
            init_from_weights(config, workload.spec, workload.engine)
            return Model(config, workload.engine, workload.corpus.tokenizer, workload.spec, 0)

    return with_states(create, WarningNotices())


def load_model(
    source: str | Path | Run = "latest",
    *,
    step: int | None = None,
    root: str | Path = "runs",
    device: str | None = None,
    weights: Weights = "model",
) -> Model:
    """Load the model of a checkpoint, or a pretrained one.

    Args:
        source: A run returned by ``open_run``; the path of a run directory, of a checkpoint in one or of averaged or
            pruned weights; a run id or a unique part of it; ``latest``; any of these runs with a step, as in
            ``latest@340``; a directory of transformers, such as an export; or ``hf://OWNER/NAME@REVISION``.
        step: The step, kept or not, the same as after ``@``; 0 is the initial weights. A state that no checkpoint was
            kept of is computed again, and cached. ``None``: the newest valid checkpoint.
        root: Directory of the runs, where an id or ``latest`` is looked up.
        device: Replaces the run's ``runtime.device``, for example ``cpu``.
        weights: ``ema`` for the moving average of the parameters (``train.ema_decay``).

    Raises:
        ConfigError: The run or step does not exist, or the run's backend is not installed.
        CheckpointError: The checkpoint is corrupt.
        VoroxError: A step that is computed again differs from the record.
    """
    name = getattr(source, "directory", source)  # of a run
    check_argument("vorox.load_model", "source", name, (str, Path))
    check_argument("vorox.load_model", "step", step, (int, type(None)), least=0)
    check_argument("vorox.load_model", "root", root, (str, Path))
    check_argument("vorox.load_model", "device", device, (str, type(None)))
    if weights not in get_args(Weights):
        raise ConfigError(f"weights={weights!r} must be 'model' or 'ema'", where="vorox.load_model")
    return find_model(str(name), step=step, root=root, device=device, weights=weights, notices=WarningNotices())


def find_model(
    name: str,
    *,
    step: int | None,
    root: str | Path,
    device: str | None,
    notices: StateNotices,
    weights: Weights = "model",
) -> Model:
    """Load a model like ``load_model``; ``notices`` gets corrupt checkpoints that are skipped, and computed steps."""
    model, named_step = split_step(root, name, step)
    overrides = [] if device is None else [f"runtime.device={device}"]
    if not holds_derived(model):
        if is_pretrained(model):
            return _load_pretrained(model, step=named_step, root=root, device=device, weights=weights)
        if Path(model).is_file():
            raise ConfigError(
                f"{model} is a file, not a run or the directory of a model", where=model,
                hint=hint_for_name(Path(model)),
            )  # fmt: skip
    found = find_checkpoint(name, step, root, notices)
    checkpoint = found.checkpoint
    config, spec = found.config(overrides), spec_from_json(checkpoint.metadata["spec"])
    engine = open_engine(config, checkpoint)
    if found.run is not None:
        engine.load(checkpoint.path)
        if weights == "ema":
            exchange_average(engine, config)
    else:
        read = read_weights if weights == "model" else read_average  # derived weights have none
        engine.import_weights(read(checkpoint.path, spec))
    tokenizer = load_tokenizer(checkpoint.path, end_of_text=config.tokenizer.end_of_text)
    title = str(checkpoint.path) if found.run is None else found.run.name
    path = checkpoint.path if found.is_kept else None
    return Model(config, engine, tokenizer, spec, checkpoint.step, path, title, found.run)


def is_pretrained(name: str) -> bool:
    """Whether a name is that of a pretrained model, not of a run, a checkpoint of one or derived weights.

    Raises:
        ConfigError: It is a directory of peft.
    """
    refuse_adapter(Path(name))
    return scheme_of(name) == "hf" or is_model_directory(Path(name))


def pretrained_config(name: str, root: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a configuration that starts from a pretrained model, to infer with it."""
    values = {
        "backend": backends.preferred(),
        "data": {"sources": [{"name": "none", "format": "python_stdlib"}]},
        "train": {"from_weights": name, "num_steps": 1},
        "run": {"directory": str(root)},
    }
    return configuration.load_config(values, overrides)


def _load_pretrained(name: str, *, step: int | None, root: str | Path, device: str | None, weights: Weights) -> Model:
    if step is not None:
        raise ConfigError("A pretrained model has no steps", where=name, hint="leave out --step")
    if weights != "model":
        raise ConfigError("A pretrained model has no average of its weights", where=name, hint="leave out --weights")
    config = pretrained_config(name, root, [] if device is None else [f"runtime.device={device}"])
    tokenizer = load_untrained(config.tokenizer)
    assert tokenizer is not None, "the weights have a tokenizer"
    spec = resolve_model(config, tokenizer.vocab_size)
    engine = create_engine(config, spec)
    init_from_weights(config, spec, engine)
    return Model(config, engine, tokenizer, spec, 0, name=name)


class Model(LanguageModel):
    """A model with its weights and tokenizer, from ``load_model`` or ``create_model``.

    Attributes:
        config: The run's configuration.
        step: Number of optimizer steps that the model was trained for.
        path: The checkpoint; ``None`` for a new model, a pretrained one, averaged or pruned weights, and a state that
            its run does not keep.
        name: The run, or the location of a model that belongs to none; empty for a new model.
        spec: The architecture, with the name and shape of every parameter.
        tokenizer: The tokenizer of the model.
        engine: The engine that runs the model, for anything that this class does not cover.
    """

    def __init__(
        self, config: RunConfig, engine: Engine, tokenizer: Tokenizer, spec: ModelSpec, step: int,
        path: Path | None = None, name: str = "", run: Path | None = None,
    ) -> None:  # fmt: skip
        super().__init__(engine, tokenizer, config, spec, step)
        self.path = path
        self.name = name
        self._run = run

    @property
    def title(self) -> str:
        """Name and state on one line, for messages."""
        return f"{self.name or 'new model'}: {self.state}"

    @property
    def state(self) -> str:
        """How far it is trained, for messages."""
        return f"step {self.step:,}" if self.step or self._run else "pretrained weights"

    def __repr__(self) -> str:
        name = str(self.path or self.name or "new")
        return f"Model({name!r}, {self.spec.num_parameters:,} parameters, {self.engine.name})"

    @property
    def run_directory(self) -> Path:
        """Directory of the run that trained the model."""
        if self._run is None:
            raise ConfigError(
                "This model belongs to no run",
                where="model.run_directory",
                hint="load one of a run: vorox.load_model(RUN)",
            )
        return self._run

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


def open_engine(config: RunConfig, checkpoint: Checkpoint) -> Engine:
    """Create an engine for the model of a checkpoint; the caller loads the weights."""
    spec = spec_from_json(checkpoint.metadata["spec"])
    if isinstance(spec, AdapterSpec):
        with explaining_moved_model(run_of_checkpoint(checkpoint.path)):
            check_base(config, spec, base_fingerprint(weights_directory(config)))
    return create_engine(config, spec)


def create_engine(config: RunConfig, spec: ModelSpec) -> Engine:
    """Create an engine that infers with a model; the caller loads the weights, this the base of an adapter.

    It runs in this process, also for a run of several. Its loss is the cross entropy, also of a run with DPO, whose
    reference is not read. It does not multiply in 8-bit floats, which this device may lack.
    """
    config = backends.config_for_one_process(config)
    if config.loss.name == "dpo":
        config = config.model_copy(update={"loss": LossConfig()})
    precision = config.precision.model_copy(update={"float8": None, "float8_emulate": False})
    config = config.model_copy(update={"precision": precision})
    engine = backends.load(config.backend).create(config, spec, DistributedContext())
    load_base(config, spec, engine)
    return engine
