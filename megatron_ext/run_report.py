"""What a run says on the terminal: the resolved layout and batch arithmetic, progress lines, evaluation lines."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_ext.config import Config
from megatron_ext.parallel import ParallelContext


def describe_layout(config: Config, parallel: ParallelContext) -> str:
    """Two lines of arithmetic: how the ranks are used, and what one step trains."""
    p, t = parallel, config.training
    rows = f"sequences of up to {config.data.seq_length} tokens"
    if config.data.packing:
        capacity = t.micro_batch_size * config.data.seq_length
        split = f", packed into micro-batches of up to {capacity} tokens on DP {p.dp_size}"
    else:
        split = f" = micro-batch {t.micro_batch_size} x {config.num_micro_batches(p.world_size)} micro-batches"
        split += f" x DP {p.dp_size}"
    return f"{describe_ranks(config, p)}\nbatch      {t.global_batch_size} samples a step{split}; {rows}"


def describe_ranks(config: Config, parallel: ParallelContext) -> str:
    """One line: how the ranks are used."""
    p = parallel
    extras = []
    if config.parallel.sequence_parallel:
        extras.append("sequence parallel")
    if p.vp_size > 1:
        extras.append(f"{p.vp_size} model chunks a pipeline rank")
    if config.optimizer.use_distributed_optimizer and not config.evaluation.eval_only:
        extras.append("distributed optimizer")
    ranks = f"{p.world_size} rank{'s' if p.world_size > 1 else ''}"
    return (
        f"layout     {ranks} = TP {p.tp_size} x CP {p.cp_size} x PP {p.pp_size} x DP {p.dp_size}"
        + "".join(f", {extra}" for extra in extras)
        + f"; {'bf16' if config.training.bf16 else 'fp32'} on {p.device.type}"
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


def evaluation_table(records: Mapping[str, Mapping[str, Any]], loss_names: Sequence[str]) -> str:
    """One row for each evaluation set: every loss, perplexity, token accuracy, tokens, sequences, time."""
    losses = loss_names if len(loss_names) == 1 else [*loss_names, "loss"]
    header = ["set", *losses, "perplexity", "token accuracy", "tokens", "sequences", "time"]
    rows = [
        [
            name,
            *(f"{record[loss]:.4f}" for loss in losses),
            f"{record['perplexity']:.3f}",
            f"{record['token_accuracy']:.4f}",
            f"{record['num_tokens']:,.0f}",
            f"{record['sequences']:,}",
            f"{record['seconds']:.1f} s",
        ]
        for name, record in records.items()
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "  ".join(
            text.rjust(width) if i else text.ljust(width)
            for i, (text, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
