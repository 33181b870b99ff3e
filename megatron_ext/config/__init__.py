"""The configuration of a run: its schema, its command line and its checks. Imports no torch."""

from megatron_ext.config.checks import check_files, check_layout
from megatron_ext.config.command_line import Command, load_config, parse_command_line
from megatron_ext.config.losses import (
    CrossEntropyLoss,
    DistillationLoss,
    ForwardKLLoss,
    JSDLoss,
    LossBase,
    LossConfig,
    ReverseKLLoss,
    ZLoss,
)
from megatron_ext.config.messages import ConfigError
from megatron_ext.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LoggingConfig,
    LogitsConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TeacherConfig,
    TrainingConfig,
)
from megatron_ext.config.yaml_file import config_to_yaml

__all__ = [
    "CheckpointConfig",
    "Command",
    "Config",
    "ConfigError",
    "CrossEntropyLoss",
    "DataConfig",
    "DistillationLoss",
    "EvaluationConfig",
    "ForwardKLLoss",
    "JSDLoss",
    "LoggingConfig",
    "LogitsConfig",
    "LossBase",
    "LossConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReverseKLLoss",
    "TeacherConfig",
    "TrainingConfig",
    "ZLoss",
    "check_files",
    "check_layout",
    "config_to_yaml",
    "load_config",
    "parse_command_line",
]
