"""``train``, ``eval``, ``checkpoint`` and ``log``: length, batch size, validation, checkpoints, metrics."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from vorox.core.schema.distillation import DistillationConfig
from vorox.core.schema.section import ImportPath, Section
from vorox.core.schema.setting import Need, setting

QuantizationScheme = Literal["int8-weight-only", "int8-dynamic", "int4"]
"""How ``vorox compress`` quantises, and what quantisation-aware training prepares for."""

ActivationCheckpointing = Literal["none", "block", "dots"]
Weights = Literal["model", "ema"]
"""The parameters of a model, or their moving average (``train.ema_decay``)."""

OBJECT_STORES = {"s3": "BUCKET", "gs": "BUCKET", "az": "CONTAINER"}
"""Schemes of the stores that can be written to, and what each one calls the first part of a location."""
FOLDERS = tuple(f"{scheme}://{first}/FOLDER" for scheme, first in OBJECT_STORES.items())
"""How a folder in each of these stores is written."""

_VALIDATES = Need("data.validation.held_out_fraction", never=(0,), remedy="a validation split")
_HAS_TOKENIZER = Need("tokenizer.kind", never=("none",), remedy="a tokenizer", is_feature=True)


class BatchStageConfig(Section):
    """One stage of a schedule of the batch size."""

    start_step: int | None = setting(
        default=None, ge=2, description="First step of this stage, from 1. Set either this or start_tokens."
    )
    start_tokens: int | None = setting(
        default=None, ge=1, description="Tokens trained on before this stage starts, rounded up to whole steps."
    )
    global_batch_sequences: int = setting(ge=1, description="Rows per step of this stage, over all ranks.")


class TrainConfig(Section):
    num_steps: int | None = setting(
        default=None,
        ge=1,
        description="Length in optimizer steps. Set exactly one of num_steps, num_tokens and num_epochs.",
        resume="length",
        alternatives=("num_tokens", "num_epochs"),
        synonyms=("steps", "num_steps", "max_steps", "max_iters"),
    )
    num_tokens: int | None = setting(
        default=None,
        ge=1,
        description="Length in tokens, rounded up to whole steps.",
        resume="length",
        alternatives=("num_steps", "num_epochs"),
        synonyms=("num_tokens",),
    )
    num_epochs: float | None = setting(
        default=None,
        gt=0,
        description="Length in epochs over the training rows, rounded up to whole steps.",
        resume="length",
        alternatives=("num_steps", "num_tokens"),
        synonyms=("target_epochs", "epochs", "num_epochs", "num_train_epochs"),
    )
    epoch_dataset_fraction: float = setting(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of the training rows that num_epochs counts as one epoch. Rows that one epoch skips "
        "come first in the next; no row repeats before all have been read.",
        resume="length",
        needs=Need("num_epochs"),
    )
    follow_growth: bool = setting(
        default=False,
        description="With num_epochs: extend the run, as an event of its plan, if its caches have more rows when it "
        "resumes. Off: report the new number of steps and keep the length.",
        needs=Need("num_epochs"),
    )
    global_batch_sequences: int = setting(
        default=16,
        ge=1,
        description="Rows per step, over all ranks.",
        resume="refused",
        synonyms=("batch_size", "bs", "global_batch_size"),
    )
    batch_stages: tuple[BatchStageConfig, ...] = setting(
        default=(),
        description="Change global_batch_sequences during the run, one stage after the other; micro-batches stay, so "
        "that a larger batch accumulates more of them. Learning rate and warm-up keep counting steps.",
        resume="refused",
    )
    micro_batch_sequences: Annotated[int, Field(ge=1)] | Literal["auto"] = setting(
        default=16,
        description="Rows per forward pass and device; must divide the global batch. auto: the most that fit into a "
        "device by the memory estimate, decided once, when the run is created. The global batch stays.",
        synonyms=("per_device_batch_size", "micro_batch_size", "per_device_train_batch_size"),
    )
    auto_micro_batch_sequences: int | None = setting(
        default=None,
        ge=1,
        description="Rows that a run with micro_batch_sequences=auto chose when it was created; resumes and replays "
        "use them. None: not decided yet.",
        digest="bits",
        needs=Need("micro_batch_sequences", ("auto",)),
    )
    activation_checkpointing: ActivationCheckpointing = setting(
        default="none",
        description="block: save only block inputs and recompute the rest in the backward pass; dots: save the "
        "matrix products as well, and with torch attention.",
    )
    forward_backward: ImportPath | None = setting(
        default=None,
        description="torch: a user function that replaces forward and backward of a micro-batch: f(micro_batch) calls "
        "micro_batch.forward_backward(). None: one forward and backward pass.",
        engines=("torch",),
    )
    from_weights: str | None = setting(
        default=None,
        description="Initialise from these weights: a run or any step of one (RUN@STEP), a checkpoint of either "
        "backend or a transformers directory, local or in a store (s3://, gs://, az://); or hf://OWNER/NAME@REVISION. "
        "The optimizer state starts at zero.",
        resume="allowed",
        location="model",
        needs=Need("model.kind", ("decoder",), remedy="model.kind=decoder; or set model.name_or_path", is_feature=True),
        synonyms=("from_pretrained",),
    )
    from_optimizer: bool = setting(
        default=False,
        description="Initialise the optimizer state from that checkpoint as well.",
        needs=Need("from_weights"),
    )
    keep_zeros: bool = setting(
        default=False,
        description="Fine-tune pruned weights: an element of a matrix in the blocks that is zero stays zero in every "
        "step. Needs initial weights (train.from_weights or model.name_or_path) with zeros.",
    )
    quantization_aware: QuantizationScheme | None = setting(
        default=None,
        description="torch: quantisation-aware training. The linear layers of the blocks compute with weights, and "
        "with int8-dynamic also with inputs, that are rounded as vorox compress --quantize does; gradients pass "
        "straight through. None: full precision.",
        engines=("torch",),
    )
    distillation: DistillationConfig = setting(
        default_factory=DistillationConfig, description="Learn from the predictions of a trained model."
    )
    embedding_noise: float | None = setting(
        default=None,
        gt=0,
        description="torch: NEFTune's alpha, for fine-tuning. In training only, uniform noise between -1 and 1, times "
        "alpha / sqrt(positions of a row * hidden size), is added to the token embeddings; 5 to 15 in the paper.",
        engines=("torch",),
    )
    ema_decay: float | None = setting(
        default=None,
        gt=0,
        lt=1,
        description="Keep an exponential moving average of the parameters, in fp32 and in every checkpoint: after a "
        "step, average = ema_decay * average + (1 - ema_decay) * parameters. None: no average.",
    )
    ema_warmup: bool = setting(
        default=True,
        description="Lower the decay at first: after n updates, at most (1 + n) / (10 + n).",
        needs=Need("ema_decay"),
    )
    max_nonfinite_steps: int = setting(
        default=3,
        ge=0,
        description="Consecutive steps with a non-finite loss or gradient that are skipped before the run stops.",
    )
    spike_policy: Literal["off", "stop", "skip", "rollback"] = setting(
        default="off",
        description="What happens at a loss spike. skip: the update of the step is not applied, and the plan records "
        "it; rollback: the run continues from a checkpoint before the spike and skips the steps that led to it, and "
        "the plan records them; stop: the run ends. A spike is a loss above median + spike_deviations * deviation of "
        "the last spike_window_steps finite losses; the deviation is 1.4826 * the median absolute deviation, at least "
        "1% of the median.",
    )
    spike_deviations: float = setting(
        default=6.0,
        gt=0,
        description="Deviations from the median above which a loss is a spike.",
        needs=Need("spike_policy", never=("off",)),
    )
    spike_window_steps: int = setting(
        default=128,
        ge=4,
        description="Finite losses that the limit of a spike is computed from; before, none is one.",
        needs=Need("spike_policy", never=("off",)),
    )
    max_spike_steps: int = setting(
        default=10,
        ge=0,
        description="Steps of the whole run that spike_policy=skip skips before the run stops.",
        needs=Need("spike_policy", ("skip",)),
    )
    spike_rollback_steps: int = setting(
        default=32,
        ge=1,
        description="spike_policy=rollback: steps up to the spike, with it, whose updates are undone and then skipped.",
        needs=Need("spike_policy", ("rollback",)),
    )
    max_spike_rollbacks: int = setting(
        default=3,
        ge=0,
        description="Rollbacks of the whole run (spike_policy=rollback); at the next spike, it stops.",
        needs=Need("spike_policy", ("rollback",)),
    )

    @property
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch; the fewest possible while ``auto`` is not decided."""
        if self.micro_batch_sequences != "auto":
            return self.micro_batch_sequences
        return self.auto_micro_batch_sequences or 1


class EvalConfig(Section):
    every_steps: int | None = setting(
        default=250,
        ge=1,
        description="Validation interval in steps. None: only at the end.",
        needs=_VALIDATES,
        synonyms=("eval_interval", "eval_steps"),
    )
    num_sequences: int | None = setting(
        default=256,
        ge=1,
        description="Number of validation rows, the same ones every time. None: the whole validation split.",
    )
    at_end: bool = setting(default=True, description="Validate, and evaluate tasks, after the last step.")
    at_start: bool = setting(
        default=False,
        description="Validate before the first step too: what a run from trained weights starts from.",
    )
    weights: Weights = setting(
        default="model",
        description="Weights that validations and samples use: the parameters, or their average (train.ema_decay).",
        needs=Need("train.ema_decay"),
    )
    by_source: bool = setting(
        default=False,
        description="Also measure the loss of each validation source by itself, over up to num_sequences rows of each: "
        "with data.validation.sources, what a run forgets while it learns something else.",
        needs=_VALIDATES,
    )
    functions: tuple[ImportPath, ...] = setting(
        default=(),
        description="User functions called at every validation: f(model) returns a number or a mapping of numbers. "
        "Written as my_package.my_module:function or path/to/file.py:function.",
        needs=_VALIDATES,
    )
    tasks: tuple[str, ...] = setting(
        default=(),
        description="lm-evaluation-harness tasks evaluated during training: names of tasks, groups or tags, or YAML "
        "files. A checkpoint of the step is saved first.",
        needs=_HAS_TOKENIZER,
    )
    task_path: str | None = setting(
        default=None, description="Directory of YAML tasks, in addition to those of the harness.", needs=Need("tasks")
    )
    tasks_every_steps: int | None = setting(
        default=None,
        ge=1,
        description="Interval of task evaluations in steps. None: only at the end (eval.at_end).",
        needs=Need("tasks"),
    )
    num_task_documents: int | None = setting(
        default=None, ge=1, description="Documents per task. None: all.", needs=Need("tasks")
    )
    tasks_max_seconds: float = setting(
        default=600.0,
        gt=0,
        description="Time budget of one evaluation of all tasks. A task that it interrupts has no result.",
        needs=Need("tasks"),
    )
    prompts: tuple[str, ...] = setting(
        default=(),
        description="Prompts completed at every validation, with the same random numbers every time.",
        needs=(_VALIDATES, _HAS_TOKENIZER),
    )
    sample_tokens: int = setting(
        default=48,
        ge=1,
        description="Maximum number of tokens per completion. Prompt and completion fit into the model's positions.",
        needs=Need("prompts"),
    )
    sample_temperature: float = setting(
        default=0.8, ge=0, description="Sampling temperature; 0 is greedy decoding.", needs=Need("prompts")
    )
    sample_top_k: int | None = setting(
        default=50, ge=1, description="Sample from the k most likely tokens. None: from all.", needs=Need("prompts")
    )

    @property
    def validates(self) -> bool:
        """Whether the run validates at any time, if it has a validation set."""
        return self.at_start or self.at_end or self.every_steps is not None


CheckpointFormat = Literal["safetensors", "orbax"]
"""Array formats of checkpoints."""


class CheckpointConfig(Section):
    every_steps: int | None = setting(
        default=None,
        ge=1,
        description="Checkpoint interval in steps. None: by time, and at the end.",
        synonyms=("save_interval", "save_steps"),
    )
    every_seconds: Annotated[float, Field(gt=0)] | Literal["auto"] | None = setting(
        default="auto",
        description="Checkpoint interval in seconds, in addition to steps. auto: 900, or none with every_steps. None: "
        "none by time.",
    )
    keep_last: int = setting(
        default=2, ge=1, description="Number of newest checkpoints to keep; two guard against a corrupt one."
    )
    keep_best: int = setting(
        default=0, ge=0, description="Number of checkpoints with the lowest validation loss to keep as well."
    )
    keep_every_steps: int | None = setting(
        default=None, ge=1, description="Keep checkpoints at multiples of this number of steps indefinitely."
    )
    at_end: bool = setting(default=True, description="Save a checkpoint after the last step.")
    mirror: str | None = setting(
        default=None,
        description=f"Folder in an object store ({', '.join(FOLDERS)}) to which every checkpoint and the run's "
        "records are copied in the background. A run that is not on this machine, or is ahead in the store, is "
        "restored from it.",
    )
    notice_seconds: float | None = setting(
        default=None,
        gt=0,
        description="Time between SIGTERM and the end of the process that the scheduler or cloud gives. The run warns, "
        "at its start if an earlier attempt measured them, when a step and two saves take longer; after SIGTERM, it "
        "begins no save that cannot end in time. `vorox launch` sets it. None: unknown.",
    )
    mirror_wait_seconds: float = setting(
        default=300.0,
        ge=0,
        description="Timeout at the end of a run for copying its last checkpoint to the mirror.",
        needs=Need("mirror"),
    )
    asynchronous: bool = setting(
        default=True,
        description="Copy the state into host memory and write it in the background while training continues. Off: "
        "training waits until the checkpoint is committed, and nothing is copied.",
    )
    format: CheckpointFormat = setting(
        default="safetensors",
        description="Array format. safetensors: whole arrays in Hugging Face files, or the rows of each rank if "
        "parallel.fsdp_size > 1 (torch). orbax (jax): the shards of each device, written by their ranks. All are read "
        "regardless of this setting, on any mesh.",
        engines={"orbax": ("jax",)},
    )


class LogConfig(Section):
    every_steps: int = setting(
        default=10,
        ge=1,
        description="Interval of metrics and progress in steps.",
        synonyms=("log_interval", "logging_steps"),
    )
    metrics: tuple[ImportPath, ...] = setting(
        default=(),
        description="User metrics for every logged step: f(step, values) returns a number or a mapping of numbers.",
    )
    sinks: tuple[ImportPath, ...] = setting(
        default=(),
        description="User sinks: f(run_directory, resume_step, settings) returns an object with name, write, flush "
        "and close.",
    )
    tensorboard: bool = setting(default=False, description="Also write TensorBoard event files into the run directory.")
    wandb: bool = setting(
        default=False,
        description="Also send metrics to Weights & Biases; without an API key, offline into the run directory.",
    )
    wandb_project: str = setting(
        default="vorox", description="Weights & Biases project.", min_length=1, needs=Need("wandb", (True,))
    )
    mlflow: bool = setting(
        default=False,
        description="Also send metrics to the MLflow server in MLFLOW_TRACKING_URI; without one, into mlflow.db in the "
        "run directory.",
    )
    mlflow_experiment: str = setting(
        default="vorox", description="MLflow experiment.", min_length=1, needs=Need("mlflow", (True,))
    )
    trackio: bool = setting(
        default=False,
        description="Also write metrics into trackio's local database: in TRACKIO_DIR, else in its own directory.",
    )
    trackio_project: str = setting(
        default="vorox",
        description="trackio project.",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_]*$",
        needs=Need("trackio", (True,)),
    )
    webhook: str | None = setting(
        default=None,
        description="http(s) URL to which events of the run are posted as JSON, such as an incoming webhook of Slack; "
        "or env:VARIABLE, which holds it. The URL is a secret: a run records env:VOROX_WEBHOOK.",
        pattern=r"^env:[A-Za-z_][A-Za-z0-9_]*$",
    )
    webhook_events: tuple[Literal["lifecycle", "warnings", "checkpoints", "validations"], ...] = setting(
        default=("lifecycle", "warnings"),
        description="Events that are posted. lifecycle: started, resumed, finished, stopped and failed; warnings: "
        "spikes, non-finite steps, stalls, an unreachable mirror and the like.",
        min_length=1,
        needs=Need("webhook"),
    )
    metadata: Literal["off", "sqlite", "postgres"] = setting(
        default="sqlite",
        description="Database that records in the background which data was consumed. sqlite: metadata.sqlite in the "
        "run directory; postgres: a server shared by any number of runs.",
    )
    metadata_dsn_variable: str = setting(
        default="VOROX_METADATA_DSN",
        description="Environment variable with the connection string of the PostgreSQL server.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
        needs=Need("metadata", ("postgres",)),
    )
    matmul_peak: bool = setting(
        default=True,
        description="Measure the matmul rate of this model's shapes before step 1 and report the training speed as a "
        "fraction of it.",
    )
    accuracy: bool = setting(default=False, description="Log the accuracy on training targets.")
    parameter_norms: bool = setting(default=False, description="Log the L2 norm of all parameters.")
    activation_statistics: bool = setting(
        default=False, description="Log mean, standard deviation and maximum magnitude at every tap of every block."
    )
