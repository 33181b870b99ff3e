"""From matrix products to the logits that losses see, the student's and a teacher's, block by block."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LogitTransform:
    """From the matrix product x to the logits the losses see: softcap * tanh(scale * x / softcap)."""

    scale: float = 1.0
    softcap: float | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"logit_scale: {self.scale} is not positive; use a number above 0")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"logit_softcap: {self.softcap} is not positive; use a number above 0, or none")

    @property
    def is_identity(self) -> bool:
        return self.softcap is None and self.scale == 1.0

    def apply_(self, product: torch.Tensor) -> torch.Tensor:
        """In place, on fp32."""
        if self.softcap is not None:
            return product.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap)
        return product.mul_(self.scale) if self.scale != 1.0 else product

    def apply(self, product: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """fp32 logits, in `out` (fp32, maybe the product itself); without it they may be the product's own memory, to
        be read only."""
        if out is None:
            return self.apply_(product.to(torch.float32, copy=not self.is_identity))
        return self.apply_(out if out is product else out.copy_(product))

    def derivative(self, logits: torch.Tensor) -> torch.Tensor | float:
        """d logits / d x, as a function of the logits."""
        if self.softcap is None:
            return self.scale
        return (logits / self.softcap).square_().neg_().add_(1.0).mul_(self.scale)


@dataclass(frozen=True)
class ChunkProducts:
    """The products of some tokens: this rank's real columns, in the type of the matrix product."""

    student: torch.Tensor  # [tokens, columns]
    transform: LogitTransform
    teacher: torch.Tensor | None = None  # [tokens, columns]
    teacher_transform: LogitTransform | None = None

    def rows(self, rows: slice) -> "ChunkProducts":
        teacher = None if self.teacher is None else self.teacher[rows]
        return ChunkProducts(self.student[rows], self.transform, teacher, self.teacher_transform)

    def logits(self) -> torch.Tensor:
        """[tokens, columns] fp32, to be read only."""
        return self.transform.apply(self.student)

    def teacher_logits(self) -> torch.Tensor:
        """[tokens, columns] fp32, to be read only."""
        assert self.teacher is not None, "a loss that compares with a teacher was given none"
        return (self.teacher_transform or LogitTransform()).apply(self.teacher)
