"""The settings of a run, one module per group of sections; nothing here is computed.

Units are part of the names.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from vorox.core.schema.adapter import AdapterConfig
from vorox.core.schema.data import DataConfig, SourceConfig
from vorox.core.schema.distillation import DistillationConfig
from vorox.core.schema.model import ModelConfig
from vorox.core.schema.optimizer import LossConfig, OptimizerConfig, ScheduleConfig
from vorox.core.schema.runtime import ParallelConfig, PrecisionConfig, RunSection, RuntimeConfig
from vorox.core.schema.section import Section
from vorox.core.schema.tokenizer import TokenizerConfig
from vorox.core.schema.train import (
    CheckpointConfig,
    CheckpointFormat,
    EvalConfig,
    LogConfig,
    QuantizationScheme,
    TrainConfig,
)

__all__ = [
    "AdapterConfig",
    "CheckpointConfig",
    "CheckpointFormat",
    "DataConfig",
    "DistillationConfig",
    "EvalConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "QuantizationScheme",
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

    backend: Literal["torch", "jax"] = Field(default="torch", description="Framework that trains the model.")
    model: ModelConfig = Field(default_factory=ModelConfig, description="Architecture of the decoder.")
    adapter: AdapterConfig = Field(default_factory=AdapterConfig, description="Low-rank adapters of a frozen model.")
    data: DataConfig = Field(description="Sources, packing and data order.")
    tokenizer: TokenizerConfig = Field(default_factory=TokenizerConfig, description="The tokenizer.")
    optimizer: OptimizerConfig = Field(
        default_factory=OptimizerConfig, description="Optimizer and its hyperparameters."
    )
    schedule: ScheduleConfig = Field(
        default_factory=ScheduleConfig, description="Learning rate and weight decay over the run."
    )
    loss: LossConfig = Field(default_factory=LossConfig, description="The loss function.")
    train: TrainConfig = Field(description="Length and batch size.")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="Number formats.")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="When checkpoints are saved, and which are kept."
    )
    eval: EvalConfig = Field(default_factory=EvalConfig, description="Validation and samples.")
    log: LogConfig = Field(default_factory=LogConfig, description="Metrics, and where they are written.")
    runtime: RuntimeConfig = Field(
        default_factory=RuntimeConfig, description="Device, threads, compilation, determinism."
    )
    parallel: ParallelConfig = Field(default_factory=ParallelConfig, description="Data, FSDP and tensor parallelism.")
    run: RunSection = Field(default_factory=RunSection, description="Name, directory and seed.")
