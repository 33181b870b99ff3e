"""Keeps Megatron-Core's checkpoint writer inside the rank's own process."""

import queue

from megatron.core.dist_checkpointing.strategies import filesystem_async


def write_in_process() -> None:
    """Let a synchronous save report through an ordinary queue instead of a server process of its own.

    Megatron-Core (0.19.2) starts a `multiprocessing.Manager` at the first save, also where no other process takes part
    in saving. That process does not notice when its rank is killed or ends in an error: it stays behind. This can go
    when the queue is made for asynchronous saves only.
    """
    filesystem_async._results_queue = queue.Queue()
