"""Divergences over a teacher's k most likely tokens and an explicit tail.

The k tokens are the teacher's over the whole vocabulary, whatever the tensor-parallel layout. What is compared is a
small distribution [tokens, k] or, with the tail as one more outcome, [tokens, k + 1]; the value is a function of the
student's logits at the k tokens and of two logsumexps.
"""

from typing import Protocol

import torch

from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.teacher import TeacherTopK
from megatron_ext.losses.vocab_parallel import LOWEST

TAILS = ("renormalize", "bucket", "ignore")


class Comparison(Protocol):
    """A divergence of two distributions over a few outcomes, see Divergence."""

    def outcomes(self, log_teacher: torch.Tensor, log_student: torch.Tensor) -> torch.Tensor: ...

    def outcomes_gradient(
        self, log_teacher: torch.Tensor, log_student: torch.Tensor, complete: bool
    ) -> torch.Tensor: ...


class TopK:
    """One divergence over the k most likely tokens at one temperature."""

    def __init__(self, k: int, tail: str, temperature: float, comparison: Comparison) -> None:
        if k < 1:
            raise ValueError(f"top_k: {k} tokens are none; use 1 or more")
        if tail not in TAILS:
            raise ValueError(f"tail: {tail!r} is not known; use {', '.join(TAILS)}")
        self.k, self.tail, self.temperature, self._comparison = k, tail, temperature, comparison
        # of these, losses with the same k and temperature measure one
        self._key = f"top{k}@{temperature}"

    @property
    def statistics(self) -> frozenset[str]:
        # a cached teacher has no logits; where there are some, `measure` makes its denominator itself
        return frozenset({"logits"})

    def check(self, teacher: TeacherTopK) -> None:
        """Raises ValueError if a cached teacher was made for something else."""
        if teacher.temperature != self.temperature:
            raise ValueError(
                f"temperature: the loss has {self.temperature}, the cached teacher {teacher.temperature}; use the same"
            )
        if teacher.ids.size(-1) != self.k:
            raise ValueError(f"top_k: the loss has {self.k}, the cached teacher {teacher.ids.size(-1)}; use the same")

    # ---------------------------------------------------------------------------------------------- measure

    def measure(self, tokens: TokenStatistics, cached: TeacherTopK | None) -> dict[str, torch.Tensor]:
        """ids [tokens, k], the teacher's log-probabilities and log tail, the student's logits / T and denominators.

        Two collectives with logits of the teacher, one without.
        """
        if f"{self._key}:ids" in tokens.measured:
            return {}
        if self.k > tokens.shard.vocab_size:
            raise ValueError(f"top_k: {self.k} is larger than the vocabulary of {tokens.shard.vocab_size}; use less")
        if cached is None:
            ids, values, denominator = self._teacher_top(tokens)
            log_teacher = values - denominator[:, None]
        else:
            ids, log_teacher, denominator = cached.ids, cached.log_probabilities, None
        columns, held = self._locate(ids, tokens)

        # [tokens, k + 3]: student logits at the ids, then logsumexps as exponentials' sums
        width = tokens.logits.size(1)
        student = tokens.logits / self.temperature
        picked = torch.where(held, student.gather(1, columns), 0.0) if width else torch.zeros_like(log_teacher)
        local = [_rest(student, columns, held, with_all=True)]
        if denominator is not None:
            local.append(_rest(tokens.teacher_logits / self.temperature, columns, held, with_all=False))
        sums, logs = picked, torch.cat(local, dim=1)
        gathered, _ = tokens.shard.all_gather(torch.cat((sums, logs), dim=1))
        picked = gathered[..., : self.k].sum(dim=0)
        logs = gathered[..., self.k :].logsumexp(dim=0)  # [tokens, 2 or 3]
        log_tail = logs[:, 2] - denominator if denominator is not None else cached.log_tail
        found = {"ids": ids, "log_teacher": log_teacher, "log_tail": log_tail, "student": picked}
        found |= {"student_all": logs[:, 0], "student_rest": logs[:, 1]}
        return {f"{self._key}:{name}": value for name, value in found.items()}

    def _teacher_top(self, tokens: TokenStatistics) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids and logits / T [tokens, k] of the teacher over the whole vocabulary, and its denominator [tokens]."""
        teacher = tokens.teacher_logits / self.temperature
        count = min(self.k, teacher.size(1))
        values, index = teacher.topk(count, dim=1) if count else (teacher[:, :0], teacher[:, :0].long())
        missing = self.k - count  # a rank with fewer columns fills up
        values = torch.nn.functional.pad(values, (0, missing), value=LOWEST)
        ids = torch.nn.functional.pad(index + tokens.first_column, (0, missing)).float()  # exact below 2**24
        denominator = teacher.logsumexp(dim=1) if teacher.size(1) else torch.full_like(values[:, 0], LOWEST)
        gathered, _ = tokens.shard.all_gather(torch.cat((values, ids, denominator[:, None]), dim=1))
        values, ids, denominators = gathered.split((self.k, self.k, 1), dim=2)  # [tp, tokens, ...]
        best, order = values.transpose(0, 1).flatten(1).topk(self.k, dim=1)
        ids = ids.transpose(0, 1).flatten(1).gather(1, order).long()
        return ids, best, denominators.squeeze(2).logsumexp(dim=0)

    @staticmethod
    def _locate(ids: torch.Tensor, tokens: TokenStatistics) -> tuple[torch.Tensor, torch.Tensor]:
        """Columns of the ids on this rank, and whether it holds them; [tokens, k] both."""
        columns = ids - tokens.first_column
        held = (columns >= 0) & (columns < tokens.logits.size(1))
        return columns.masked_fill(~held, 0), held

    # --------------------------------------------------------------------------------------- value, gradient

    def _part(self, tokens: TokenStatistics, name: str) -> torch.Tensor:
        return tokens.measured[f"{self._key}:{name}"]

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        """[tokens]"""
        return self._comparison.outcomes(*self._distributions(tokens))

    def _distributions(self, tokens: TokenStatistics) -> tuple[torch.Tensor, torch.Tensor]:
        """log p and log q, [tokens, k] or with the tail in a bucket [tokens, k + 1]."""
        student_all = self._part(tokens, "student_all")
        log_student = self._part(tokens, "student") - student_all[:, None]
        log_teacher = self._part(tokens, "log_teacher")
        if self.tail == "renormalize":
            return log_teacher.log_softmax(dim=1), log_student.log_softmax(dim=1)
        if self.tail == "bucket":
            rest = self._part(tokens, "student_rest") - student_all
            log_student = torch.cat((log_student, rest[:, None]), dim=1)
            log_teacher = torch.cat((log_teacher, self._part(tokens, "log_tail")[:, None]), dim=1)
        return log_teacher, log_student

    def add_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor, gradient: torch.Tensor) -> None:
        """See TokenLoss.add_gradient."""
        log_teacher, log_student = self._distributions(tokens)
        of_outcomes = self._comparison.outcomes_gradient(log_teacher, log_student, complete=self.tail != "ignore")
        of_outcomes = of_outcomes * (upstream / self.temperature)[:, None]
        # the outcomes' denominator: of the k tokens alone, or of the whole vocabulary
        of_outcomes = of_outcomes - log_student.exp() * of_outcomes.sum(dim=1, keepdim=True)
        columns, held = self._locate(self._part(tokens, "ids"), tokens)
        if self.tail == "renormalize":
            gradient.scatter_add_(1, columns, torch.where(held, of_outcomes, 0.0))
            return
        logits = tokens.logits / self.temperature
        if self.tail == "bucket":
            # the bucket's share goes to its tokens as the softmax over them; no logit of theirs is above its logsumexp
            shares = (logits - self._part(tokens, "student_rest")[:, None]).clamp_(max=0.0).exp_()
            total = of_outcomes[:, -1]
        else:
            # tokens outside count in the denominator only
            shares = (logits - self._part(tokens, "student_all")[:, None]).exp_()
            sums = self._comparison.outcomes_gradient(log_teacher, log_student, complete=False).sum(dim=1)
            total = -sums * upstream / self.temperature
        # the k tokens are no part of the rest: set to 0, as a difference of the two would lose all digits
        outside = torch.where(held, 0.0, torch.inf).to(shares.dtype)
        shares.scatter_reduce_(1, columns, outside, reduce="amin").mul_(total[:, None])
        shares.scatter_add_(1, columns, torch.where(held, of_outcomes[:, : self.k], 0.0))
        gradient.add_(shares)


def _rest(logits: torch.Tensor, columns: torch.Tensor, held: torch.Tensor, *, with_all: bool) -> torch.Tensor:
    """[tokens, 1 or 2]: log sum exp of all columns (if asked for), and of those that are not among `columns`."""
    if logits.size(1) == 0:
        return torch.full((len(logits), 2 if with_all else 1), LOWEST, device=logits.device)
    parts = [logits.logsumexp(dim=1)] if with_all else []
    # columns of other ranks point to column 0: minimum leaves it as it is there
    chosen = torch.where(held, LOWEST, torch.inf).to(logits.dtype)
    others = logits.scatter_reduce(1, columns, chosen, reduce="amin")
    return torch.stack([*parts, others.logsumexp(dim=1).clamp(min=LOWEST)], dim=1)
