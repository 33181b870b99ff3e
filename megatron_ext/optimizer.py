"""Megatron-Core's optimizer and learning-rate schedule, built from the configuration."""

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_ext.config import Config
from megatron_ext.parallel import ParallelContext


def build_optimizer(
    config: Config, model_chunks: list[torch.nn.Module], parallel: ParallelContext
) -> MegatronOptimizer:
    """Adam or SGD over the trainable parameters of DDP-wrapped chunks, with fp32 master weights under bf16.

    Weight decay leaves biases and norms alone, as Megatron's default does.
    """
    settings = config.optimizer
    optimizer_config = MegatronOptimizerConfig(
        optimizer=settings.optimizer,
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        clip_grad=settings.clip_grad,
        bf16=config.training.bf16,
        params_dtype=torch.bfloat16 if config.training.bf16 else torch.float32,
        use_distributed_optimizer=settings.use_distributed_optimizer,
        overlap_param_gather=config.parallel.overlap_param_gather,
    )
    return get_megatron_optimizer(
        optimizer_config, model_chunks, use_gloo_process_groups=False, pg_collection=parallel.pg
    )


def build_scheduler(config: Config, optimizer: MegatronOptimizer) -> OptimizerParamScheduler:
    """The learning rate by iteration: linear warm-up, then constant, linear or cosine decay.

    A resumed run keeps the schedule position of its checkpoint, and the schedule's shape of its own configuration.
    """
    settings = config.optimizer
    assert config.lr_decay_iters is not None
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_iters,
        lr_decay_steps=config.lr_decay_iters,
        lr_decay_style=settings.lr_decay_style,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
