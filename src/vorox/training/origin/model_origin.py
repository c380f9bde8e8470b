"""Where a model comes from: architecture, weights, tokenizer and row length, found once and read by everyone.

In: the settings that name a model (``train.from_weights``, or ``model.name_or_path`` of ``model.kind: huggingface``).
Out: a ``ModelOrigin``, read from manifests, ``config.json`` and headers of safetensors files; no weights are read. A
name is a directory of transformers, an export, a checkpoint, averaged or pruned weights, a run, a step of one
(``RUN@STEP``), or a repository of the hub, pinned to a commit. Weights in a store are described after their download,
when the run starts.

``vorox.training.origin.configuration`` applies an origin to a configuration, and states the precedence.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from vorox.core.config.layers.pretrained import Pretrained
from vorox.core.config.layers.training_defaults import width_lr
from vorox.core.errors import CheckpointError, ConfigError, DataError
from vorox.core.files.atomic import MANIFEST_NAME
from vorox.core.files.json_reader import read_json
from vorox.core.files.staged_directory import read_manifest
from vorox.core.run_layout import RunLayout, run_of_checkpoint, step_directories
from vorox.core.schema import RunConfig
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.core.user_code.trusted_code import mark_recorded
from vorox.data.storage import scheme_of
from vorox.data.tokenizers.huggingface import TOKENIZER_FILES, download_repository, hub_place, load_huggingface
from vorox.data.tokenizers.loading import load as load_tokenizer
from vorox.data.tokenizers.token_ids import IDS_NAME, load_token_ids
from vorox.data.tokenizers.tokenizer import TOKENIZER_NAME, Tokenizer
from vorox.models.arrays.weights_file import WEIGHTS_INDEX_FILE, open_directory
from vorox.models.decoder.spec import DecoderSpec, decoder_spec
from vorox.models.huggingface.adapter_spec import ADAPTER_CONFIG_NAME
from vorox.models.huggingface.config import CONFIG_NAME, PREPROCESSOR_NAME, spec_from_huggingface
from vorox.models.huggingface.spec import EXPERT_COUNTS, KIND, HuggingFaceSpec
from vorox.models.module_spec import UserSpec
from vorox.models.stored.spec import spec_from_json
from vorox.records.run_lookup import find_run, run_argument, short_path, split_step
from vorox.training.origin.image_processor_source import PROCESSOR_NAME
from vorox.training.origin.naming import FROM_WEIGHTS, NAME_OR_PATH

EXPORT_FORMAT = "vorox-export/1"
"""``format`` in the manifest of an export."""
_TOKENIZER_FILES = (TOKENIZER_NAME, "tokenizer_config.json", "tokenizer.model", "vocab.json")
_DESCRIPTION = (CONFIG_NAME, "tokenizer_config.json", PREPROCESSOR_NAME, PROCESSOR_NAME)
_WEIGHTS = (CONFIG_NAME, "model*.safetensors", WEIGHTS_INDEX_FILE)
_ROUTER_LOSSES = ("load_balancing_weight", "router_z_loss_weight")


def router_loss_weight(text: Mapping[str, Any]) -> float:
    """Return the weight of the load-balancing loss that a ``config.json`` asks of transformers; 0 without one."""
    if not text.get("output_router_logits"):
        return 0.0
    experts: Any = text.get("ffn_config") or {}  # of DBRX
    given = (text.get("router_aux_loss_coef"), text.get("aux_loss_coef"), experts.get("moe_loss_weight"))
    return float(next((value for value in given if value is not None), 0.001))  # the default of transformers


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """A model, described without its weights.

    Attributes:
        name: The name as it was given; for a repository, without ``hf://`` and revision.
        directory: The directory of weights and ``config.json``; for a repository, of the downloaded description.
            ``None`` in a store.
        commit: Commit on the hub; ``None`` elsewhere.
        values: Content of ``config.json``; empty without one.
        spec: The model as the native decoder computes it; ``None`` if it does not.
        refusal: Why it does not.
        tokenizer: Settings of the section ``tokenizer`` that load its tokenizer; empty if it has none.
        trained_tokenizer: The section ``tokenizer`` of the run that trained the weights; empty if it is not known.
        peak_lr: Peak learning rate of that run, for AdamW; ``None`` if it is not known.
        trained_loss: The section ``loss`` of that run, if the native decoder computed it; empty otherwise.
    """

    name: str
    directory: Path | None
    commit: str | None
    values: dict[str, Any]
    spec: DecoderSpec | None
    refusal: ConfigError | None
    tokenizer: dict[str, Any]
    trained_tokenizer: dict[str, Any]
    peak_lr: float | None = None
    trained_loss: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def location(self) -> str:
        return self.name if self.commit is None else f"hf://{self.name}@{self.commit}"

    @property
    def is_transformers(self) -> bool:
        """Whether transformers may load it: a ``config.json`` names its architecture."""
        return "model_type" in self.values

    @property
    def hidden_size(self) -> int | None:
        if self.spec is not None:
            return self.spec.hidden_size
        return self._integer("hidden_size", "n_embd", "d_model")

    @property
    def num_rows(self) -> int | None:
        """Rows of the embedding; ``None`` if they are not known."""
        return self._integer("vocab_size") if self.spec is None else self.spec.vocab_size

    @property
    def max_positions_tokens(self) -> int | None:
        """Longest row that the model reads; ``None`` without a limit, or if it is not known."""
        if self.spec is not None:
            return self.spec.max_positions_tokens
        return self._integer("max_position_embeddings", "n_positions")

    def losses(self) -> tuple[dict[str, float], str]:
        """Return settings of the section ``loss`` that the model is trained with, and where they stand.

        transformers adds the load-balancing loss only with ``output_router_logits``: once for all layers, and for every
        choice of a token. That of the native decoder is summed over layers and divided by the choices.
        """
        if self.trained_loss:
            found = {key: float(self.trained_loss[key]) for key in _ROUTER_LOSSES if key in self.trained_loss}
            return found if self.spec is not None and self.spec.num_experts is not None else {}, "its run"
        text, found = self._text_values, dict[str, float]()
        if text.get("z_loss_coefficient"):  # of Bamba
            found["z_loss_weight"] = float(text["z_loss_coefficient"])
        if self.spec is not None and self.spec.num_experts is not None:
            weight = router_loss_weight(text) * (self.spec.experts_per_token or 1) / self.spec.num_layers
            found |= {"load_balancing_weight": weight, "router_z_loss_weight": 0.0}
        return found, CONFIG_NAME

    @property
    def _text_values(self) -> dict[str, Any]:
        return self.values.get("text_config") or self.values

    def router_note(self) -> str | None:
        """Return the line that says which load-balancing loss transformers adds; ``None`` without experts."""
        text = self._text_values
        if not text.keys() & {"output_router_logits", *EXPERT_COUNTS}:
            return None
        weight = router_loss_weight(text)
        said = f"output_router_logits={str(bool(text.get('output_router_logits'))).lower()}"
        loss = f"a load-balancing loss of weight {weight:g}" if weight else "no load-balancing loss"
        return f"The experts of {self.location} train with {loss}, as its {CONFIG_NAME} says ({said})"

    def _integer(self, *keys: str) -> int | None:
        text = self._text_values
        return next((text[key] for key in keys if isinstance(text.get(key), int)), None)

    def pretrained(self, *, label: str, is_adapter: bool, notes: tuple[str, ...] = ()) -> Pretrained:
        """Return what the rules of a configuration need to know."""
        return Pretrained(
            self.location, label, self.hidden_size, self.max_positions_tokens, is_adapter, notes, self.peak_lr
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """Return what a run records."""
        model_type = self.values.get("model_type")
        return {"location": self.location, "model_type": model_type, "tokenizer": self.tokenizer}

    def load_tokenizer(self) -> Tokenizer | None:
        """Load the tokenizer; ``None`` without one, or if the repository has none that can be compared."""
        if not self.tokenizer:
            return None
        if self.tokenizer["kind"] == "none":
            return None  # ids without text
        if self.commit is None and (Path(self.tokenizer["path"]).expanduser() / TOKENIZER_NAME).is_file():
            return load_tokenizer(self.tokenizer["path"])
        try:
            return load_huggingface(TokenizerConfig.model_validate(self.tokenizer))
        except (ConfigError, DataError):
            return None


def find_origin(config: RunConfig) -> ModelOrigin | None:
    """Describe the model that a configuration names; ``None`` if it starts from nothing.

    Raises:
        ConfigError: There is no model at that location.
        CheckpointError: Its weights or its ``config.json`` are damaged.
        DataError: The repository or revision does not exist, or cannot be reached.
    """
    model = config.model
    if model.kind == KIND:
        return describe(
            str(model.name_or_path), model.revision, key=NAME_OR_PATH, runs_directory=config.run.directory,
            with_weights=model.pretrained,
        )  # fmt: skip
    if config.train.from_weights is None:
        return None
    return describe(config.train.from_weights, None, key=FROM_WEIGHTS, runs_directory=config.run.directory)


def describe(
    name: str, revision: str | None = None, *, key: str, runs_directory: str, with_weights: bool = True
) -> ModelOrigin:
    """Describe the model at a location.

    Args:
        name: A directory, a run, or ``hf://OWNER/NAME@REVISION``; for ``model.name_or_path`` also ``OWNER/NAME``.
        revision: Commit, tag or branch on the hub.
        key: The setting that names it, for messages.
        runs_directory: Where runs are looked up by name.
        with_weights: Whether the headers of local weights are checked.

    Raises:
        ConfigError, CheckpointError, DataError: As ``find_origin``.
    """
    found = _hub(name, revision, key)
    if found is not None:
        folder, commit = download_repository(*found, _DESCRIPTION, key=key)
        tokenizer = {"kind": "huggingface", "path": found[0], "revision": commit}
        return _of_transformers(found[0], folder, commit, tokenizer)
    if scheme_of(name) is not None:
        return ModelOrigin(name, None, None, {}, None, None, {}, {})
    place = find_directory(name, runs_directory, key=key)
    if revision is not None:
        raise ConfigError("A directory has no revisions", where="model.revision", hint="remove the setting")
    return describe_directory(place, name, with_weights=with_weights)


def is_model_directory(path: Path) -> bool:
    """Whether a directory is that of a transformers model, an export included, and not a checkpoint."""
    if not (path / CONFIG_NAME).is_file():
        return False
    manifest = path / MANIFEST_NAME
    return not manifest.exists() or read_manifest(path)["metadata"].get("format") == EXPORT_FORMAT


def refuse_adapter(place: Path) -> None:
    """Refuse a directory of peft, which holds an adapter without its base.

    Raises:
        ConfigError: It is one; the hint has the command that merges it.
    """
    if not (place / ADAPTER_CONFIG_NAME).is_file() or (place / CONFIG_NAME).is_file():
        return
    values = _read_config(place, ADAPTER_CONFIG_NAME)
    base, merged = str(values.get("base_model_name_or_path")), f"{place.name}-merged"
    adapter, target = json.dumps(short_path(place)), json.dumps(merged)
    tokenizer = adapter if (place / TOKENIZER_NAME).is_file() else json.dumps(base)
    code = (
        f"import peft, transformers; base = transformers.AutoModelForCausalLM.from_pretrained({json.dumps(base)}); "
        f"peft.PeftModel.from_pretrained(base, {adapter}).merge_and_unload().save_pretrained({target}); "
        f"transformers.AutoTokenizer.from_pretrained({tokenizer}).save_pretrained({target})"
    )
    raise ConfigError(
        f"Directory is an adapter of {base}, without the weights of its base", where=str(place),
        hint=f"merge them: python -c {shlex.quote(code)}; then name {shlex.quote(merged)}",
    )  # fmt: skip


def find_directory(name: str, runs_directory: str, *, key: str) -> Path:
    """Return the local directory of a name: a path, or a run in ``runs_directory``; for ``RUN@STEP`` that of the run.

    The steps of a run have one architecture and tokenizer; ``materialized_cache.named_state`` has the weights of one.

    Raises:
        ConfigError: It does not exist.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path.absolute()
    try:
        return find_run(runs_directory, split_step(runs_directory, str(path))[0]).absolute()
    except ConfigError as error:
        raise ConfigError(
            f"No weights at {name!r}: {error.what}", where=key,
            hint=hint_for_name(path) or "give a run, a checkpoint directory, a directory with config.json and "
            "model.safetensors, or hf://OWNER/NAME",
        ) from error  # fmt: skip


def hint_for_name(path: Path) -> str:
    """Return how to name the model of something that is not a directory; empty if it is not known what it is."""
    if not path.exists():
        is_hub = hub_place(f"hf://{path}") is not None
        return f"for the model of that name on the hub, write hf://{path}" if is_hub else ""
    file = shlex.quote(str(path))
    if path.suffix in {".pt", ".pth", ".ckpt", ".bin"}:
        return (
            "weights are read from directories of transformers with safetensors, not from pickles; convert a "
            f"checkpoint of nanoGPT with `python examples/nanogpt_to_transformers.py {file} converted`, others with "
            "transformers' save_pretrained('converted'); then name that directory: --from-weights converted"
        )
    if path.suffix == ".safetensors" or path.name == CONFIG_NAME:
        return f"name its directory: {shlex.quote(str(path.parent))}"
    return "see `vorox runs list`, or name a directory with config.json and model.safetensors"


def weights_directory(config: RunConfig) -> Path:
    """Return the directory of the weights of ``model.name_or_path``, downloaded if they are on the hub."""
    name, model = str(config.model.name_or_path), config.model
    found = _hub(name, model.revision, NAME_OR_PATH)
    if found is not None:
        return download_repository(*found, _WEIGHTS, key=NAME_OR_PATH)[0]
    return find_directory(name, config.run.directory, key=NAME_OR_PATH)


def download_weights(location: str) -> Path:
    """Download a model from the hub; a cached download of the same commit is reused."""
    found = _hub(location, None, FROM_WEIGHTS)
    assert found is not None
    return download_repository(*found, _WEIGHTS, key=FROM_WEIGHTS)[0]


def model_files(config: RunConfig) -> Path:
    """Return a local directory with all files of the initial weights: weights, configuration and tokenizer."""
    origin = find_origin(config)
    assert origin is not None
    assert origin.directory is not None, "it is not in a store"
    if origin.commit is None:
        return origin.directory
    return download_repository(origin.name, origin.commit, (*_WEIGHTS, *TOKENIZER_FILES), key=FROM_WEIGHTS)[0]


def recorded_model(run_directory: Path | None) -> HuggingFaceSpec | None:
    """Return the transformers model of the newest readable checkpoint of a run; ``None`` without one."""
    steps = {} if run_directory is None else step_directories(run_directory)
    for step in sorted(steps, reverse=True):
        try:
            spec = spec_from_json(read_manifest(steps[step])["metadata"]["spec"])
        except (CheckpointError, KeyError, TypeError):
            continue
        return spec if isinstance(spec, HuggingFaceSpec) else None
    return None


@contextlib.contextmanager
def explaining_moved_model(run_directory: Path | None) -> Generator[None]:
    """Name the command that continues a run from the new place of its initial weights, if they are not found."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        if error.where in (FROM_WEIGHTS, NAME_OR_PATH) and run_directory is not None and _has_started(run_directory):
            command = f"vorox train --resume {run_argument(run_directory)} {error.where}=DIRECTORY"
            error.hint = f"put the weights back that the run started from, or record where they are now: {command}"
        raise


def _has_started(run_directory: Path) -> bool:
    return RunLayout(run_directory).tokenizer.is_dir()


def _hub(name: str, revision: str | None, key: str) -> tuple[str, str | None] | None:
    """Return name and revision of a repository; ``None`` if the name is a local one or in another store.

    Raises:
        ConfigError: The name is not valid, or has two revisions.
    """
    is_url = scheme_of(name) == "hf"
    if not is_url and (key != NAME_OR_PATH or Path(name).expanduser().is_dir()):
        return None
    found = hub_place(name if is_url else f"hf://{name}")
    if found is None and is_url:
        raise ConfigError(f"{name} does not name a model of the hub", where=key, hint="write hf://OWNER/NAME@REVISION")
    if found is None:
        raise ConfigError(
            f"There is no model at {name!r}", where=key,
            hint="set it to a directory with config.json and safetensors, OWNER/NAME or hf://OWNER/NAME@REVISION",
        )  # fmt: skip
    if found[1] is not None and revision not in (None, found[1]):
        raise ConfigError(
            f"{name} and model.revision={revision} name different revisions", where=key, hint="set one of them"
        )
    return found[0], found[1] or revision


def describe_directory(place: Path, name: str, *, with_weights: bool = True) -> ModelOrigin:
    """Describe the model in a local directory, given the name by which it was found; see ``describe``."""
    refuse_adapter(place)
    tokenizer_directory, checkpoint = place, place
    if not (place / MANIFEST_NAME).exists() and not (place / CONFIG_NAME).exists():
        steps = step_directories(place)
        if not steps:
            raise ConfigError(
                "Directory is not a checkpoint, a run with a checkpoint, or a transformers model",
                where=str(place), hint="a run must have saved once",
            )  # fmt: skip
        checkpoint = steps[max(steps)]
        # The run directory keeps its tokenizer even if all checkpoints are removed.
        tokenizer_directory = RunLayout(place).tokenizer
    metadata: dict[str, Any] = {}
    if (checkpoint / MANIFEST_NAME).exists():
        metadata = read_manifest(checkpoint)["metadata"]
    is_named = tokenizer_directory == place and Path(name).expanduser().absolute() == place
    tokenizer = _tokenizer_settings(tokenizer_directory, name if is_named else str(tokenizer_directory))
    settings: Mapping[str, Any] = metadata.get("settings") or {}
    trained: dict[str, Any] = settings.get("tokenizer") or {}
    stored: dict[str, Any] | None = metadata.get("spec")
    mark_recorded([settings, stored], checkpoint)
    if stored is None or (stored.get("kind") == KIND and "adapter" not in stored):
        found = _of_transformers(name, checkpoint, None, tokenizer)
        if with_weights:
            open_directory(checkpoint)  # checks headers and lengths of all files
        return replace(found, trained_tokenizer=trained, peak_lr=_peak_lr(settings, found.hidden_size))
    spec = _stored_spec(stored, checkpoint)
    values = _read_config(checkpoint) if (checkpoint / CONFIG_NAME).is_file() else {}
    peak_lr = _peak_lr(settings, spec.hidden_size)
    loss: dict[str, Any] = settings.get("loss") or {}
    return ModelOrigin(name, checkpoint, None, values, spec, None, tokenizer, trained, peak_lr, loss)


def _peak_lr(settings: Mapping[str, Any], hidden_size: int | None) -> float | None:
    """Return the peak learning rate of a run for AdamW: its own, or that of its width under another optimizer."""
    optimizer: Mapping[str, Any] = settings.get("optimizer") or {}
    lr = optimizer.get("lr")
    if not isinstance(lr, float):
        return None
    if str(optimizer.get("name")).startswith("adamw"):
        return lr
    return None if hidden_size is None else width_lr(hidden_size)


def _stored_spec(stored: Mapping[str, Any], checkpoint: Path) -> DecoderSpec:
    """Return the native model of a checkpoint.

    Raises:
        ConfigError: It is an adapter, or the model of a user.
    """
    if "adapter" in stored:
        run = run_of_checkpoint(checkpoint)
        source = run_argument(run) if run is not None else shlex.quote(str(checkpoint))
        raise ConfigError(
            "Weights are an adapter without its base", where=str(checkpoint),
            hint=f"merge them: vorox export {source} --to hf --output merged; then name merged",
        )  # fmt: skip
    spec = spec_from_json(stored)
    if isinstance(spec, UserSpec) or not isinstance(spec, DecoderSpec):
        raise ConfigError(
            f"The weights are of {spec.summary()}, not of the native decoder", where=str(checkpoint),
            hint="continue that run with --resume",
        )  # fmt: skip
    return spec


def _of_transformers(name: str, folder: Path, commit: str | None, tokenizer: dict[str, Any]) -> ModelOrigin:
    values = _read_config(folder)
    spec, refusal = None, None
    try:
        spec = decoder_spec(spec_from_huggingface(values), tokenizer_vocab_size=1, sequence_length_tokens=1)
    except ConfigError as error:
        refusal = error
    return ModelOrigin(name, folder, commit, values, spec, refusal, tokenizer, {})


def _read_config(folder: Path, name: str = CONFIG_NAME) -> dict[str, Any]:
    try:
        values: Any = read_json(folder / name)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} cannot be read: {error}", where=str(folder)) from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{name} is not a mapping", where=str(folder))
    return cast("dict[str, Any]", values)


def _tokenizer_settings(directory: Path, path: str) -> dict[str, Any]:
    if (directory / IDS_NAME).is_file():
        ids = load_token_ids(directory / IDS_NAME)
        return {"kind": "none", "vocab_size": ids.vocab_size, "end_of_text_id": ids.end_of_text_id}
    if any((directory / file).is_file() for file in _TOKENIZER_FILES):
        return {"kind": "huggingface", "path": path}
    return {}
