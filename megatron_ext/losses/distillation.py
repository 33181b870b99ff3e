"""Divergences between a teacher's distribution p and the student's q, over the whole vocabulary.

Both are softmaxes of logits divided by the temperature T. With d = log q - log p, per token:

    type         value                                                     d value / d student logits
    forward_kl   KL(p || q)                                                (q - p) / T
    reverse_kl   KL(q || p)                                                q (d - KL(q || p)) / T
    jsd          beta KL(p || m) + (1 - beta) KL(q || m),                  (1 - beta) q (log q - log m - KL(q || m)) / T
                 m = beta p + (1 - beta) q

(Hinton et al. 2015 for the temperature; Agarwal et al. 2024, "On-policy distillation", for the generalised JSD.) With
scale_by_temperature_squared both are multiplied by T^2, which keeps the gradient's size when T changes. What restricts
them to a teacher's most likely tokens is in `top_k`.
"""

import math
from abc import abstractmethod

import torch

from megatron_ext.losses.base import TokenLoss, register_loss
from megatron_ext.losses.statistics import TokenStatistics
from megatron_ext.losses.teacher import TeacherTopK
from megatron_ext.losses.top_k import TopK

# exp of more is beyond what fp32 can tell from 0 beside the other term
_LARGEST_GAP = 80.0


class Divergence(TokenLoss):
    """What the divergences share.

    Args:
        temperature: divides both sides' logits.
        scale_by_temperature_squared: multiply value and gradient by T^2.
        top_k: compare over the teacher's k most likely tokens only; None for the whole vocabulary.
        tail: with top_k, what becomes of all other tokens: "bucket" makes them one more outcome, "renormalize" takes
            both sides' distributions over the k tokens alone, "ignore" leaves their terms out of the sum.
    """

    has_gradient = True
    needs_teacher = True

    def __init__(
        self,
        temperature: float = 1.0,
        scale_by_temperature_squared: bool = False,
        top_k: int | None = None,
        tail: str | None = None,
    ) -> None:
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature: {temperature} is not positive; use a number above 0")
        if (top_k is None) != (tail is None):
            raise ValueError(f"top_k is {top_k} and tail {tail}; give both, or neither for the whole vocabulary")
        self.temperature = float(temperature)
        self.factor = self.temperature**2 if scale_by_temperature_squared else 1.0
        self.top_k = None if top_k is None or tail is None else TopK(top_k, tail, self.temperature, self)
        self.statistics = self.top_k.statistics if self.top_k else frozenset(self.full_statistics())

    @abstractmethod
    def full_statistics(self) -> set[str]:
        """What the value over the whole vocabulary reads. One name with @T brings both sides' logsumexp@T."""

    @abstractmethod
    def full_value(self, tokens: TokenStatistics) -> torch.Tensor:
        """[tokens] over the whole vocabulary."""

    @abstractmethod
    def full_gradient(
        self, tokens: TokenStatistics, log_student: torch.Tensor, log_teacher: torch.Tensor
    ) -> torch.Tensor:
        """[tokens, columns]: T times the derivative, in memory that may be overwritten."""

    @abstractmethod
    def outcomes(self, log_teacher: torch.Tensor, log_student: torch.Tensor) -> torch.Tensor:
        """[tokens] of two distributions [tokens, outcomes]."""

    @abstractmethod
    def outcomes_gradient(self, log_teacher: torch.Tensor, log_student: torch.Tensor, complete: bool) -> torch.Tensor:
        """[tokens, outcomes] with respect to log_student. What is the same multiple of q for every outcome may be
        left out where the distributions are complete: it cancels, and would only cost digits.
        """

    def second_pass(self, tokens: TokenStatistics, top_k: TeacherTopK | None) -> dict[str, torch.Tensor]:
        return self.top_k.measure(tokens, top_k) if self.top_k else {}

    def value(self, tokens: TokenStatistics) -> torch.Tensor:
        return self.factor * (self.top_k.value(tokens) if self.top_k else self.full_value(tokens))

    def add_gradient(self, tokens: TokenStatistics, upstream: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.top_k:
            self.top_k.add_gradient(tokens, self.factor * upstream, gradient)
            return
        log_student, log_teacher = log_probabilities(tokens, self.temperature)
        own = self.full_gradient(tokens, log_student, log_teacher)
        gradient.add_(own.mul_((upstream * (self.factor / self.temperature))[:, None]))

    def check_top_k(self, teacher: TeacherTopK) -> None:
        if self.top_k is None:
            super().check_top_k(teacher)
        else:
            self.top_k.check(teacher)


def log_probabilities(tokens: TokenStatistics, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, columns] fp32 of the student and of the teacher, in memory of their own."""
    student, teacher = (
        torch.sub(logits / temperature if temperature != 1.0 else logits, tokens.measured[name][:, None])
        for logits, name in (
            (tokens.logits, f"logsumexp@{temperature}"),
            (tokens.teacher_logits, f"teacher_logsumexp@{temperature}"),
        )
    )
    return student, teacher


@register_loss("forward_kl")
class ForwardKL(Divergence):
    """KL(teacher || student): the student covers all that the teacher finds likely."""

    def full_statistics(self) -> set[str]:
        return {f"forward_kl@{self.temperature}"}

    def full_value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.measured[f"forward_kl@{self.temperature}"]

    def full_gradient(
        self, tokens: TokenStatistics, log_student: torch.Tensor, log_teacher: torch.Tensor
    ) -> torch.Tensor:
        return log_student.exp_().sub_(log_teacher.exp_())

    def outcomes(self, log_teacher: torch.Tensor, log_student: torch.Tensor) -> torch.Tensor:
        return (log_teacher.exp() * (log_teacher - log_student)).sum(dim=-1)

    def outcomes_gradient(self, log_teacher: torch.Tensor, log_student: torch.Tensor, complete: bool) -> torch.Tensor:
        return -log_teacher.exp()


@register_loss("reverse_kl")
class ReverseKL(Divergence):
    """KL(student || teacher): the student keeps away from what the teacher finds unlikely."""

    def full_statistics(self) -> set[str]:
        return {f"reverse_kl@{self.temperature}"}

    def full_value(self, tokens: TokenStatistics) -> torch.Tensor:
        return tokens.measured[f"reverse_kl@{self.temperature}"]

    def full_gradient(
        self, tokens: TokenStatistics, log_student: torch.Tensor, log_teacher: torch.Tensor
    ) -> torch.Tensor:
        gap = torch.sub(log_student, log_teacher, out=log_teacher)
        gap.sub_(tokens.measured[f"reverse_kl@{self.temperature}"][:, None])
        return gap.mul_(log_student.exp_())

    def outcomes(self, log_teacher: torch.Tensor, log_student: torch.Tensor) -> torch.Tensor:
        return (log_student.exp() * (log_student - log_teacher)).sum(dim=-1)

    def outcomes_gradient(self, log_teacher: torch.Tensor, log_student: torch.Tensor, complete: bool) -> torch.Tensor:
        return log_student.exp() * (log_student - log_teacher + (0.0 if complete else 1.0))


@register_loss("jsd")
class JSD(Divergence):
    """The generalised Jensen-Shannon divergence: forward-like for a small beta, reverse-like for a large one."""

    def __init__(
        self,
        beta: float = 0.5,
        temperature: float = 1.0,
        scale_by_temperature_squared: bool = False,
        top_k: int | None = None,
        tail: str | None = None,
    ) -> None:
        if not 0 < beta < 1:
            raise ValueError(
                f"beta: {beta} is not between 0 and 1; the limits are losses of their own: use forward_kl or reverse_kl"
            )
        self.log_beta, self.log_rest = math.log(beta), math.log1p(-beta)
        self.beta = beta
        super().__init__(temperature, scale_by_temperature_squared, top_k, tail)

    @property
    def _student_part(self) -> str:
        return f"student_to_mixture@{self.temperature}@{self.beta}"

    @property
    def _teacher_part(self) -> str:
        return f"teacher_to_mixture@{self.temperature}@{self.beta}"

    def full_statistics(self) -> set[str]:
        return {"logits", f"logsumexp@{self.temperature}"}

    def _gap(self, log_student: torch.Tensor, log_teacher: torch.Tensor) -> torch.Tensor:
        return (log_student - log_teacher).clamp_(-_LARGEST_GAP, _LARGEST_GAP)

    def _student_to_mixture(self, gap: torch.Tensor) -> torch.Tensor:
        """log q - log m, from the gap log q - log p: in log space, where neither underflows, and without a difference
        of large numbers."""
        return torch.logaddexp(self.log_beta - gap, gap.new_full((), self.log_rest)).neg_()

    def _teacher_to_mixture(self, gap: torch.Tensor) -> torch.Tensor:
        """log p - log m."""
        return torch.logaddexp(self.log_rest + gap, gap.new_full((), self.log_beta)).neg_()

    def second_pass(self, tokens: TokenStatistics, top_k: TeacherTopK | None) -> dict[str, torch.Tensor]:
        if self.top_k:
            return super().second_pass(tokens, top_k)
        sums = torch.zeros(2, len(tokens.labels), dtype=torch.float32, device=tokens.labels.device)
        for rows, part in tokens.blocks():
            log_student, log_teacher = log_probabilities(part, self.temperature)
            gap = self._gap(log_student, log_teacher)
            sums[0, rows] = self._student_to_mixture(gap).mul_(log_student.exp_()).sum(dim=1)
            sums[1, rows] = self._teacher_to_mixture(gap).mul_(log_teacher.exp_()).sum(dim=1)
        tokens.shard.all_reduce(sums)
        return {self._student_part: sums[0], self._teacher_part: sums[1]}

    def full_value(self, tokens: TokenStatistics) -> torch.Tensor:
        student, teacher = tokens.measured[self._student_part], tokens.measured[self._teacher_part]
        return self.beta * teacher + (1.0 - self.beta) * student

    def full_gradient(
        self, tokens: TokenStatistics, log_student: torch.Tensor, log_teacher: torch.Tensor
    ) -> torch.Tensor:
        student = self._student_to_mixture(self._gap(log_student, log_teacher))
        student.sub_(tokens.measured[self._student_part][:, None])
        return student.mul_(log_student.exp_()).mul_(1.0 - self.beta)

    def outcomes(self, log_teacher: torch.Tensor, log_student: torch.Tensor) -> torch.Tensor:
        gap = self._gap(log_student, log_teacher)
        student, teacher = self._student_to_mixture(gap), self._teacher_to_mixture(gap)
        terms = self.beta * log_teacher.exp() * teacher + (1.0 - self.beta) * log_student.exp() * student
        return terms.sum(dim=-1)

    def outcomes_gradient(self, log_teacher: torch.Tensor, log_student: torch.Tensor, complete: bool) -> torch.Tensor:
        # what log m contributes cancels, complete or not: d/dq (beta p log p + (1 - beta) q log q - m log m)
        student = self._student_to_mixture(self._gap(log_student, log_teacher))
        return (1.0 - self.beta) * log_student.exp() * student
