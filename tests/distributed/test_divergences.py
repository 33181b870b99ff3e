"""The distillation losses over a sharded vocabulary, against dense float64 formulas; shards of gradients are put
together before they are compared.
"""

from itertools import product
from typing import Any

import pytest
import torch

TOKENS, STUDENT_WIDTH, TEACHER_WIDTH, PADDED, VOCAB, TOP = 29, 16, 24, 48, 43, 5
KINDS = [("forward_kl", 0.5), ("reverse_kl", 0.5), ("jsd", 0.01), ("jsd", 0.5), ("jsd", 0.99)]
RESTRICTIONS = [(None, None), (TOP, "renormalize"), (TOP, "bucket"), (TOP, "ignore")]
CASES = list(product(KINDS, (1.0, 2.0), RESTRICTIONS))
WAYS = ("made in forward", "recomputed", "materialized")


def build(kind: str, beta: float, temperature: float, top_k: int | None, tail: str | None) -> Any:
    from megatron_ext.losses import JSD, ForwardKL, ReverseKL

    settings = {"temperature": temperature, "top_k": top_k, "tail": tail}
    if kind == "jsd":
        return JSD(beta, **settings)
    return {"forward_kl": ForwardKL, "reverse_kl": ReverseKL}[kind](scale_by_temperature_squared=True, **settings)


def inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(TOKENS, generator=generator)
    weights[::4] = 0.0
    return {
        "hidden": torch.randn(TOKENS, STUDENT_WIDTH, generator=generator),
        "weight": torch.randn(PADDED, STUDENT_WIDTH, generator=generator) * 0.5,
        "teacher_hidden": torch.randn(TOKENS, TEACHER_WIDTH, generator=generator),
        "teacher_weight": torch.randn(PADDED, TEACHER_WIDTH, generator=generator) * 0.4,
        "labels": torch.randint(0, VOCAB, (TOKENS,), generator=generator),
        "weights": weights,
        "upstream": torch.randn(TOKENS, generator=generator),
    }


def dense(
    z: torch.Tensor, teacher: torch.Tensor, kind: str, beta: float, temperature: float, top_k: int | None, tail: Any
) -> torch.Tensor:
    log_q, log_p = (z / temperature).log_softmax(1), (teacher / temperature).log_softmax(1)
    if top_k is not None:
        ids = log_p.topk(top_k, dim=1).indices
        outside = torch.ones_like(log_p, dtype=torch.bool).scatter(1, ids, False)
        tails = [(side.exp() * outside).sum(1, keepdim=True).log() for side in (log_q, log_p)]
        log_q, log_p = log_q.gather(1, ids), log_p.gather(1, ids)
        if tail == "renormalize":
            log_q, log_p = log_q - log_q.logsumexp(1, keepdim=True), log_p - log_p.logsumexp(1, keepdim=True)
        elif tail == "bucket":
            log_q, log_p = torch.cat((log_q, tails[0]), 1), torch.cat((log_p, tails[1]), 1)
    p, q = log_p.exp(), log_q.exp()
    if kind == "forward_kl":
        return temperature**2 * (p * (log_p - log_q)).sum(1)
    if kind == "reverse_kl":
        return temperature**2 * (q * (log_q - log_p)).sum(1)
    log_m = (beta * p + (1 - beta) * q).log()
    return beta * (p * (log_p - log_m)).sum(1) + (1 - beta) * (q * (log_q - log_m)).sum(1)


def on_ranks(tensors: dict[str, torch.Tensor], cases: list, chunk_tokens: int) -> list[dict[str, torch.Tensor]]:
    """Of every case and way: values, the hidden's gradient and this rank's shard of the weight's."""
    import torch.distributed as dist

    from megatron_ext.losses import TeacherHidden, VocabShard, linear_losses, logits_losses

    group = dist.group.WORLD
    shard = VocabShard(group, VOCAB)
    rows = PADDED // group.size()
    own = slice(group.rank() * rows, (group.rank() + 1) * rows)
    teacher = TeacherHidden(tensors["teacher_hidden"], tensors["teacher_weight"][own])
    labels, weights, upstream = tensors["labels"], tensors["weights"], tensors["upstream"]
    answers = []
    for (kind, beta), temperature, (top_k, tail) in cases:
        losses = {"kl": build(kind, beta, temperature, top_k, tail)}
        for way in WAYS:
            hidden = tensors["hidden"].clone().requires_grad_()
            weight = tensors["weight"][own].clone().requires_grad_()
            arguments = {"shard": shard, "chunk_tokens": chunk_tokens, "teacher": teacher}
            if way == "made in forward":
                result = linear_losses(hidden, weight, labels, losses, token_weights=weights, **arguments)
                values = result.values[0]
                result.total.backward(torch.tensor(3.0))
            elif way == "recomputed":
                values = linear_losses(hidden, weight, labels, losses, **arguments).values[0]
                values.backward(upstream)
            else:
                logits = hidden @ weight.t()
                teacher_logits = teacher.hidden @ teacher.weight.t()
                values = logits_losses(logits, labels, losses, shard=shard, teacher=teacher_logits)[0]
                values.backward(upstream)
                dist.all_reduce(hidden.grad, group=group)  # what Megatron's layer does in its backward
            answers.append({"values": values.detach(), "hidden": hidden.grad, "weight": weight.grad})
    return answers


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("chunk_tokens", [7, 100])
def test_value_and_gradient(ranks, world_size: int, chunk_tokens: int) -> None:
    tensors = inputs()
    by_rank = ranks.run(world_size, on_ranks, tensors, CASES, chunk_tokens)
    for index, ((case, way), *answers) in enumerate(zip(product(CASES, WAYS), *by_rank, strict=True)):
        del index
        (kind, beta), temperature, (top_k, tail) = case
        hidden = tensors["hidden"].double().requires_grad_()
        weight = tensors["weight"].double().requires_grad_()
        teacher = tensors["teacher_hidden"].double() @ tensors["teacher_weight"].double()[:VOCAB].t()
        expected = dense(hidden @ weight[:VOCAB].t(), teacher, kind, beta, temperature, top_k, tail)
        weights = 3.0 * tensors["weights"] if way == "made in forward" else tensors["upstream"]
        expected.backward(weights.double())
        computed = tensors["weights"] != 0 if way == "made in forward" else torch.ones(TOKENS, dtype=torch.bool)
        found_weight = torch.cat([answer["weight"] for answer in answers])
        label = f"{case} {way}"
        assert not found_weight[VOCAB:].any(), f"{label}: padding has a gradient"
        for answer in answers:
            error = (answer["values"].double() - expected.detach())[computed].abs().max()
            assert error < 1e-5, f"{label}: values are off by {error:.1e}"
            relative = (answer["values"].double() - expected.detach())[computed].norm() / expected[computed].norm()
            assert relative < 2e-6, f"{label}: values are off by {relative:.1e}"
            assert (answer["hidden"].double() - hidden.grad).norm() < 1e-5 * hidden.grad.norm(), label
        assert (found_weight.double() - weight.grad).norm() < 1e-5 * weight.grad.norm(), label


def equal_models(tensors: dict[str, torch.Tensor], cases: list) -> list[tuple[float, float]]:
    import torch.distributed as dist

    from megatron_ext.losses import TeacherHidden, VocabShard, linear_losses

    group = dist.group.WORLD
    rows = PADDED // group.size()
    own = slice(group.rank() * rows, (group.rank() + 1) * rows)
    answers = []
    for (kind, beta), temperature, (top_k, tail) in cases:
        hidden = tensors["hidden"].clone().requires_grad_()
        weight = tensors["weight"][own].clone().requires_grad_()
        result = linear_losses(
            hidden,
            weight,
            tensors["labels"],
            {"kl": build(kind, beta, temperature, top_k, tail)},
            shard=VocabShard(group, VOCAB),
            token_weights=tensors["weights"],
            teacher=TeacherHidden(tensors["hidden"], tensors["weight"][own]),
        )
        result.total.backward()
        answers.append((result.values.abs().max().item(), max(hidden.grad.abs().max(), weight.grad.abs().max()).item()))
    return answers


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_teacher_that_is_the_student(ranks, world_size: int) -> None:
    cases = [case for case in CASES if case[2][1] != "ignore"]
    for answers in ranks.run(world_size, equal_models, inputs(), cases):
        for case, (value, gradient) in zip(cases, answers, strict=True):
            assert value < 2e-6 * case[1] ** 2, f"{case}: {value}"
            assert gradient < 2e-5, f"{case}: {gradient}"


def impossible_teacher_tokens(_: None = None) -> dict[str, bool]:
    """-inf among the teacher's logits: probabilities of 0, to be kept out of products."""
    from megatron_ext.losses import VocabShard, logits_losses

    torch.manual_seed(0)
    teacher = torch.randn(6, 20)
    teacher[:, ::3] = -torch.inf
    labels = torch.zeros(6, dtype=torch.int64)
    finite = {}
    for (kind, beta), temperature, (top_k, tail) in CASES:
        if kind == "reverse_kl":
            continue  # infinite, as it should be
        logits = torch.randn(6, 20, requires_grad=True)
        values = logits_losses(
            logits,
            labels,
            {"kl": build(kind, beta, temperature, top_k, tail)},
            shard=VocabShard(None, 20),
            teacher=teacher,
        )
        values.sum().backward()
        q, p = (logits.detach() / temperature).double().log_softmax(1), (teacher / temperature).double().log_softmax(1)
        expected = None
        if top_k is None and kind == "forward_kl":
            expected = temperature**2 * torch.where(p.isfinite(), p.exp() * (p - q), 0.0).sum(1)
        elif top_k is None:
            m = (beta * p.exp() + (1 - beta) * q.exp()).log()
            expected = torch.where(p.isfinite(), beta * p.exp() * (p - m), 0.0).sum(1)
            expected = expected + (1 - beta) * (q.exp() * (q - m)).sum(1)
        matches = expected is None or torch.allclose(values[0].double(), expected, rtol=1e-5, atol=1e-6)
        finite[f"{kind} {beta} {temperature} {top_k} {tail}"] = bool(
            values.isfinite().all() and logits.grad.isfinite().all() and matches
        )
    return finite


def test_teacher_logits_of_minus_infinity() -> None:
    wrong = [case for case, is_fine in impossible_teacher_tokens().items() if not is_fine]
    assert not wrong


def cached(tensors: dict[str, torch.Tensor]) -> list[float]:
    """Losses with a cache's tokens against the same losses with the teacher itself."""
    import torch.distributed as dist

    from megatron_ext.losses import TeacherHidden, TeacherTopK, VocabShard, linear_losses

    group = dist.group.WORLD
    rows = PADDED // group.size()
    own = slice(group.rank() * rows, (group.rank() + 1) * rows)
    log_p = ((tensors["teacher_hidden"] @ tensors["teacher_weight"][:VOCAB].t()) / 2.0).log_softmax(1)
    top, ids = log_p.topk(TOP, dim=1)
    tail = log_p.scatter(1, ids, -torch.inf).logsumexp(1)
    teachers = (
        TeacherHidden(tensors["teacher_hidden"], tensors["teacher_weight"][own]),
        TeacherTopK(ids, top, tail, temperature=2.0),
    )
    differences = []
    for (kind, beta), temperature, (top_k, tail_kind) in CASES:
        if top_k is None or temperature != 2.0:
            continue
        found = []
        for teacher in teachers:
            hidden = tensors["hidden"].clone().requires_grad_()
            weight = tensors["weight"][own].clone().requires_grad_()
            result = linear_losses(
                hidden,
                weight,
                tensors["labels"],
                {"kl": build(kind, beta, temperature, top_k, tail_kind)},
                shard=VocabShard(group, VOCAB),
                token_weights=tensors["weights"],
                chunk_tokens=7,
                teacher=teacher,
            )
            result.total.backward()
            found.append((result.values, hidden.grad, weight.grad))
        differences += [((a - b).norm() / a.norm()).item() for a, b in zip(*found, strict=True)]
    return differences


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_cached_teacher_is_the_teacher(ranks, world_size: int) -> None:
    for differences in ranks.run(world_size, cached, inputs()):
        assert len(differences) == 3 * len(KINDS) * 3
        assert max(differences) < 1e-5


def test_unsuitable_teachers_are_refused() -> None:
    from megatron_ext.losses import JSD, ForwardKL, TeacherHidden, TeacherTopK, VocabShard, linear_losses

    hidden, weight, labels = torch.randn(3, 4), torch.randn(10, 4), torch.zeros(3, dtype=torch.int64)
    ids, top, tail = torch.zeros(3, 2, dtype=torch.int64), torch.full((3, 2), -1.0), torch.full((3,), -2.0)
    cases = [
        (ForwardKL(), None, "ForwardKL compares with a teacher, but teacher is None"),
        (ForwardKL(), TeacherTopK(ids, top, tail), "ForwardKL needs the teacher's whole distribution"),
        (ForwardKL(2.0, top_k=2, tail="bucket"), TeacherTopK(ids, top, tail), "temperature: the loss has 2.0"),
        (ForwardKL(top_k=3, tail="bucket"), TeacherTopK(ids, top, tail), "top_k: the loss has 3"),
        (ForwardKL(), TeacherHidden(hidden[:2], weight), "both need the same tokens"),
        (ForwardKL(), TeacherHidden(hidden, weight[:9]), "it needs 10 rows"),
        (JSD(top_k=11, tail="ignore"), TeacherHidden(hidden, weight), "top_k: 11 is larger than the vocabulary of 10"),
    ]
    for loss, teacher, message in cases:
        with pytest.raises(ValueError, match=message):
            linear_losses(hidden, weight, labels, {"kl": loss}, shard=VocabShard(None, 10), teacher=teacher)
    for arguments, message in [
        ({"temperature": 0.0}, "temperature: 0.0 is not positive"),
        ({"top_k": 2}, "top_k is 2 and tail None; give both"),
        ({"tail": "bucket"}, "top_k is None and tail bucket; give both"),
        ({"top_k": 2, "tail": "drop"}, "tail: 'drop' is not known"),
        ({"top_k": 0, "tail": "bucket"}, "top_k: 0 tokens are none"),
    ]:
        with pytest.raises(ValueError, match=message):
            ForwardKL(**arguments)
    for beta in (0.0, 1.0, -0.5, float("nan")):
        with pytest.raises(ValueError, match=r"beta: .* is not between 0 and 1"):
            JSD(beta)


@pytest.mark.parametrize("gap", [10.0, 25.0, 100.0])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
@pytest.mark.parametrize("tail", ["renormalize", "bucket", "ignore"])
def test_a_student_that_is_surer_than_its_teacher(kind: str, beta: float, tail: str, gap: float) -> None:
    """The student's logits at the teacher's k tokens are far above all others, the teacher's are not."""
    from megatron_ext.losses import VocabShard, logits_losses

    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(6, 300, generator=generator) for _ in range(2))
    logits[:, :TOP] += gap
    teacher[:, :TOP] += 8.0
    logits.requires_grad_()
    losses = {"kl": build(kind, beta, 1.0, TOP, tail)}
    labels = torch.zeros(6, dtype=torch.int64)
    values = logits_losses(logits, labels, losses, shard=VocabShard(None, 300), teacher=teacher)[0]
    values.sum().backward()
    exact = logits.detach().double().requires_grad_()
    log_q, log_p = exact.log_softmax(1), teacher.double().log_softmax(1)
    ids = log_p.topk(TOP, dim=1).indices
    q, p = log_q.gather(1, ids), log_p.gather(1, ids)
    if tail == "renormalize":
        q, p = q.log_softmax(1), p.log_softmax(1)
    elif tail == "bucket":
        rest = [side.scatter(1, ids, -torch.inf).logsumexp(1, keepdim=True) for side in (log_q, log_p)]
        q, p = torch.cat((q, rest[0]), 1), torch.cat((p, rest[1]), 1)
    if kind == "forward_kl":
        expected = (p.exp() * (p - q)).sum(1)
    elif kind == "reverse_kl":
        expected = (q.exp() * (q - p)).sum(1)
    else:
        m = torch.logaddexp(p + torch.tensor(beta).double().log(), q + torch.tensor(1 - beta).double().log())
        expected = beta * (p.exp() * (p - m)).sum(1) + (1 - beta) * (q.exp() * (q - m)).sum(1)
    expected.sum().backward()
    assert (values.double() - expected).norm() < 1e-5 * expected.norm()
    assert (logits.grad.double() - exact.grad).norm() < 2e-5 * exact.grad.norm()


@pytest.mark.parametrize("tail", ["renormalize", "bucket", "ignore"])
@pytest.mark.parametrize(("kind", "beta"), KINDS)
def test_all_tokens_among_the_top(kind: str, beta: float, tail: str) -> None:
    """With k the size of the vocabulary nothing is left for the tail."""
    from megatron_ext.losses import VocabShard, logits_losses

    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(6, 20, generator=generator) for _ in range(2))
    logits.requires_grad_()
    found = []
    for top_k, kind_of_tail in ((20, tail), (None, None)):
        losses = {"kl": build(kind, beta, 1.0, top_k, kind_of_tail)}
        labels = torch.zeros(6, dtype=torch.int64)
        values = logits_losses(logits, labels, losses, shard=VocabShard(None, 20), teacher=teacher)[0]
        found.append((values.detach(), *torch.autograd.grad(values.sum(), logits)))
    for restricted, full in zip(*found, strict=True):
        torch.testing.assert_close(restricted, full, rtol=1e-5, atol=1e-6)


def test_teachers_that_do_not_fit_logits_are_refused() -> None:
    from megatron_ext.losses import ForwardKL, TeacherTopK, VocabShard, logits_losses

    logits, labels = torch.randn(3, 10), torch.zeros(3, dtype=torch.int64)
    ids, top, tail = torch.zeros(3, 2, dtype=torch.int64), torch.full((3, 2), -1.0), torch.full((3,), -2.0)
    for loss, teacher, message in [
        (ForwardKL(), torch.randn(3, 11), "both need the same tokens and columns"),
        (ForwardKL(), TeacherTopK(ids, top, tail), "needs the teacher's whole distribution"),
        (ForwardKL(2.0, top_k=2, tail="bucket"), TeacherTopK(ids, top, tail), "temperature: the loss has 2.0"),
        (ForwardKL(top_k=2, tail="bucket"), TeacherTopK(ids, top, tail[:2]), "need k ids and log-probabilities"),
    ]:
        with pytest.raises(ValueError, match=message):
            logits_losses(logits, labels, {"kl": loss}, shard=VocabShard(None, 10), teacher=teacher)
    with pytest.raises(ValueError, match=r"logits is of type torch\.int64"):
        logits_losses(torch.ones(3, 10, dtype=torch.int64), labels, {"kl": ForwardKL()}, shard=VocabShard(None, 10))
