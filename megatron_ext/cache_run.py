"""Fills a store with what a teacher says: its k most likely tokens over the sharded vocabulary at every position of
every sample. The files are `teacher_cache`'s, running the teacher is `teacher`'s.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.cached_teacher import local_positions
from megatron_ext.config import Config
from megatron_ext.context_parallel import restore_sequence_order
from megatron_ext.data import FILLER_ID, EvalLoader, MicroBatch, RunData, SFTDataset
from megatron_ext.losses import TeacherTopK, VocabShard
from megatron_ext.losses.vocab_parallel import LOWEST
from megatron_ext.parallel import ParallelContext
from megatron_ext.teacher import Teacher
from megatron_ext.teacher_cache import CacheWriter

CHUNK_LOGITS = 2**25  # logits that exist at once on a rank


@dataclass(frozen=True)
class _Inputs:
    """A micro-batch as the teacher takes it, not packed."""

    input_ids: torch.Tensor  # [b, s/cp]
    position_ids: torch.Tensor  # [b, s/cp]
    packed: None = None


def fill_cache(
    writer: CacheWriter,
    teacher: Teacher,
    data: RunData,
    config: Config,
    parallel: ParallelContext,
    say: Callable[[str], None],
) -> None:
    """Run every sample of every data set through the teacher and write the store. Every rank must call it."""
    if parallel.is_main:
        writer.create()
    dist.barrier()
    done, total = 0, sum(len(dataset) for _, dataset in data.named())
    for name, dataset in data.named():
        for micro_batches in _loader(dataset, config, parallel, data.pad_id):
            inputs = [_own_part(batch, parallel) for batch in micro_batches]
            hidden = teacher.hidden_states(inputs)
            for batch, states in zip(micro_batches, hidden or (), strict=False):
                top = _whole_top_k(states, teacher, writer, parallel)
                if parallel.tp_rank == 0 and parallel.cp_rank == 0:
                    _write(writer, name, batch, top)
            before, done = done, done + len(micro_batches) * len(micro_batches[0].sample_ids) * parallel.dp_size
            if done * 10 // total > before * 10 // total:
                say(f"{min(done, total)}/{total} samples")
    writer.flush()
    dist.barrier()
    if parallel.is_main:
        writer.finish()
    dist.barrier()


def _loader(dataset: SFTDataset, config: Config, parallel: ParallelContext, pad_id: int) -> Iterable[list[MicroBatch]]:
    size = config.eval_micro_batch_size
    return EvalLoader(
        dataset,
        global_batch_size=4 * parallel.pp_size * size * parallel.dp_size,
        micro_batch_size=size,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        pad_multiple=config.sequence_multiple,
        seq_length=config.data.seq_length,
        pad_id=pad_id,
        micro_batches_multiple=parallel.pp_size if parallel.vp_size > 1 else 1,
    )


def _own_part(batch: MicroBatch, parallel: ParallelContext) -> _Inputs:
    own = local_positions(batch, parallel)
    return _Inputs(batch.input_ids[:, own].to(parallel.device), batch.position_ids[:, own].to(parallel.device))


def _whole_top_k(
    states: torch.Tensor,  # [s/cp(/tp), b, h]
    teacher: Teacher,
    writer: CacheWriter,
    parallel: ParallelContext,
) -> TeacherTopK:
    """Of whole rows, [b, s, ...], on every TP and CP rank of the last stage."""
    if parallel.tp_size > 1 and teacher.is_sequence_parallel:
        gathered = states.new_empty(states.size(0) * parallel.tp_size, *states.shape[1:])
        dist.all_gather_into_tensor(gathered, states.contiguous(), group=parallel.pg.tp)
        states = gathered
    shard = VocabShard(parallel.pg.tp, writer.facts.vocab_size)
    k, temperature = writer.facts.top_k, writer.facts.temperature
    top = teacher_top_k(states.flatten(0, 1), teacher.output_weight, shard, top_k=k, temperature=temperature)
    # ids are exact in fp32 below 2**24
    table = torch.cat((top.ids.float(), top.log_probabilities, top.log_tail[:, None]), dim=1)
    table = table.view(*states.shape[:2], -1)  # [s/cp, b, 2k + 1]
    if parallel.cp_size > 1:
        by_rank = table.new_empty(parallel.cp_size, *table.shape)
        dist.all_gather_into_tensor(by_rank.flatten(0, 1), table.contiguous(), group=parallel.pg.cp)
        table = restore_sequence_order(by_rank)
    ids, log_probabilities, log_tail = table.transpose(0, 1).split((k, k, 1), dim=2)
    return TeacherTopK(ids.long(), log_probabilities, log_tail.squeeze(2), temperature)


def _write(writer: CacheWriter, name: str, batch: MicroBatch, top: TeacherTopK) -> None:
    arrays = [tensor.cpu().numpy() for tensor in (batch.input_ids, top.ids, top.log_probabilities, top.log_tail)]
    for (row, own), sample_id in zip(batch.spans(), batch.sample_ids.tolist(), strict=True):
        if sample_id != FILLER_ID:
            writer.write(name, sample_id, *(array[row, own] for array in arrays))


def teacher_top_k(
    hidden: torch.Tensor,  # [tokens, h], all tokens on every TP rank
    weight: torch.Tensor,  # [vocab/tp, h]
    shard: VocabShard,
    *,
    top_k: int,
    temperature: float,
) -> TeacherTopK:
    """The k most likely tokens of softmax(hidden @ weight.T / temperature) over the vocabulary, the same on every rank.

    Two collectives over `shard.group` for each chunk of tokens.
    """
    chunk = max(1, CHUNK_LOGITS // weight.size(0))
    parts = [_chunk_top_k(rows @ weight.t(), shard, top_k, temperature) for rows in hidden.split(chunk)]
    ids, log_probabilities, log_tail = (torch.cat(part) for part in zip(*parts, strict=True))
    return TeacherTopK(ids, log_probabilities, log_tail, temperature)


def _chunk_top_k(
    product: torch.Tensor, shard: VocabShard, k: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first_column = shard.rank * product.size(1)
    logits = product[:, : shard.num_local_columns(product.size(1))].float() / temperature  # [tokens, columns]
    count = min(k, logits.size(1))
    values, columns = logits.topk(count, dim=1)
    # a rank with fewer columns fills up; ids are exact in fp32 below 2**24
    values = torch.nn.functional.pad(values, (0, k - count), value=LOWEST)
    ids = torch.nn.functional.pad((columns + first_column).float(), (0, k - count))
    gathered, _ = shard.all_gather(torch.cat((values, ids), dim=1))
    values, ids = (part.transpose(0, 1).flatten(1) for part in gathered.split(k, dim=2))  # [tokens, tp * k]
    best, order = values.topk(k, dim=1)
    ids = ids.gather(1, order).long()

    local = ids - first_column
    held = (local >= 0) & (local < logits.size(1))
    others = torch.cat((logits, logits.new_full((len(logits), 1), LOWEST)), dim=1)
    others.scatter_(1, torch.where(held, local, logits.size(1)), LOWEST)  # what others hold goes to the extra column
    rest, _ = shard.all_gather(others.logsumexp(dim=1))
    log_rest = rest.logsumexp(dim=0)
    denominator = torch.logaddexp(best.logsumexp(dim=1), log_rest)
    return ids, best - denominator[:, None], (log_rest - denominator).clamp(min=LOWEST)
