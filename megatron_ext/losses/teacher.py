"""What is known of a teacher, and the statistics that compare its distribution with the student's.

All of them are sums over columns, so they are measured in the same pass as the student's softmax and exchanged in the
same collective. Names with @T hold at the temperature T, which divides both sides' logits.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from megatron_ext.losses import looking
from megatron_ext.losses.logits import LogitTransform
from megatron_ext.losses.vocab_parallel import LOWEST

# Below any real logit: makes a probability of exactly 0, and no infinity to multiply it by.
_NO_LOGIT = -1e30


@dataclass(frozen=True)
class TeacherHidden:
    """A teacher by its last hidden states; its logits exist one chunk at a time, beside the student's.

    hidden: [tokens, h] or [s, b, h], any float type; [s/tp, b, h] under sequence parallelism. As the student's.
    weight: [vocab/tp, h] its output weight, with as many rows as the student's.
    transform: its softcap and scale.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    transform: LogitTransform | None = None


@dataclass(frozen=True)
class TeacherTopK:
    """A teacher by its k most likely tokens, as a cache keeps them.

    ids: [*labels' shape, k] int64, most likely first.
    log_probabilities: [*labels' shape, k] fp32, at `temperature`.
    log_tail: [*labels' shape] fp32, logarithm of what all other tokens have together.
    """

    ids: torch.Tensor
    log_probabilities: torch.Tensor
    log_tail: torch.Tensor
    temperature: float = 1.0

    def flatten(self) -> "TeacherTopK":
        return TeacherTopK(
            self.ids.flatten(0, -2), self.log_probabilities.flatten(0, -2), self.log_tail.flatten(), self.temperature
        )

    def select(self, tokens: torch.Tensor | slice) -> "TeacherTopK":
        """Of some tokens, once flattened."""
        return TeacherTopK(self.ids[tokens], self.log_probabilities[tokens], self.log_tail[tokens], self.temperature)


Teacher = TeacherHidden | TeacherTopK


class TeacherStatistics:
    """Measures and combines what `wanted` names: logsumexp@T, teacher_logsumexp@T, forward_kl@T = KL(teacher ||
    student), reverse_kl@T = KL(student || teacher), teacher_entropy (at temperature 1), teacher_agreement.
    """

    def __init__(self, wanted: Iterable[str]) -> None:
        wanted = set(wanted)
        self.entropy = "teacher_entropy" in wanted
        self.agreement = "teacher_agreement" in wanted
        temperatures = {float(name.split("@")[1]) for name in wanted if "@" in name} | (
            {1.0} if self.entropy else set()
        )
        # 1 comes last: its exponentials are made in the logits' place
        self.temperatures = sorted(temperatures, key=lambda temperature: (temperature == 1.0, temperature))
        self.forward = [t for t in self.temperatures if f"forward_kl@{t}" in wanted]
        self.reverse = [t for t in self.temperatures if f"reverse_kl@{t}" in wanted]

    @property
    def partials(self) -> list[str]:
        """Rows of the table of partial results, in addition to the student's own."""
        if not (self.temperatures or self.agreement):
            return []
        return [
            "teacher_maximum",
            *(f"teacher_denominator@{t}" for t in self.temperatures),
            *(f"student_denominator@{t}" for t in self.temperatures if t != 1.0),  # 1 is the student's own pass
            *(f"forward@{t}" for t in self.forward),
            *(f"reverse@{t}" for t in self.reverse),
            *(["teacher_weighted"] if self.entropy else []),
            *(["student_at_best"] if self.agreement else []),
        ]

    def measure(
        self,
        student: torch.Tensor,
        teacher: torch.Tensor,
        row: dict[str, torch.Tensor],
        scratch: Callable[[str], torch.Tensor],
    ) -> None:
        """Fill in the rows.

        Args:
            student: [rows, columns] fp32 logits less row["maximum"]; read only.
            teacher: [rows, columns] fp32 logits; replaced by exp(logits - teacher_maximum) if 1 is a temperature.
            scratch: gives memory [rows, columns] fp32 by name.
        """
        if self.agreement:
            maximum, best = teacher.max(dim=1)
            row["student_at_best"].copy_(student.gather(1, best[:, None]).squeeze(1) + row["maximum"])
        else:
            maximum = teacher.amax(dim=1)
        maximum = maximum.clamp_(min=LOWEST)  # as the student's
        row["teacher_maximum"].copy_(maximum)
        teacher.sub_(maximum[:, None])
        # for 0 * -inf; it costs less to look whether there was one
        looks = looking.is_free(teacher) and not self.entropy and not self.reverse
        if not looks:
            teacher.clamp_(min=_NO_LOGIT)
        for t in self.temperatures:
            if t in self.forward or t in self.reverse:
                gap = torch.sub(teacher, student, out=scratch("gap"))
            if t != 1.0 or t in self.reverse:
                exponentials = _exponentials(student, t, scratch("exponentials"))
                if t != 1.0:
                    torch.sum(exponentials, dim=1, out=row[f"student_denominator@{t}"])
                if t in self.reverse:
                    torch.sum(exponentials.mul_(gap), dim=1, out=row[f"reverse@{t}"]).div_(-t)
            if t != 1.0:
                exponentials = _exponentials(teacher, t, scratch("exponentials"))
            elif self.entropy:
                exponentials = _exponentials(teacher, t, scratch("exponentials"))
                torch.sum(teacher.mul_(exponentials), dim=1, out=row["teacher_weighted"])
                exponentials = teacher.copy_(exponentials)
            else:
                exponentials = teacher.exp_()
            torch.sum(exponentials, dim=1, out=row[f"teacher_denominator@{t}"])
            if t in self.forward:
                total = gap.mul_(exponentials).sum(dim=1)
                if looks and total.isnan().any():
                    total = torch.where(exponentials > 0, gap, 0.0).sum(dim=1)
                row[f"forward@{t}"].copy_(total).div_(t)

    def combine(self, part: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Statistics over the whole vocabulary, from every rank's partial results, [tp, tokens] each."""
        if not self.partials:
            return {}
        student_maximum, teacher_maximum = part["maximum"].amax(dim=0), part["teacher_maximum"].amax(dim=0)
        student_shift, teacher_shift = part["maximum"] - student_maximum, part["teacher_maximum"] - teacher_maximum
        measured = {}
        for t in self.temperatures:
            student_share, teacher_share = (student_shift / t).exp(), (teacher_shift / t).exp()
            student_sum = part["denominator" if t == 1.0 else f"student_denominator@{t}"]
            teacher_sum = part[f"teacher_denominator@{t}"]
            student_total = (student_share * student_sum).sum(dim=0)
            teacher_total = (teacher_share * teacher_sum).sum(dim=0)
            measured[f"logsumexp@{t}"] = student_maximum / t + student_total.log()
            measured[f"teacher_logsumexp@{t}"] = teacher_maximum / t + teacher_total.log()
            offset = student_total.log() - teacher_total.log()
            # each rank measured relative to its own maxima
            shift = (teacher_shift - student_shift) / t
            if t in self.forward:
                sums = part[f"forward@{t}"] + shift * teacher_sum
                measured[f"forward_kl@{t}"] = (teacher_share * sums).sum(dim=0) / teacher_total + offset
            if t in self.reverse:
                sums = part[f"reverse@{t}"] - shift * student_sum
                measured[f"reverse_kl@{t}"] = (student_share * sums).sum(dim=0) / student_total - offset
        if self.entropy:
            share = teacher_shift.exp()
            sums = part["teacher_denominator@1.0"]
            total = (share * sums).sum(dim=0)
            weighted = part["teacher_weighted"] + teacher_shift * sums
            measured["teacher_entropy"] = total.log() - (share * weighted).sum(dim=0) / total
        if self.agreement:
            best_rank = part["teacher_maximum"].argmax(dim=0, keepdim=True)
            student = part["student_at_best"].gather(0, best_rank).squeeze(0)
            measured["teacher_agreement"] = (student >= student_maximum).float()
        return measured


def _exponentials(logits: torch.Tensor, temperature: float, out: torch.Tensor) -> torch.Tensor:
    """exp(logits / T)."""
    return torch.exp(logits, out=out) if temperature == 1.0 else torch.div(logits, temperature, out=out).exp_()
