"""The pass over a chunk's logits that measures the softmax: what each rank's columns say, and what all of them say.

It sees this rank's real columns only, in the type the matrix product gave; all its arithmetic is fp32.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron_ext.losses import looking
from megatron_ext.losses.logits import ChunkProducts
from megatron_ext.losses.statistics import row_blocks, rows_at_once
from megatron_ext.losses.teacher import TeacherStatistics
from megatron_ext.losses.vocab_parallel import LOWEST, VocabShard
from megatron_ext.losses.workspace import WORKSPACE

# Partial results of each rank: those that are always measured, and what some statistics need besides. Sums of
# exponentials are relative to the rank's own maximum.
_ALWAYS = ("maximum", "denominator", "label_logits")
_BESIDES = {"mean_logits": "sum_logits", "entropy": "weighted_logits", "argmax": "argmax"}
# A token whose log-probability is above this says what the logsumexp is, within fp32's precision.
_LIKELY = -32.0


class Exponentials(NamedTuple):
    """What `measure` may leave in place of a chunk's products: exp(logits - this rank's maximum)."""

    maximum: torch.Tensor  # [tokens]
    teacher_maximum: torch.Tensor | None  # [tokens]; None: the teacher's products are as they were


class _Scratch:
    """Memory for one block of rows after the other: what was there last is still in a CPU's caches."""

    def __init__(self, most_rows: int, logits: torch.Tensor) -> None:
        self._shape, self._device = (most_rows, logits.size(1)), logits.device
        self._made: dict[str, torch.Tensor] = {}

    def get(self, num_rows: int, purpose: str) -> torch.Tensor:
        """[num_rows, columns] fp32, with whatever is in it."""
        if purpose not in self._made:
            self._made[purpose] = WORKSPACE.borrow(*self._shape, torch.float32, self._device)
        return self._made[purpose][:num_rows]

    def __enter__(self) -> "_Scratch":
        return self

    def __exit__(self, *_: object) -> None:
        for memory in self._made.values():
            WORKSPACE.give_back(memory)


class Measurement:
    """Measures chunks of logits.

    Args:
        wanted: names of the statistics to measure, see TokenStatistics and TeacherStatistics.
        shard: where this rank's columns lie.
        width: columns of each rank, padding included.
    """

    def __init__(self, wanted: Iterable[str], shard: VocabShard, width: int) -> None:
        wanted = set(wanted)
        self.shard = shard
        self.width = width
        self.num_columns = shard.num_local_columns(width)
        self.teacher = TeacherStatistics(wanted)
        besides = [partial for statistic, partial in _BESIDES.items() if statistic in wanted]
        of_teacher = self.teacher.partials
        self.partials = (*_ALWAYS, *besides, *of_teacher)
        self._compares = bool(of_teacher)

    def measure(self, chunk: ChunkProducts, labels: torch.Tensor, *, leave_exponentials: bool = False) -> torch.Tensor:
        """[partials, tokens] fp32: what this rank's columns say of each token.

        Args:
            leave_exponentials: replace the student's products by `exponentials`, in their own type, and the teacher's
                too if they are measured and fp32. Otherwise products are only read.
        """
        product = chunk.student
        partials = torch.zeros(len(self.partials), len(product), dtype=torch.float32, device=product.device)
        row = self._by_name(partials)
        if self.num_columns == 0:
            for name in {"maximum", "teacher_maximum"} & row.keys():
                row[name].fill_(LOWEST)
            return partials
        local, held = self.shard.locate(labels, self.width)
        picked = chunk.transform.apply(product.gather(1, local[:, None]).squeeze(1))
        row.pop("label_logits").copy_(torch.where(held, picked, 0.0))
        only_softmax = self.partials == _ALWAYS and not leave_exponentials
        step = rows_at_once(product, times=8 if only_softmax else 1)
        with _Scratch(step, product) as scratch:
            for rows in row_blocks(product, step):
                part = {name: values[rows] for name, values in row.items()}
                if only_softmax:
                    part["maximum"].copy_(self._logsumexp(chunk.rows(rows), local[rows], scratch))
                    part["denominator"].fill_(1.0)
                else:
                    self._measure_block(chunk.rows(rows), part, scratch, leave_exponentials=leave_exponentials)
        return partials

    @staticmethod
    def _logsumexp(chunk: ChunkProducts, columns: torch.Tensor, scratch: _Scratch) -> torch.Tensor:
        """[rows] of a block's logits, LOWEST where none is finite.

        torch's fused pass gives log-probabilities; the logsumexp is what any logit has more than its log-probability:
        where one may look one of `columns`, unless it is too unlikely, and else the largest.
        """
        product, transform = chunk.student, chunk.transform
        out = scratch.get(len(product), "student")
        is_ready = product.dtype == torch.float32 and transform.is_identity
        logits = product if is_ready else transform.apply(product, out=out)
        looks = looking.is_free(product)
        known = logits.gather(1, columns[:, None]) if looks else logits.amax(dim=1, keepdim=True)
        torch.log_softmax(logits, dim=1, out=out)
        if looks:
            log_probabilities = out.gather(1, columns[:, None])
            if (log_probabilities > _LIKELY).all():
                return (known - log_probabilities).squeeze(1)
            known = transform.apply(product).amax(dim=1, keepdim=True)
        logsumexp = known - out.amax(dim=1, keepdim=True)
        return torch.where(known == -torch.inf, LOWEST, logsumexp).squeeze(1)

    def _measure_block(
        self, chunk: ChunkProducts, row: dict[str, torch.Tensor], scratch: _Scratch, *, leave_exponentials: bool
    ) -> None:
        """Fills in the rows.

        Args:
            chunk: products of so few tokens that their logits stay in a CPU's caches.
            row: [rows] each, partial results by name.
        """
        in_place = leave_exponentials and chunk.student.dtype == torch.float32
        num_rows = len(chunk.student)
        out = chunk.student if in_place else scratch.get(num_rows, "student")
        block = chunk.transform.apply(chunk.student, out=out)
        if "sum_logits" in row:
            torch.sum(block, dim=1, out=row["sum_logits"])
        if "argmax" in row:  # on a CPU .argmax takes fifty times as long as .max, and .max thrice as long as .amax
            maximum, index = row["maximum"], torch.empty_like(row["maximum"], dtype=torch.int64)
            torch.max(block, dim=1, out=(maximum, index))
            row["argmax"].copy_(index + self.shard.rank * self.width)  # exact below 2**24
        else:
            maximum = torch.amax(block, dim=1, out=row["maximum"])
        # -inf, where none of this rank's logits is finite, less -inf is NaN
        maximum.clamp_(min=LOWEST)
        block.sub_(maximum[:, None])
        if self._compares:
            assert chunk.teacher is not None and chunk.teacher_transform is not None, (
                "a loss that compares with a teacher was given none"
            )
            in_place_too = leave_exponentials and chunk.teacher.dtype == torch.float32
            out = chunk.teacher if in_place_too else scratch.get(num_rows, "teacher")
            teacher = chunk.teacher_transform.apply(chunk.teacher, out=out)
            self.teacher.measure(block, teacher, row, lambda name: scratch.get(num_rows, name))
        if "weighted_logits" in row:
            # the lower limit keeps a logit of -inf from making 0 * inf
            row["weighted_logits"].copy_((block.exp() * block.clamp(min=LOWEST)).sum(dim=1))
        torch.sum(block.exp_(), dim=1, out=row["denominator"])
        if leave_exponentials and not in_place:
            chunk.student.copy_(block)

    def exponentials(self, partials: torch.Tensor) -> Exponentials:
        """What `measure` left, from what it returned."""
        row = self._by_name(partials)
        return Exponentials(row["maximum"], row.get("teacher_maximum"))

    def combine(self, gathered: torch.Tensor) -> dict[str, torch.Tensor]:
        """Statistics over the whole vocabulary, from every rank's partial results [tp, partials, tokens]."""
        part = dict(zip(self.partials, gathered.unbind(1), strict=True))  # [tp, tokens] each
        maximum = part["maximum"].amax(dim=0)
        share = (part["maximum"] - maximum).exp_()
        denominator = (share * part["denominator"]).sum(dim=0)
        log_denominator = denominator.log()
        measured = {"logsumexp": maximum + log_denominator, "label_logits": part["label_logits"].sum(dim=0)}
        if "sum_logits" in part:
            measured["mean_logits"] = part["sum_logits"].sum(dim=0) / self.shard.vocab_size
        if "weighted_logits" in part:
            shifted = part["weighted_logits"] + (part["maximum"] - maximum) * part["denominator"]
            measured["entropy"] = log_denominator - (share * shifted).sum(dim=0) / denominator
        if "argmax" in part:
            best_rank = part["maximum"].argmax(dim=0, keepdim=True)
            measured["argmax"] = part["argmax"].gather(0, best_rank).squeeze(0).long()
        return measured | self.teacher.combine(part)

    def _by_name(self, partials: torch.Tensor) -> dict[str, torch.Tensor]:
        return dict(zip(self.partials, partials, strict=True))
