"""The contenders of scripts/bench_distillation.py: forward KL from a teacher's hidden states, with gradients.

Their teacher is as wide as the student. All compute sum_t w_t KL(teacher || student)_t, except the chunked JSD, which
is what TRL computes, of the same tokens.
"""

from functools import cache

import torch
from loss_head_contenders import Contender, Inputs, make_inputs
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

JSD_CHUNK = 256


@cache
def _teacher(tokens: int, width: int, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [tokens, h] and weight [vocab, h]; made once in each process, as inputs are."""
    from loss_head_contenders import Shape

    other = make_inputs(Shape(tokens, width, vocab), dtype, seed=1)
    return other.hidden.detach(), other.weight.detach()


def teacher_of(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    return _teacher(*inputs.hidden.shape, len(inputs.weight), inputs.hidden.dtype)


def floor_training(inputs: Inputs) -> None:
    """Three products of the student, one of the teacher."""
    teacher_hidden, teacher_weight = teacher_of(inputs)
    with torch.no_grad():
        hidden, weight = inputs.hidden, inputs.weight
        logits = hidden @ weight.t()
        teacher_hidden @ teacher_weight.t()
        hidden.grad = logits @ weight
        weight.grad = logits.t() @ hidden


def floor_forward(inputs: Inputs) -> torch.Tensor:
    teacher_hidden, teacher_weight = teacher_of(inputs)
    teacher_hidden @ teacher_weight.t()
    return inputs.hidden @ inputs.weight.t()


def _dense(hidden: torch.Tensor, weight: torch.Tensor, inputs: Inputs, tokens: slice) -> torch.Tensor:
    teacher_hidden, teacher_weight = teacher_of(inputs)
    student = F.log_softmax((hidden @ weight.t()).float(), dim=-1)
    teacher = F.log_softmax((teacher_hidden[tokens] @ teacher_weight.t()).float(), dim=-1)
    return F.kl_div(student, teacher, reduction="none", log_target=True).sum(-1)


def dense_forward(inputs: Inputs) -> torch.Tensor:
    return _dense(inputs.hidden, inputs.weight, inputs, slice(None))


def dense_training(inputs: Inputs) -> torch.Tensor:
    loss = (dense_forward(inputs) * inputs.token_weights).sum()
    loss.backward()
    return loss.detach()


def _chunk_jsd(hidden: torch.Tensor, weight: torch.Tensor, teacher: torch.Tensor, teacher_weight: torch.Tensor):
    """Generalised JSD at beta 0.5 in log space, both logits made in the chunk."""
    student = F.log_softmax((hidden @ weight.t()).float(), dim=-1)
    target = F.log_softmax((teacher @ teacher_weight.t()).float(), dim=-1)
    mixture = torch.logsumexp(torch.stack((student, target)), dim=0) - torch.log(torch.tensor(2.0))
    parts = (F.kl_div(mixture, side, reduction="none", log_target=True).sum(-1) for side in (student, target))
    return 0.5 * sum(parts)


def jsd_training(inputs: Inputs) -> torch.Tensor:
    teacher_hidden, teacher_weight = teacher_of(inputs)
    losses = [
        checkpoint(_chunk_jsd, hidden, inputs.weight, teacher, teacher_weight, use_reentrant=False)
        for hidden, teacher in zip(inputs.hidden.split(JSD_CHUNK), teacher_hidden.split(JSD_CHUNK), strict=True)
    ]
    loss = (torch.cat(losses) * inputs.token_weights).sum()
    loss.backward()
    return loss.detach()


def _ours(inputs: Inputs, token_weights: torch.Tensor | None):
    from megatron_ext.losses import ForwardKL, TeacherHidden, VocabShard, linear_losses

    return linear_losses(
        inputs.hidden,
        inputs.weight,
        inputs.labels,
        {"kl": ForwardKL()},
        shard=VocabShard(None, len(inputs.weight)),
        token_weights=token_weights,
        teacher=TeacherHidden(*teacher_of(inputs)),
    )


def ours_training(inputs: Inputs) -> torch.Tensor:
    total = _ours(inputs, inputs.token_weights).total
    total.backward()
    return total.detach()


def ours_forward(inputs: Inputs) -> torch.Tensor:
    return _ours(inputs, None).values[0]


_OWN = {"prepare": teacher_of}
DISTILLATION = {
    contender.name: contender
    for contender in (
        Contender("kl-floor", "the bare matrix products, 3 + 1", floor_training, floor_forward, has_loss=False, **_OWN),
        Contender("kl-ours", "megatron_ext forward_kl", ours_training, ours_forward, **_OWN),
        Contender("kl-dense", "both logits, log_softmax, kl_div", dense_training, dense_forward, **_OWN),
        Contender(
            "jsd-checkpoint",
            f"generalised JSD, a checkpoint per chunk of {JSD_CHUNK}, as TRL",
            jsd_training,
            None,
            **_OWN,
            has_token_weights=False,  # it is another loss: its figures are compared with nobody's
        ),
    )
}
