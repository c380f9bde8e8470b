"""Every setting of a run, one file per group of sections. The unit is in the name; nothing here is computed."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.data import DataConfig, SourceConfig, TokenizerConfig
from vorox.core.schema.model import ModelConfig
from vorox.core.schema.optimizer import LossConfig, OptimizerConfig, ScheduleConfig
from vorox.core.schema.runtime import ParallelConfig, PrecisionConfig, RunSection, RuntimeConfig
from vorox.core.schema.section import Section
from vorox.core.schema.train import CheckpointConfig, CheckpointFormat, EvalConfig, LogConfig, TrainConfig

__all__ = [
    "CheckpointConfig",
    "CheckpointFormat",
    "DataConfig",
    "EvalConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RunConfig",
    "RunSection",
    "RuntimeConfig",
    "ScheduleConfig",
    "SourceConfig",
    "TokenizerConfig",
    "TrainConfig",
]


class RunConfig(Section):
    """The whole configuration of a run."""

    backend: Literal["torch", "jax"] = Field(default="torch", description="Engine that trains the model.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="The decoder.")
    data: DataConfig = Field(description="Which text, packed and ordered how.")
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="Text to tokens.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The update rule.")
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig, description="Learning rate over the run.")
    loss: LossConfig = Field(default_factory=LossConfig, description="The objective.")
    train: TrainConfig = Field(description="Length and batch size.")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="Number formats.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="What is saved when.")
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Validation and samples.")
    log: LogConfig = Field(default_factory=LogConfig, description="What is measured and written.")
    runtime: RuntimeConfig = Field(default_factory=RuntimeConfig, description="The machine.")
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Many processes.")
    run: RunSection = Field(default_factory=RunSection, description="Name, place and seed.")
