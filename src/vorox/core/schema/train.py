"""``train``, ``eval``, ``checkpoint`` and ``log``: length, batch size, validation, checkpoints, metrics."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import ImportPath, Section


class TrainConfig(Section):
    num_steps: int | None = Field(
        default=None,
        ge=1,
        description="Length in optimizer steps. Set exactly one of num_steps, num_tokens and num_epochs.",
    )
    num_tokens: int | None = Field(default=None, ge=1, description="Length in tokens, rounded up to whole steps.")
    num_epochs: float | None = Field(
        default=None,
        gt=0,
        description="Length in epochs over the training rows, rounded up to whole steps.",
    )
    epoch_dataset_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of the training rows that num_epochs counts as one epoch. Rows that one epoch skips "
        "come first in the next; no row repeats before all have been read.",
    )
    follow_growth: bool = Field(
        default=False,
        description="With num_epochs: extend the run, as an event of its plan, if its caches have more rows when it "
        "resumes. Off: report the new number of steps and keep the length.",
    )
    global_batch_sequences: int = Field(default=16, ge=1, description="Rows per step, over all ranks.")
    micro_batch_sequences: int = Field(
        default=16, ge=1, description="Rows per forward pass and device; must divide the global batch."
    )
    activation_checkpointing: Literal["none", "block", "dots"] = Field(
        default="none",
        description="block: save only block inputs and recompute the rest in the backward pass; dots (jax): save the "
        "matrix products as well.",
    )
    forward_backward: ImportPath | None = Field(
        default=None,
        description="torch: a user function that replaces forward and backward of a micro-batch: f(micro_batch) calls "
        "micro_batch.forward_backward(). None: one forward and backward pass.",
    )
    from_weights: str | None = Field(
        default=None,
        description="Initialise from these weights: a run, a checkpoint of either backend or a transformers "
        "directory, local or under gs:// or s3://; or hf://OWNER/NAME@REVISION. The optimizer state starts at zero.",
    )
    from_optimizer: bool = Field(
        default=False, description="Initialise the optimizer state from that checkpoint as well."
    )
    max_nonfinite_steps: int = Field(
        default=3,
        ge=0,
        description="Consecutive steps with a non-finite loss or gradient that are skipped before the run stops.",
    )


class EvalConfig(Section):
    every_steps: int | None = Field(
        default=None, ge=1, description="Validation interval in steps. None: only at the end."
    )
    num_sequences: int | None = Field(
        default=256,
        ge=1,
        description="Number of validation rows, the same ones every time. None: the whole validation split.",
    )
    at_end: bool = Field(default=True, description="Validate after the last step.")
    by_source: bool = Field(
        default=False,
        description="Also measure the loss of each validation source by itself, over up to num_sequences rows of each: "
        "with data.validation.sources, what a run forgets while it learns something else.",
    )
    functions: tuple[ImportPath, ...] = Field(
        default=(),
        description="User functions called at every validation: f(model) returns a number or a mapping of numbers. "
        "Written as my_package.my_module:function or path/to/file.py:function.",
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="Prompts completed at every validation, with the same random numbers every time."
    )
    sample_tokens: int = Field(
        default=48,
        ge=1,
        description="Maximum number of tokens per completion. Prompt and completion fit into the model's positions.",
    )
    sample_temperature: float = Field(default=0.8, ge=0, description="Sampling temperature; 0 is greedy decoding.")
    sample_top_k: int | None = Field(
        default=50, ge=1, description="Sample from the k most likely tokens. None: from all."
    )


CheckpointFormat = Literal["safetensors", "orbax"]
"""Array formats of checkpoints."""


class CheckpointConfig(Section):
    every_steps: int | None = Field(
        default=None, ge=1, description="Checkpoint interval in steps. None: only at the end."
    )
    every_seconds: float | None = Field(
        default=None, gt=0, description="Checkpoint interval in seconds, in addition to steps."
    )
    keep_last: int = Field(
        default=2, ge=1, description="Number of newest checkpoints to keep; two guard against a corrupt one."
    )
    keep_best: int = Field(
        default=0, ge=0, description="Number of checkpoints with the lowest validation loss to keep as well."
    )
    keep_every_steps: int | None = Field(
        default=None, ge=1, description="Keep checkpoints at multiples of this number of steps indefinitely."
    )
    at_end: bool = Field(default=True, description="Save a checkpoint after the last step.")
    mirror: str | None = Field(
        default=None,
        description="Folder in an object store (gs://BUCKET/FOLDER, s3://BUCKET/FOLDER) to which every checkpoint and "
        "the run's records are copied in the background. A run that is not on this machine, or is ahead in the store, "
        "is restored from it.",
    )
    mirror_wait_seconds: float = Field(
        default=300.0, ge=0, description="Timeout at the end of a run for copying its last checkpoint to the mirror."
    )
    asynchronous: bool = Field(
        default=True,
        description="Copy the state into host memory and write it in the background while training continues. Off: "
        "training waits until the checkpoint is committed, and nothing is copied.",
    )
    format: CheckpointFormat = Field(
        default="safetensors",
        description="Array format. safetensors: whole arrays in Hugging Face files, or the rows of each rank if "
        "parallel.fsdp_size > 1 (torch). orbax (jax): the shards of each device, written by their ranks. All are read "
        "regardless of this setting, on any mesh.",
    )


class LogConfig(Section):
    every_steps: int = Field(default=10, ge=1, description="Interval of metrics and progress in steps.")
    metrics: tuple[ImportPath, ...] = Field(
        default=(),
        description="User metrics for every logged step: f(step, values) returns a number or a mapping of numbers.",
    )
    sinks: tuple[ImportPath, ...] = Field(
        default=(),
        description="User sinks: f(run_directory, resume_step, settings) returns an object with name, write, flush "
        "and close.",
    )
    tensorboard: bool = Field(default=False, description="Also write TensorBoard event files into the run directory.")
    wandb: bool = Field(
        default=False,
        description="Also send metrics to Weights & Biases; without an API key, offline into the run directory.",
    )
    wandb_project: str = Field(default="vorox", description="Weights & Biases project.", min_length=1)
    metadata: Literal["off", "sqlite", "postgres"] = Field(
        default="sqlite",
        description="Database that records in the background which data was consumed. sqlite: metadata.sqlite in the "
        "run directory; postgres: a server shared by any number of runs.",
    )
    metadata_dsn_variable: str = Field(
        default="VOROX_METADATA_DSN",
        description="Environment variable with the connection string of the PostgreSQL server.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    matmul_peak: bool = Field(
        default=True,
        description="Measure the matmul rate of this model's shapes before step 1 and report the training speed as a "
        "fraction of it.",
    )
    accuracy: bool = Field(default=False, description="Log the accuracy on training targets.")
    parameter_norms: bool = Field(default=False, description="Log the L2 norm of all parameters.")
    activation_statistics: bool = Field(
        default=False, description="Log mean, standard deviation and maximum magnitude at every tap of every block."
    )
