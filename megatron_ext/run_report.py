"""What a run says on the terminal: the resolved layout and batch arithmetic, progress lines, evaluation lines."""

from collections.abc import Mapping
from typing import Any

from megatron_ext.config import Config
from megatron_ext.parallel import ParallelContext


def _axis(name: str, size: int) -> str:
    return f"{name}{size}"


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
    return "\n".join(
        (
            f"layout   {p.world_size} ranks = TP {p.tp_size} x CP {p.cp_size} x PP {p.pp_size} x DP {p.dp_size}"
            + "".join(f", {extra}" for extra in extras)
            + f"; {'bf16' if t.bf16 else 'fp32'} on {p.device.type}",
            f"batch    {t.global_batch_size} samples a step = micro-batch {t.micro_batch_size} x "
            f"{micro_batches} micro-batches x DP {p.dp_size}; sequences of up to {config.data.seq_length} tokens",
        )
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def progress_line(record: Mapping[str, Any], train_iters: int) -> str:
    """iteration, loss, lr, gradient norm, speed and time left, from one training record of metrics.jsonl."""
    iteration = record["iteration"]
    left = (train_iters - iteration) * record["iteration_time_ms"] / 1000
    return (
        f"iteration {iteration:>{len(str(train_iters))}}/{train_iters} | loss {record['loss']:.4f} | "
        f"lr {record['lr']:.3e} | grad norm {record['grad_norm']:.3f} | "
        f"{record['tokens_per_second']:,.0f} tokens/s | {_duration(left)} left"
    )


def evaluation_line(split: str, iteration: int, metrics: Mapping[str, float]) -> str:
    """The metrics of one evaluation set."""
    hidden = {"num_tokens", "num_input_tokens"}
    # compared as text: NaN is not equal to itself
    if {str(value) for name, value in metrics.items() if name not in hidden} == {str(metrics["loss"])}:
        hidden.add("loss")  # the total of one loss of weight 1 says nothing more
    losses = ", ".join(f"{name} {value:.4f}" for name, value in metrics.items() if name not in hidden)
    return f"evaluation at iteration {iteration} | {split}: {losses} over {metrics['num_tokens']:,.0f} tokens"
