"""A teacher that spoke before: what `teacher_cache` keeps, as the signals that the loss head takes. It stands where
`teacher.Teacher` would, and needs no model.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.config import Config, ConfigError
from megatron_ext.context_parallel import packed_order, shard_sequence
from megatron_ext.data import FILLER_ID, MicroBatch
from megatron_ext.losses import TeacherTopK
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.packed_rows import bounds_of
from megatron_ext.parallel import ParallelContext
from megatron_ext.teacher import Teacher, TeacherPlan
from megatron_ext.teacher_cache import TeacherCache


def plan_cache(config: Config, student: HFConfig) -> TeacherCache | None:
    """Open the store that the configuration names, and see that it fits the losses; None when it names none.

    Raises:
        ValueError: it is damaged, or was written with another top_k or temperature or for another vocabulary.
    """
    path = config.teacher.teacher_cache
    if path is None:
        return None
    cache = TeacherCache(path)
    facts = cache.facts
    problems = [
        f"losses.{name}.{what}: {own} is not the {what} {stored} that teacher_cache {path} was written with; "
        f"use {stored}, or write a store with {own}"
        for name, loss in config.distillation_losses.items()
        for what, own, stored in (
            ("top_k", loss.top_k, facts.top_k),
            ("temperature", loss.temperature, facts.temperature),
        )
        if own != stored
    ]
    common = min(student.vocab_size, facts.teacher_vocab_size)
    if common != facts.vocab_size:
        problems.append(
            f"teacher.teacher_cache: {path} was written for {facts.vocab_size} token ids, but the model and the "
            f"teacher (vocab_size {facts.teacher_vocab_size}) share {common}; write one for this model (vocab_size "
            f"{student.vocab_size})"
        )
    if problems:
        raise ConfigError(problems)
    return cache


def build_teacher(
    prepared: TeacherPlan | TeacherCache | None, parallel: ParallelContext
) -> "Teacher | CachedTeacher | None":
    """The teacher of a run, from what was prepared. Every rank must call it."""
    if prepared is None:
        return None
    return Teacher(prepared, parallel) if isinstance(prepared, TeacherPlan) else CachedTeacher(prepared, parallel)


class CachedTeacher:
    """Reads a store for each step; see `TeacherSignals` of the model wrapper.

    All ranks make one at the same time: they share the work of comparing the store with its checksums.

    Raises:
        ValueError: the store is damaged, on every rank.
    """

    def __init__(self, cache: TeacherCache, parallel: ParallelContext) -> None:
        self.cache = cache
        self.parallel = parallel
        self._verify()

    def _verify(self) -> None:
        parallel = self.parallel
        problem = self.cache.verify(parallel.rank, parallel.world_size)
        # the first rank that found something tells all others
        finder = torch.tensor(parallel.world_size if problem is None else parallel.rank, device=parallel.device)
        dist.all_reduce(finder, op=dist.ReduceOp.MIN)
        if int(finder) < parallel.world_size:
            told = [problem]
            dist.broadcast_object_list(told, src=int(finder))
            raise ValueError(told[0])

    def signals(self, inputs: Sequence[Any], micro_batches: Sequence[MicroBatch]) -> Sequence[TeacherTopK | None]:
        """The stored tokens of each micro-batch, this CP rank's part; on the last stage only."""
        if not self.parallel.is_last_stage:
            return [None] * len(micro_batches)
        return [self._read(batch) for batch in micro_batches]

    def _read(self, batch: MicroBatch) -> TeacherTopK:
        b, s = batch.input_ids.shape
        k = self.cache.facts.top_k
        # padding: any distribution, over tokens that there are
        ids = np.broadcast_to(np.arange(k), (b, s, k)).copy()
        log_probabilities = np.full((b, s, k), -np.log(k + 1), dtype=np.float32)
        log_tail = np.full((b, s), -np.log(k + 1), dtype=np.float32)
        tokens = batch.input_ids.cpu().numpy()
        for (row, own), sample_id in zip(batch.spans(), batch.sample_ids.tolist(), strict=True):
            if sample_id != FILLER_ID:
                stored = self.cache.read(tokens[row, own])
                ids[row, own], log_probabilities[row, own], log_tail[row, own] = stored
        own = local_positions(batch, self.parallel)

        def to_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array)[:, own].to(self.parallel.device, non_blocking=True)

        return TeacherTopK(
            to_device(ids), to_device(log_probabilities), to_device(log_tail), self.cache.facts.temperature
        )


def local_positions(batch: MicroBatch, parallel: ParallelContext) -> torch.Tensor:
    """[s/cp] int64: the positions of a row that this CP rank has, in its order."""
    positions = torch.arange(batch.input_ids.size(1))
    if parallel.cp_size == 1:
        return positions
    if batch.cu_seqlens is not None:
        return packed_order(bounds_of(batch).cpu(), parallel.cp_size)[parallel.cp_rank]
    return shard_sequence(positions[None], parallel.cp_rank, parallel.cp_size)[0]
