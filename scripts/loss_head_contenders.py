"""The contenders of scripts/bench_loss_head.py and what their processes do; imported by it, never started by hand.

A contender is a row of the table at the end of the first half: functions that take `Inputs` and compute the loss of a
language model's head from hidden states, output weight and labels. `serve_contender`, `report_peak_memory` and
`serve_tp_rank` are the lives of the benchmark's processes; they answer its messages over a pipe.
"""

import ctypes
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKPOINT_CHUNK = 256  # TRL's default
TORCH_CHUNK = 512  # the fastest of 128, 256 and 512 here; torch's own choice is 16 to 32 and takes twice as long
MIB = 2**20


class Shape(NamedTuple):
    """Sizes of one problem."""

    tokens: int
    hidden: int
    vocab: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.hidden}x{self.vocab}"


@dataclass
class Inputs:
    """What every contender gets, the same in each process."""

    hidden: torch.Tensor  # [tokens, h]
    weight: torch.Tensor  # [vocab, h]
    labels: torch.Tensor  # [tokens]
    token_weights: torch.Tensor  # [tokens] fp32; none is 0, so that nobody may skip a token

    def forget_gradients(self) -> None:
        """Every call allocates its gradients anew."""
        self.hidden.grad = self.weight.grad = None

    def gradient_bytes(self) -> int:
        return self.hidden.nbytes + self.weight.nbytes


def make_inputs(shape: Shape, dtype: torch.dtype, seed: int = 0) -> Inputs:
    """Random inputs that depend on the arguments only. The token weights sum to about 1."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(shape.tokens, shape.hidden, generator=generator)
    weight = torch.randn(shape.vocab, shape.hidden, generator=generator).mul_(0.05)
    labels = torch.randint(0, shape.vocab, (shape.tokens,), generator=generator)
    token_weights = torch.rand(shape.tokens, generator=generator).add_(0.5).div_(shape.tokens)
    return Inputs(hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), labels, token_weights)


def _backward(losses: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    """The gradients of the weighted sum of per-token losses; returns the sum."""
    loss = (losses * inputs.token_weights).sum()
    loss.backward()
    return loss.detach()


# ---- the floor: the matrix products alone -------------------------------------------------------------------------


def floor_training(inputs: Inputs) -> None:
    with torch.no_grad():
        hidden, weight = inputs.hidden, inputs.weight
        logits = hidden @ weight.t()
        # handed out like everybody's gradients, so that freeing them is in nobody's time
        hidden.grad = logits @ weight
        weight.grad = logits.t() @ hidden


def floor_forward(inputs: Inputs) -> torch.Tensor:
    return inputs.hidden @ inputs.weight.t()


# ---- all logits at once --------------------------------------------------------------------------------------------


def naive_forward(inputs: Inputs) -> torch.Tensor:
    return F.cross_entropy((inputs.hidden @ inputs.weight.t()).float(), inputs.labels, reduction="none")


def naive_training(inputs: Inputs) -> torch.Tensor:
    return _backward(naive_forward(inputs), inputs)


def start_megatron() -> None:
    """One rank of Megatron-Core over gloo."""
    from megatron_ext import platform

    platform.setup("cpu")
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)


@cache
def _megatron_output_layer(width: int, vocab: int, dtype: torch.dtype) -> Any:
    """It takes its weight with every call, as for tied embeddings."""
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear

    config = ModelParallelConfig(perform_initialization=False, params_dtype=dtype)
    initialise = torch.nn.init.zeros_  # asked for, not called
    return ColumnParallelLinear(
        width, vocab, config=config, init_method=initialise, bias=False, skip_weight_param_allocation=True
    )


def megatron_forward(inputs: Inputs) -> torch.Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    vocab, width = inputs.weight.shape
    layer = _megatron_output_layer(width, vocab, inputs.weight.dtype)
    logits, _ = layer(inputs.hidden[:, None], weight=inputs.weight)  # [s, b, vocab]
    return vocab_parallel_cross_entropy(logits, inputs.labels[:, None]).squeeze(1)


def megatron_training(inputs: Inputs) -> torch.Tensor:
    return _backward(megatron_forward(inputs), inputs)


# ---- in chunks -----------------------------------------------------------------------------------------------------


def _torch_loss(inputs: Inputs, reduction: str, chunk: int | None) -> torch.Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)  # None: what torch chooses for the shape
    return F.linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, reduction=reduction, options=options)


def _torch_mean(inputs: Inputs, chunk: int | None) -> torch.Tensor:
    """Gradients in forward; torch offers that only without token weights."""
    loss = _torch_loss(inputs, "mean", chunk)
    loss.backward()
    return loss.detach()


def torch_training(inputs: Inputs) -> torch.Tensor:
    """With token weights torch has to compute the logits a second time in backward."""
    return _backward(torch_forward(inputs), inputs)


def torch_forward(inputs: Inputs) -> torch.Tensor:
    return _torch_loss(inputs, "none", TORCH_CHUNK)


def torch_mean_training(inputs: Inputs) -> torch.Tensor:
    return _torch_mean(inputs, TORCH_CHUNK)


def torch_auto_training(inputs: Inputs) -> torch.Tensor:
    return _torch_mean(inputs, None)


def torch_auto_forward(inputs: Inputs) -> torch.Tensor:
    return _torch_loss(inputs, "none", None)


def _chunk_losses(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.t()).float(), labels, reduction="none")


def checkpoint_training(inputs: Inputs) -> torch.Tensor:
    chunks = zip(inputs.hidden.split(CHECKPOINT_CHUNK), inputs.labels.split(CHECKPOINT_CHUNK), strict=True)
    losses = [
        checkpoint(_chunk_losses, hidden, inputs.weight, labels, use_reentrant=False) for hidden, labels in chunks
    ]
    return _backward(torch.cat(losses), inputs)


def checkpoint_forward(inputs: Inputs) -> torch.Tensor:
    chunks = zip(inputs.hidden.split(CHECKPOINT_CHUNK), inputs.labels.split(CHECKPOINT_CHUNK), strict=True)
    return torch.cat([_chunk_losses(hidden, inputs.weight, labels) for hidden, labels in chunks])


def ours_training(inputs: Inputs) -> torch.Tensor:
    from megatron_ext.losses import linear_cross_entropy

    loss = linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, inputs.token_weights, group=None)
    loss.backward()
    return loss.detach()


def ours_forward(inputs: Inputs) -> torch.Tensor:
    from megatron_ext.losses import linear_cross_entropy

    return linear_cross_entropy(inputs.hidden, inputs.weight, inputs.labels, group=None)


@dataclass(frozen=True)
class Contender:
    """One way to compute the loss head."""

    name: str
    description: str
    # leaves gradients in inputs.hidden.grad and inputs.weight.grad; returns the loss (None: computes no loss)
    training: Callable[[Inputs], torch.Tensor | None]
    forward: Callable[[Inputs], torch.Tensor] | None  # returns the losses [tokens]; called without gradients
    start: Callable[[], None] = lambda: None  # once in each process
    prepare: Callable[[Inputs], object] = lambda _: None  # makes inputs of its own
    has_loss: bool = True
    has_token_weights: bool = True  # else it computes the mean when training


# Those whose ratio is a target follow each other closely: the less the machine changes between them, the better.
CROSS_ENTROPY = [
    Contender("floor", "the bare matrix products", floor_training, floor_forward, has_loss=False),
    Contender("ours", "megatron_ext linear_cross_entropy", ours_training, ours_forward),
    Contender("naive", "F.cross_entropy(h @ W.T)", naive_training, naive_forward),
    Contender(
        "torch-mean",
        f"F.linear_cross_entropy, mean, chunk {TORCH_CHUNK}: no token weights",
        torch_mean_training,
        None,
        has_token_weights=False,
    ),
    Contender("torch", f"F.linear_cross_entropy, none, chunk {TORCH_CHUNK}", torch_training, torch_forward),
    Contender(
        "torch-auto",
        "F.linear_cross_entropy, torch's chunks; training: mean, no token weights",
        torch_auto_training,
        torch_auto_forward,
        has_token_weights=False,
    ),
    Contender(
        "checkpoint", f"a checkpoint per chunk of {CHECKPOINT_CHUNK}, as TRL", checkpoint_training, checkpoint_forward
    ),
    Contender(
        "megatron", "output layer + vocab_parallel_cross_entropy", megatron_training, megatron_forward, start_megatron
    ),
]
CONTENDERS = {contender.name: contender for contender in CROSS_ENTROPY}


def contender_named(name: str) -> Contender:
    """Of this table, or of the one for distillation."""
    if name in CONTENDERS:
        return CONTENDERS[name]
    from distillation_contenders import DISTILLATION

    return DISTILLATION[name]


# ---- what the processes do -----------------------------------------------------------------------------------------


def _norm(matrix: torch.Tensor) -> float:
    """By rows first: one fp32 sum over everything is good for four digits only."""
    return torch.linalg.vector_norm(matrix, dim=1, dtype=torch.float32).double().norm().item()


def _run_training(contender: Contender, inputs: Inputs) -> dict[str, float | None]:
    inputs.forget_gradients()
    gc.collect()
    started = time.perf_counter()
    loss = contender.training(inputs)
    seconds = time.perf_counter() - started
    answer = {"seconds": seconds, "loss": None, "hidden_norm": None, "weight_norm": None}
    if contender.has_loss:
        norms = {"hidden_norm": _norm(inputs.hidden.grad), "weight_norm": _norm(inputs.weight.grad)}
        answer |= {"loss": loss.item(), **norms}
    inputs.forget_gradients()  # not kept while the others take their turns
    return answer


@torch.no_grad()
def _run_forward(contender: Contender, inputs: Inputs) -> dict[str, float | None]:
    gc.collect()
    started = time.perf_counter()
    losses = contender.forward(inputs)
    seconds = time.perf_counter() - started
    loss = (losses.float() * inputs.token_weights).sum().item() if contender.has_loss else None
    return {"seconds": seconds, "loss": loss}


def live(connection: Any, life: Callable[..., None], *arguments: Any) -> None:
    """The target of every process: one of the lives below. What goes wrong is sent to whoever waits for an answer."""
    try:
        life(connection, *arguments)
    except BaseException:
        connection.send(traceback.format_exc())
        raise


def serve_contender(connection: Any, name: str, shape: Shape, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    contender = contender_named(name)
    contender.start()
    inputs = make_inputs(shape, DTYPES[dtype])
    uniform = Inputs(inputs.hidden, inputs.weight, inputs.labels, torch.full_like(inputs.token_weights, 1.0))
    uniform.token_weights.div_(shape.tokens)
    connection.send("ready")
    while task := connection.recv():
        if task == "forward":
            connection.send(_run_forward(contender, inputs))
        else:  # "uniform" is for comparing with contenders that know no token weights
            connection.send(_run_training(contender, uniform if task == "uniform" else inputs))


def _kibibytes(field: str) -> int:
    """A figure of this process in /proc."""
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise ValueError(f"/proc/self/status has no {field}")


@torch.no_grad()
def _warm_up_products(inputs: Inputs) -> None:
    """The library of the matrix products keeps working memory from its first use on, which is no contender's."""
    hidden, weight = inputs.hidden[:256], inputs.weight
    logits = hidden @ weight.t()
    logits @ weight, logits.t() @ hidden


def report_peak_memory(connection: Any, name: str, shape: Shape, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    contender = contender_named(name)
    contender.start()
    # a few tokens through the same code: libraries and threads get loaded, and no large block stays allocated
    contender.training(make_inputs(Shape(8, shape.hidden, 64), DTYPES[dtype]))
    inputs = make_inputs(shape, DTYPES[dtype])
    contender.prepare(inputs)
    _warm_up_products(inputs)
    gc.collect()
    # free heap left from making the inputs would hide what the call takes
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError as error:
        connection.send({"unavailable": str(error)})
        return
    before = _kibibytes("VmRSS")
    contender.training(inputs)
    peak = (_kibibytes("VmHWM") - before) / 1024
    connection.send({"peak": peak, "above_gradients": peak - inputs.gradient_bytes() / MIB})


def serve_tp_rank(connection: Any, rank: int, store: str, shape: Shape) -> None:
    """One of two ranks that hold half of the vocabulary each: the loss with the other rank, or of its half alone."""
    from megatron_ext import platform
    from megatron_ext.losses import linear_cross_entropy

    platform.setup("cpu")  # as in a run; it also quiets what torch.distributed says of its own functions
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    whole = make_inputs(shape, torch.float32)
    half = shape.vocab // 2
    shard = whole.weight.detach()[rank * half : (rank + 1) * half].clone().requires_grad_()
    own_labels = whole.labels % half
    inputs = Inputs(whole.hidden, shard, whole.labels, whole.token_weights)
    reference = naive_training(whole).item()
    whole_norms = _norm(whole.hidden.grad), _norm(whole.weight.grad)
    del whole
    connection.send({"loss": reference, "hidden_norm": whole_norms[0], "weight_norm": whole_norms[1]})
    while task := connection.recv():
        labels, group, vocab = (
            (inputs.labels, dist.group.WORLD, 2 * half) if task == "together" else (own_labels, None, half)
        )
        inputs.forget_gradients()
        gc.collect()
        dist.barrier()
        started = time.perf_counter()
        loss = linear_cross_entropy(
            inputs.hidden, inputs.weight, labels, inputs.token_weights, group=group, vocab_size=vocab
        )
        loss.backward()
        seconds = time.perf_counter() - started
        norms = {"hidden_norm": _norm(inputs.hidden.grad), "weight_norm": _norm(inputs.weight.grad)}
        connection.send({"seconds": seconds, "loss": loss.item(), **norms})
    dist.destroy_process_group()
