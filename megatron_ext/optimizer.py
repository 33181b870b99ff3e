"""Megatron-Core's optimizer and learning-rate schedule, built from the configuration, and what restoring the
optimizer's state takes. Reading and writing checkpoints is `checkpoint.py`.
"""

from typing import Any

import torch
from megatron.core.optimizer import (
    ChainedOptimizer,
    DistributedOptimizer,
    MegatronOptimizer,
    get_megatron_optimizer,
)
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


def _parts(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    return optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]


def initialize_optimizer_state(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer's states before loading, as the first step would; they say what there is to load.

    Megatron-Core (0.19.2) brings this for Adam, but leaves out the step counter that DistributedOptimizer then reads
    from torch's Adam, and brings nothing for SGD.
    """
    for part in _parts(optimizer):
        if part.init_state_fn is None:
            part.init_state_fn = _initialize_momentum
        if isinstance(part, DistributedOptimizer):
            part.init_state_fn(part.optimizer, part.config)
            if isinstance(part.optimizer, torch.optim.Adam):
                for state in part.optimizer.state.values():
                    state.setdefault("step", torch.zeros((), dtype=torch.float32))


def _initialize_momentum(optimizer: torch.optim.Optimizer, _config: Any = None) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter.data))


def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Restore the optimizer; its states exist already (`initialize_optimizer_state`).

    With torch's Adam, DistributedOptimizer (0.19.2) needs two detours. It looks for a step counter among the tensors
    of each parameter, where none was saved: so the counters are taken away while those are read. And it gives one
    counter tensor to all parameters, in which Adam counts in place: the first step after a resume would be right, and
    the second as many steps too far as there are parameters. So every parameter gets its own.
    """
    parts = _parts(optimizer)
    if len(parts) > 1 or not isinstance(parts[0], DistributedOptimizer):
        optimizer.load_state_dict(state)
    else:
        parameter_state = state.pop("param_state")
        parts[0].load_state_dict(state)
        states = parts[0].optimizer.state.values()
        steps = [values.pop("step", None) for values in states]
        parts[0].load_parameter_state_from_fully_reshardable(parameter_state)
        for values, step in zip(states, steps, strict=True):
            if step is not None:
                values["step"] = step
    for part in parts:
        for values in part.optimizer.state.values():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"] = values["step"].clone()
