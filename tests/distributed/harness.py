"""A pool of rank processes that tests hand functions to.

Starting a rank costs seconds (torch and megatron.core), so the ranks stay alive for the whole session and start a new
process group for every test. A rank that fails or does not answer in time ends the pool; the next test gets a new one.
"""

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

POOL_SIZE = 4
START_SECONDS = 200
TIMEOUT_SECONDS = 120


def _serve(rank: int, port: int, connection: Any) -> None:
    """The life of one rank: take (world size, function, arguments), answer (ok, result or traceback)."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import warnings
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    warnings.simplefilter("ignore")
    from megatron_ext import platform

    platform.setup("cpu")
    torch.set_num_threads(1)
    from megatron_ext.parallel import destroy_context

    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    connection.send("ready")
    while True:
        try:
            task, world_size, function, arguments = connection.recv()
        except EOFError:  # the pool was stopped
            return
        try:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"task{task}", store),
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=TIMEOUT_SECONDS),
            )
            result = function(*arguments)
            dist.barrier()
            destroy_context()
            dist.destroy_process_group()
            connection.send((True, result))
        except BaseException:
            connection.send((False, traceback.format_exc()))


class RankPool:
    """Ranks 0 to POOL_SIZE - 1; a test uses the first few of them."""

    def __init__(self) -> None:
        self._workers: list[tuple[Any, Any]] = []
        self._tasks = 0

    def _start(self) -> None:
        from torch.distributed import TCPStore

        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        for rank in range(POOL_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._store.port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._workers.append((process, ours))
        for rank, (_, connection) in enumerate(self._workers):
            assert connection.poll(START_SECONDS), f"rank {rank} did not start in {START_SECONDS} s"
            connection.recv()

    def stop(self) -> None:
        for process, connection in self._workers:
            process.kill()
            process.join()
            connection.close()
        self._workers = []

    def run(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, timeout: float = TIMEOUT_SECONDS
    ) -> list:
        """Call `function(*arguments)` on `world_size` ranks at once, inside a process group.

        Returns:
            What each rank returned, in rank order.

        Raises:
            AssertionError: a rank failed (with its traceback) or took longer than `timeout` seconds.
        """
        assert world_size <= POOL_SIZE, f"the pool has {POOL_SIZE} ranks"
        if not self._workers:
            self._start()
        used = self._workers[:world_size]
        self._tasks += 1
        for _, connection in used:
            connection.send((self._tasks, world_size, function, arguments))
        results, failures = self._collect(used, timeout)
        if failures:
            self.stop()
            raise AssertionError("\n".join(failures))
        return results

    @staticmethod
    def _collect(used: list, timeout: float) -> tuple[list, list[str]]:
        import time
        from multiprocessing.connection import wait

        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        failures: list[str] = []
        waiting = {connection: rank for rank, (_, connection) in enumerate(used)}
        while waiting and not failures:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.append(f"ranks {sorted(waiting.values())} did not answer in {timeout} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    ok, answer = connection.recv()
                except EOFError:
                    ok, answer = False, "the process died"
                if ok:
                    results[rank] = answer
                else:
                    failures.append(f"rank {rank} failed:\n{answer}")
        return [results.get(rank) for rank in range(len(used))], failures
