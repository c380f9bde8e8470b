"""The settings of a run, one module per group of sections; nothing here is computed.

Units are part of the names.
"""

from __future__ import annotations

from vorox.core.schema.adapter import AdapterConfig
from vorox.core.schema.data import DataConfig, SourceConfig
from vorox.core.schema.distillation import DistillationConfig
from vorox.core.schema.model import ModelConfig
from vorox.core.schema.optimizer import LossConfig, OptimizerConfig, ScheduleConfig
from vorox.core.schema.runtime import ParallelConfig, PrecisionConfig, RunSection, RuntimeConfig
from vorox.core.schema.section import Section
from vorox.core.schema.setting import Engine, setting
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

    backend: Engine = setting(default="torch", description="Framework that trains the model.")
    model: ModelConfig = setting(
        default_factory=ModelConfig, description="Architecture of the decoder.", resume="refused"
    )
    adapter: AdapterConfig = setting(
        default_factory=AdapterConfig, description="Low-rank adapters of a frozen model.", resume="refused"
    )
    data: DataConfig = setting(description="Sources, packing and data order.", resume="refused")
    tokenizer: TokenizerConfig = setting(
        default_factory=TokenizerConfig, description="The tokenizer.", resume="refused"
    )
    optimizer: OptimizerConfig = setting(
        default_factory=OptimizerConfig, description="Optimizer and its hyperparameters."
    )
    schedule: ScheduleConfig = setting(
        default_factory=ScheduleConfig, description="Learning rate and weight decay over the run."
    )
    loss: LossConfig = setting(default_factory=LossConfig, description="The loss function.")
    train: TrainConfig = setting(description="Length and batch size.")
    precision: PrecisionConfig = setting(default_factory=PrecisionConfig, description="Number formats.")
    checkpoint: CheckpointConfig = setting(
        default_factory=CheckpointConfig, description="When checkpoints are saved, and which are kept.", digest="none"
    )
    eval: EvalConfig = setting(default_factory=EvalConfig, description="Validation and samples.", digest="none")
    log: LogConfig = setting(
        default_factory=LogConfig, description="Metrics, and where they are written.", digest="none"
    )
    runtime: RuntimeConfig = setting(
        default_factory=RuntimeConfig, description="Device, threads, compilation, determinism."
    )
    parallel: ParallelConfig = setting(default_factory=ParallelConfig, description="Data, FSDP and tensor parallelism.")
    run: RunSection = setting(default_factory=RunSection, description="Name, directory and seed.")
