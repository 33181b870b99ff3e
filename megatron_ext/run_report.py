"""What a run says on the terminal: the resolved layout and batch arithmetic, progress lines, evaluation lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.config import Config
from megatron_ext.parallel import ParallelContext


def describe_layout(config: Config, parallel: ParallelContext) -> str:
    """Two lines of arithmetic: how the ranks are used, and what one step trains."""
    p, t = parallel, config.training
    extras = []
    if config.parallel.sequence_parallel:
        extras.append("sequence parallel")
    if p.vp_size > 1:
        extras.append(f"{p.vp_size} model chunks a pipeline rank")
    if config.optimizer.use_distributed_optimizer:
        extras.append("distributed optimizer")
    micro_batches = config.num_micro_batches(p.world_size)
    ranks = f"{p.world_size} rank{'s' if p.world_size > 1 else ''}"
    return "\n".join(
        (
            f"layout     {ranks} = TP {p.tp_size} x CP {p.cp_size} x PP {p.pp_size} x DP {p.dp_size}"
            + "".join(f", {extra}" for extra in extras)
            + f"; {'bf16' if t.bf16 else 'fp32'} on {p.device.type}",
            f"batch      {t.global_batch_size} samples a step = micro-batch {t.micro_batch_size} x "
            f"{micro_batches} micro-batches x DP {p.dp_size}; sequences of up to {config.data.seq_length} tokens",
        )
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def _losses(values: Mapping[str, float], names: Sequence[str]) -> str:
    """Each loss, and the total where it says more than the one loss does."""
    # compared as text: NaN is not equal to itself
    alone = len(names) == 1 and str(values[names[0]]) == str(values["loss"])
    shown = names if alone else [*names, "loss"]
    return ", ".join(f"{name} {values[name]:.4f}" for name in shown)


def progress_line(record: Mapping[str, Any], loss_names: Sequence[str], train_iters: int) -> str:
    """iteration, losses, lr, gradient norm, speed and time left, from one training record of metrics.jsonl."""
    iteration = record["iteration"]
    left = (train_iters - iteration) * record["iteration_time_ms"] / 1000
    return (
        f"iteration {iteration:>{len(str(train_iters))}}/{train_iters} | {_losses(record, loss_names)} | "
        f"lr {record['lr']:.3e} | grad norm {record['grad_norm']:.3f} | "
        f"{record['tokens_per_second']:,.0f} tokens/s | {_duration(left)} left"
    )


def evaluation_line(split: str, iteration: int, metrics: Mapping[str, float], loss_names: Sequence[str]) -> str:
    """The losses of one evaluation set."""
    return (
        f"evaluation at iteration {iteration} | {split}: {_losses(metrics, loss_names)} "
        f"over {metrics['num_tokens']:,.0f} tokens"
    )
