"""Starts and ends the ranks of a run: process groups, random seeds, and what happens when one of them fails.

Everything later gets its ranks and groups from the `ParallelContext` made here. Axis names are Megatron-Core's: tp
(tensor), cp (context), pp (pipeline), dp (data), ep (expert); ranks run fastest over tp, then cp, dp, pp.
"""

import gc
import os
import random
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_ext.config import Config
from megatron_ext.platform import Platform

_FIRST_FAILURE = "megatron_ext/first_failure"
_WITHOUT_LIMIT = timedelta(days=20)  # in milliseconds it has to fit into 32 bits


@dataclass(frozen=True)
class ParallelContext:
    """Where this rank stands in the layout, and the process groups it belongs to."""

    device: torch.device
    pg: ProcessGroupCollection
    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    vp_size: int  # model chunks on each pipeline rank; 1 without interleaving
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_size: int

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds the tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what one rank writes for all."""
        return self.rank == 0


def _complete_environment() -> None:
    """Fill in what torchrun would set, so that one process can be started with plain `python`."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.update(alone)


def world_size_from_environment() -> int:
    """The number of ranks the launcher started; 1 without a launcher. Needs no process group.

    Raises:
        ValueError: WORLD_SIZE is not a number of ranks.
    """
    text = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"the environment variable WORLD_SIZE is {text!r}, not a number of ranks; start with torchrun")
    return int(text)


def is_main_from_environment() -> bool:
    """Whether this process is rank 0; usable before the process group exists."""
    return int(os.environ.get("RANK", "0")) == 0


def seed_everything(seed: int, parallel_ranks: ProcessGroupCollection) -> None:
    """Seed Python, NumPy and torch, and Megatron-Core's named random streams.

    Pipeline stages get seeds of their own (they hold other layers); data-parallel replicas share theirs, so that
    dropout masks are all that could differ between layouts.
    """
    stage_seed = seed + 100 * parallel_ranks.pp.rank()
    random.seed(stage_seed)
    np.random.seed(stage_seed % 2**32)
    torch.manual_seed(stage_seed)
    tensor_parallel.model_parallel_cuda_manual_seed(
        stage_seed,
        tp_rank=parallel_ranks.tp.rank(),
        ep_rank=parallel_ranks.ep.rank(),
        etp_rank=parallel_ranks.expt_tp.rank(),
        force_reset_rng=True,
    )


def create_context(config: Config, platform: Platform) -> ParallelContext:
    """Create Megatron-Core's process groups over an initialised default group, and seed this rank.

    Every rank of the default group must call it. The layout must have passed `check_layout`.
    """
    parallel = config.parallel
    vp_size = parallel.virtual_pipeline_model_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=vp_size,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        distributed_timeout_minutes=parallel.distributed_timeout_minutes,
        create_gloo_process_groups=False,
    )
    pg = ProcessGroupCollection.use_mpu_process_groups()
    seed_everything(config.training.seed, pg)
    return ParallelContext(
        device=platform.local_device(),
        pg=pg,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tp_rank=pg.tp.rank(),
        tp_size=pg.tp.size(),
        pp_rank=pg.pp.rank(),
        pp_size=pg.pp.size(),
        vp_size=vp_size or 1,
        cp_rank=pg.cp.rank(),
        cp_size=pg.cp.size(),
        dp_rank=pg.dp.rank(),
        dp_size=pg.dp.size(),
        ep_size=pg.ep.size(),
    )


def destroy_context() -> None:
    """Forget Megatron-Core's process groups; the default group stays, ready for another layout."""
    parallel_state.destroy_model_parallel()
    # groups live in reference cycles, and each gloo group keeps threads until it is collected
    gc.collect()


@contextmanager
def one_for_all(parallel: ParallelContext, name: str) -> Iterator[bool]:
    """A block in which the main rank does something for all ranks; the others wait at its end until it is done.

        with one_for_all(parallel, "the export") as is_mine:
            if is_mine: ...

    They wait however long it takes: not in a collective, whose timeout would end the run, but for a key of the store.
    If the main rank fails instead, the store goes down with its launcher, and the launchers end the others. All ranks
    enter it, in the same order; ranks may take part in collectives inside.
    """
    yield parallel.is_main
    store = dist.distributed_c10d._get_default_store()
    # A fresh key each time: how often this rank has been here. Counted in the store, which lives as long as the group.
    count = store.add(f"megatron_ext/visits/{name}/{parallel.rank}", 1)
    key = f"megatron_ext/done/{name}/{count}"
    if parallel.is_main:
        store.set(key, "done")
    else:
        store.wait([key], _WITHOUT_LIMIT)


def _start_default_group(config: Config, platform: Platform) -> dist.Store:
    _complete_environment()
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    if platform.device_type == "cuda":
        torch.cuda.set_device(platform.local_device())
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
    store.set_timeout(timeout)
    dist.init_process_group(platform.backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    return store


def _report_failure(store: dist.Store, error: BaseException) -> None:
    """Print the error if no other rank failed before; the rest fails because of the first and says only so."""
    rank = dist.get_rank()
    try:
        first = store.compare_set(_FIRST_FAILURE, "", str(rank)).decode()
    except (dist.DistError, RuntimeError):  # the store went down with the rank that served it
        first = "another rank"
    if first != str(rank):
        print(f"[rank {rank}] stops, because rank {first} failed", file=sys.stderr, flush=True)
        return
    if isinstance(error, ValueError):  # a user's mistake: the sentence is the message
        text = f"error: {error}"
    else:
        text = f"[rank {rank}] failed:\n" + "".join(traceback.format_exception(error))
    print(text, file=sys.stderr, flush=True)


@contextmanager
def parallel_session(config: Config, platform: Platform) -> Iterator[ParallelContext]:
    """The life of all ranks of a run.

    On success the ranks meet before any of them takes the process group down: without that, the launcher sometimes
    reports a failed rank after a good run. On an error this rank reports it and ends at once with exit code 1, which
    makes the launcher end the others; nobody waits for a collective timeout.
    """
    store = _start_default_group(config, platform)
    try:
        yield create_context(config, platform)
        dist.barrier()
    except BaseException as error:
        if isinstance(error, SystemExit) and not error.code:
            raise
        _report_failure(store, error)
        sys.stdout.flush()
        os._exit(1)  # destructors of half-finished collectives could wait for ranks that are gone
    destroy_context()
    dist.destroy_process_group()
