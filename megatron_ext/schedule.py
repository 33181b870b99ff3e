"""Calls Megatron-Core's pipeline schedules: the right one for a layout, with the groups it needs. What a micro-batch's
forward step and loss are is the caller's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.utils import get_model_config

from megatron_ext.parallel import ParallelContext


def run_schedule(
    forward_step: Callable[..., tuple[Any, Callable]],
    inputs: Sequence[Any],
    model_chunks: list[torch.nn.Module],
    parallel: ParallelContext,
    *,
    micro_batch_size: int,
    seq_length: int,
    forward_only: bool,
) -> list[Any]:
    """What the loss functions reported of each micro-batch; empty on all but the last stage.

    Args:
        forward_step: takes an iterator over `inputs` and a chunk, returns the chunk's output and the loss function.
        inputs: one for each micro-batch; every chunk iterates over all of them.
        seq_length: of whole sequences, not of a CP rank's part.
    """
    groups: dict[str, Any] = {"pg_collection": parallel.pg}
    if parallel.pp_size > 1:
        groups["p2p_communicator"] = P2PCommunicator(parallel.pg.pp, get_model_config(model_chunks[0]))
    schedule = get_forward_backward_func(parallel.pp_size, parallel.vp_size if parallel.vp_size > 1 else None)
    return schedule(
        forward_step_func=forward_step,
        data_iterator=[iter(inputs) for _ in model_chunks],
        model=model_chunks,
        num_microbatches=len(inputs),
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        forward_only=forward_only,
        **groups,
    )
