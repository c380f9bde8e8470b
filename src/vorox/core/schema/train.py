"""``train``, ``eval``, ``checkpoint`` and ``log``: how long, how large, and what is written when."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.section import ImportPath, Section


class TrainConfig(Section):
    num_steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps. Give exactly one of the three lengths."
    )
    num_tokens: int | None = Field(default=None, ge=1, description="Tokens to train on, rounded up to whole steps.")
    num_epochs: float | None = Field(
        default=None,
        gt=0,
        description="Passes over the training rows, rounded up to steps. Also called target_epochs.",
    )
    epoch_dataset_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the training rows that num_epochs counts as one epoch. Rows that an epoch leaves out "
        "come first in the next; nothing repeats before everything was read.",
    )
    follow_growth: bool = Field(
        default=False,
        description="With num_epochs: when caches have grown at a resume, extend the run by a recorded event. Off: the "
        "new number of steps is said, and the run keeps its length.",
    )
    global_batch_sequences: int = Field(default=16, ge=1, description="Rows per step over all processes.")
    micro_batch_sequences: int = Field(default=16, ge=1, description="Rows per forward pass; divides the global batch.")
    activation_checkpointing: Literal["none", "block", "dots"] = Field(
        default="none",
        description="block: keep only block inputs and recompute the rest in the backward pass; "
        "dots (jax): keep the matrix products as well.",
    )
    from_weights: str | None = Field(
        default=None,
        description="Start from these weights instead of random ones: a run, a checkpoint (of either engine) or a "
        "directory of transformers, here or under gs:// or s3://, or hf://OWNER/NAME@REVISION. The optimizer starts "
        "afresh.",
    )
    from_optimizer: bool = Field(
        default=False, description="Take over the optimizer's state of that checkpoint as well."
    )
    max_nonfinite_steps: int = Field(
        default=3,
        ge=0,
        description="Steps in a row with a non-finite loss or gradient that are skipped before stopping.",
    )


class EvalConfig(Section):
    every_steps: int | None = Field(
        default=None, ge=1, description="Validate every so many steps. None: only at the end."
    )
    num_sequences: int | None = Field(
        default=256, ge=1, description="Validation rows, always the same ones. None: the whole held-out split."
    )
    at_end: bool = Field(default=True, description="Validate the last step on the whole set asked for.")
    functions: tuple[ImportPath, ...] = Field(
        default=(),
        description="Evaluations of your own at every validation: f(model) returns a number or a mapping of them, as "
        "my_package.my_module:function or path/to/file.py:function.",
    )
    prompts: tuple[str, ...] = Field(
        default=(), description="Texts to complete, always the same way, at every validation."
    )
    sample_tokens: int = Field(default=48, ge=1, description="Tokens of each completion.")
    sample_temperature: float = Field(default=0.8, ge=0, description="0 takes the likeliest token.")
    sample_top_k: int | None = Field(
        default=50, ge=1, description="Draw only from the likeliest tokens. None: from all."
    )


CheckpointFormat = Literal["safetensors", "orbax"]
"""How the arrays of a checkpoint are stored."""


class CheckpointConfig(Section):
    every_steps: int | None = Field(default=None, ge=1, description="Save every so many steps. None: only at the end.")
    every_seconds: float | None = Field(
        default=None, gt=0, description="Also save when this long has passed since the last."
    )
    keep_last: int = Field(
        default=2, ge=1, description="Newest checkpoints that are kept; two guard against a corrupt one."
    )
    keep_best: int = Field(
        default=0, ge=0, description="Checkpoints with the lowest validation loss that are kept as well."
    )
    keep_every_steps: int | None = Field(
        default=None, ge=1, description="Keep checkpoints at multiples of this for ever."
    )
    at_end: bool = Field(default=True, description="Save after the last step.")
    mirror: str | None = Field(
        default=None,
        description="Folder in a store (gs://BUCKET/FOLDER, s3://BUCKET/FOLDER) that gets a copy of every checkpoint "
        "and of the run's record, in the background. A run that is not on this machine, or further there, is brought "
        "back from it.",
    )
    mirror_wait_seconds: float = Field(
        default=300.0, ge=0, description="How long the end of a run waits for its last checkpoint to be in the mirror."
    )
    asynchronous: bool = Field(
        default=True,
        description="Copy the state into host memory and write it in the background while training goes on. Off: "
        "training stands still until the checkpoint is committed, and nothing is copied.",
    )
    format: CheckpointFormat = Field(
        default="safetensors",
        description="safetensors: whole arrays in the files of Hugging Face. orbax (jax): the parts that the devices "
        "hold, each written by its process; any mesh restores them. Either is read whatever is set here.",
    )


class LogConfig(Section):
    every_steps: int = Field(default=10, ge=1, description="Write metrics and progress every so many steps.")
    metrics: tuple[ImportPath, ...] = Field(
        default=(),
        description="Metrics of your own for every logged step: f(step, values) returns a number or a mapping of them.",
    )
    sinks: tuple[ImportPath, ...] = Field(
        default=(),
        description="Sinks of your own: f(run_directory, resume_step, settings) returns an object with name, write, "
        "flush and close.",
    )
    tensorboard: bool = Field(default=False, description="Also write TensorBoard event files into the run directory.")
    wandb: bool = Field(
        default=False,
        description="Also send metrics to Weights & Biases; offline into the run directory without a key.",
    )
    wandb_project: str = Field(default="vorox", description="Project of the run there.", min_length=1)
    metadata: Literal["off", "sqlite", "postgres"] = Field(
        default="sqlite",
        description="Database that records, in the background, which data was consumed. sqlite: metadata.sqlite in "
        "the run directory; postgres: a server that any number of runs share.",
    )
    metadata_dsn_variable: str = Field(
        default="VOROX_METADATA_DSN",
        description="Environment variable that holds the connection string of the PostgreSQL server.",
        pattern=r"^[A-Za-z_][A-Za-z0-9_]*$",
    )
    matmul_peak: bool = Field(
        default=True,
        description="Measure the matrix products of this model before step 1 and show the speed as a share of them.",
    )
    accuracy: bool = Field(default=False, description="Share of training targets that had the highest logit.")
    parameter_norms: bool = Field(default=False, description="L2 norm of all parameters.")
    activation_statistics: bool = Field(
        default=False, description="Mean, standard deviation and largest magnitude at every tap of every block."
    )
