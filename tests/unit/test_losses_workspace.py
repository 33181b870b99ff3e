"""Memory that calls of the loss head use one after the other."""

import contextlib
import threading

import torch

from megatron_ext.losses import linear_cross_entropy
from megatron_ext.losses.workspace import WORKSPACE, Workspace

CPU = torch.device("cpu")


def kept(workspace: Workspace) -> list[int]:
    return [block.nbytes() for block in workspace._kept]


def test_what_is_given_back_is_lent_again() -> None:
    workspace = Workspace()
    first = workspace.borrow(3, 5, torch.float32, CPU)
    assert first.shape == (3, 5) and first.is_contiguous()
    workspace.give_back(first)
    second = workspace.borrow(2, 6, torch.bfloat16, CPU)
    assert second.shape == (2, 6) and second.dtype == torch.bfloat16 and second.is_contiguous()
    assert second.data_ptr() == first.data_ptr()
    assert workspace.borrow(1, 1, torch.float32, CPU).data_ptr() != first.data_ptr(), "lent twice"


def test_what_is_kept_does_not_grow_with_the_calls() -> None:
    """No more than was borrowed at once, whatever was lent for what."""
    workspace, most = Workspace(), 0
    for size in (10, 3, 12, 7, 200, 1, 199, 201, 50):
        for sizes in ((size, 2), (2, size)):
            borrowed = [workspace.borrow(each, 4, torch.float32, CPU) for each in sizes]
            most = max(most, sum(block.nbytes for block in borrowed))
            for block in borrowed:
                workspace.give_back(block)
            assert sum(kept(workspace)) <= most
    assert max(kept(workspace)) == 201 * 16


def test_calls_of_other_sizes_do_not_see_each_other() -> None:
    """Gradients and losses are their own memory, whatever was computed since; also when threads compute at once."""
    generator = torch.Generator().manual_seed(0)
    problems = [
        (torch.randn(n, 8, generator=generator), torch.randn(50, 8, generator=generator), torch.arange(n) % 50)
        for n in (64, 9, 200, 33)
    ]

    def gradients(problem: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
        hidden, weight = (part.clone().requires_grad_() for part in problem[:2])
        losses = linear_cross_entropy(hidden, weight, problem[2], chunk_tokens=16)
        total = linear_cross_entropy(hidden, weight, problem[2], torch.ones(len(hidden)), chunk_tokens=16)
        return [losses.detach(), total.detach(), *torch.autograd.grad(losses.sum() + total, (hidden, weight))]

    expected = [[part.clone() for part in gradients(problem)] for problem in problems]
    found: dict[int, list[torch.Tensor]] = {}

    def work(index: int) -> None:
        for _ in range(20):
            found[index] = gradients(problems[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(problems))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, parts in enumerate(expected):
        for part, reference in zip(found[index], parts, strict=True):
            torch.testing.assert_close(part, reference, rtol=0.0, atol=0.0)


def test_a_call_that_fails_leaves_the_workspace_usable() -> None:
    before = len(kept(WORKSPACE))
    hidden, weight = torch.randn(6, 4), torch.randn(10, 4)
    with contextlib.suppress(Exception):
        linear_cross_entropy(hidden, weight.to("meta"), torch.arange(6))
    assert len(kept(WORKSPACE)) >= min(before, 1)
    assert linear_cross_entropy(hidden, weight, torch.arange(6)).isfinite().all()
