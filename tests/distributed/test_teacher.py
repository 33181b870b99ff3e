"""The frozen teacher under every kind of layout: its hidden states times its output weight are the logits that
transformers computes, whatever the student's sizes are, and running it leaves no trace.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import RankPool
from tiny_model import make_config, write_tiny_llama

from megatron_ext.config import Config

VOCAB_SIZE = 250
SAMPLES = torch.randint(0, VOCAB_SIZE, (8, 16), generator=torch.Generator().manual_seed(6))
KL = {"kl": {"type": "forward_kl"}}


@dataclass(frozen=True)
class Inputs:
    input_ids: torch.Tensor
    position_ids: torch.Tensor
    packed: Any = None


def random_states() -> list[Any]:
    from megatron.core import tensor_parallel

    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return [
        torch.get_rng_state(),
        *(tracker[name] for name in sorted(tracker)),
        random.getstate(),
        np.random.get_state()[1].tolist(),
    ]


def same_states(first: list[Any], second: list[Any]) -> bool:
    return all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(first, second, strict=True))


def make_inputs(samples: torch.Tensor, parallel: Any, micro_batch_size: int = 2) -> list[Inputs]:
    from megatron_ext.context_parallel import shard_sequence

    positions = torch.arange(samples.size(1)).repeat(micro_batch_size, 1)

    def own(rows: torch.Tensor) -> torch.Tensor:
        return shard_sequence(rows, parallel.cp_rank, parallel.cp_size)

    return [Inputs(own(rows), own(positions)) for rows in samples.split(micro_batch_size)]


def build(config: Config) -> tuple[Any, Any]:
    from megatron_ext import platform
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.parallel import create_context
    from megatron_ext.teacher import Teacher, plan_teacher

    parallel = create_context(config, platform.setup("cpu"))
    before = random_states()
    plan = plan_teacher(config, load_hf_config(config.model.hf_path))
    assert plan is not None
    teacher = Teacher(plan, parallel)
    assert same_states(before, random_states()), "building the teacher drew random numbers"
    return teacher, parallel


def whole_logits(teacher: Any, hidden: list[torch.Tensor], parallel: Any) -> torch.Tensor:
    """[samples, s, rows of the output weight over all TP ranks] from what the ranks of the last stage hold."""
    import torch.distributed as dist

    from megatron_ext.context_parallel import restore_sequence_order

    def gather(part: torch.Tensor, group: Any) -> list[torch.Tensor]:
        parts = [torch.empty_like(part) for _ in range(group.size())]
        dist.all_gather(parts, part.contiguous(), group=group)
        return parts

    states = torch.cat(hidden, dim=1)  # [s/cp(/tp), samples, h]
    if teacher.chunks[0].config.sequence_parallel:
        states = torch.cat(gather(states, parallel.pg.tp))
    if parallel.cp_size > 1:
        states = restore_sequence_order(torch.stack(gather(states, parallel.pg.cp)))
    weight = torch.cat(gather(teacher.output_weight.detach(), parallel.pg.tp))
    return (states.float() @ weight.float().t()).transpose(0, 1)


def teach(config: Config, samples: torch.Tensor) -> dict[str, Any]:
    """Logits of two steps on the last stage, and what the teacher left behind."""
    teacher, parallel = build(config)
    parameters = [parameter for chunk in teacher.chunks for parameter in chunk.parameters()]
    assert not any(parameter.requires_grad for parameter in parameters)
    assert not any(module.training for chunk in teacher.chunks for module in chunk.modules())
    before = random_states()
    steps = []
    for _ in range(2):
        hidden = teacher.hidden_states(make_inputs(samples, parallel))
        if parallel.is_last_stage:
            assert hidden is not None and not any(part.requires_grad for part in hidden)
            assert {part.dtype for part in hidden} == {parameters[0].dtype}
            steps.append(whole_logits(teacher, hidden, parallel))
        else:
            assert hidden is None
    assert same_states(before, random_states()), "the teacher drew random numbers"
    if steps:
        assert torch.equal(*steps)
    return {"logits": steps[0] if steps else None, "vocab_size": teacher.vocab_size}


@torch.no_grad()
def dense_logits(directory: Path, samples: torch.Tensor) -> torch.Tensor:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()(samples).logits


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Model directories that share one tokenizer."""
    from toy_run import write_toy_model

    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def get(name: str, **sizes: Any) -> Path:
        if name not in made:
            made[name] = write_toy_model(folder / name)  # the model in it is replaced
            write_tiny_llama(made[name], **sizes)
        return made[name]

    return get


def distil(student: Path, teacher: Path, parallel: dict[str, Any], /, **changes: Any) -> Config:
    settings = {"teacher_path": str(teacher)} | changes.pop("teacher", {})
    return make_config(student, parallel=parallel, losses=KL, teacher=settings, **changes)


LAYOUTS = {
    "one rank": (1, {}),
    "TP2": (2, {"tensor_model_parallel_size": 2}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 uneven student": (2, {"pipeline_model_parallel_size": 2, "num_layers_in_first_pipeline_stage": 1}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "PP4": (4, {"pipeline_model_parallel_size": 4}),
    "CP2": (2, {"context_parallel_size": 2}),
    "TP2 PP2": (4, {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}),
    "TP2 SP CP2": (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "context_parallel_size": 2}),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_logits_are_those_of_transformers(ranks: RankPool, write: Callable[..., Path], layout: str, tied: bool) -> None:
    world_size, parallel = LAYOUTS[layout]
    student = write("student")  # 4 layers, 64 wide
    teacher = write(f"teacher_{tied}", tied=tied, heads=6, groups=2, layers=6)  # 96 wide
    results = ranks.run(world_size, teach, distil(student, teacher, parallel), SAMPLES)
    compared = [result["logits"] for result in results if result["logits"] is not None]
    assert len(compared) == world_size // parallel.get("pipeline_model_parallel_size", 1)
    expected = dense_logits(teacher, SAMPLES)
    for logits in compared:
        assert (logits[..., :VOCAB_SIZE] - expected).abs().max() <= 1e-4
    assert {result["vocab_size"] for result in results} == {VOCAB_SIZE}


def with_vocabulary(model: Path, directory: Path, size: int) -> Path:
    """A copy of a model with fewer or more token ids."""
    import shutil

    from transformers import LlamaForCausalLM

    shutil.copytree(model, directory)
    torch.manual_seed(3)
    resized = LlamaForCausalLM.from_pretrained(model)
    resized.resize_token_embeddings(size, mean_resizing=False)
    resized.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("size", [120, 240, 300], ids=["half", "a little smaller", "larger"])
def test_columns_line_up_whatever_both_vocabularies_are(
    ranks: RankPool, write: Callable[..., Path], tmp_path: Path, size: int
) -> None:
    """The student has 250 ids in 256 rows, 128 on each rank; the teacher's own padding would be another."""
    teacher = with_vocabulary(write("teacher_False", heads=6, groups=2, layers=6), tmp_path / "teacher", size)
    samples = SAMPLES % 100
    config = distil(write("student"), teacher, {"tensor_model_parallel_size": 2})
    results = ranks.run(2, teach, config, samples)
    expected = dense_logits(teacher, samples)
    common = min(size, VOCAB_SIZE)
    for result in results:
        assert result["vocab_size"] == common
        assert result["logits"].size(-1) == 256
        assert (result["logits"][..., :common] - expected[..., :common]).abs().max() <= 1e-4
        assert not result["logits"][..., size:].any()


@pytest.mark.parametrize("own", [None, True, False])
def test_dtype_is_the_students_unless_given(ranks: RankPool, write: Callable[..., Path], own: bool | None) -> None:
    teacher = write("teacher_False", heads=6, groups=2, layers=6)
    config = distil(write("student"), teacher, {"pipeline_model_parallel_size": 2}, training={"bf16": True})
    config = config.model_copy(update={"teacher": config.teacher.model_copy(update={"teacher_bf16": own})})
    logits = ranks.run(2, teach, config, SAMPLES)[-1]["logits"]
    difference = (logits[..., :VOCAB_SIZE] - dense_logits(teacher, SAMPLES)).abs().max()
    assert difference <= 1e-4 if own is False else 1e-3 < difference < 0.5


def save_checkpoint(config: Config, folder: Path) -> None:
    from tiny_model import Run

    from megatron_ext.checkpoint import Checkpointer

    class Loader:
        def state_dict(self) -> dict:
            return {}

    run = Run(config)
    config = Config.from_dict({**config.to_dict(), "checkpoint": {"save": str(folder)}})
    Checkpointer(config, run.hf, run.parallel).save(3, run.chunks, run.optimizer, run.scheduler, Loader())


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_weights_from_a_megatron_checkpoint(
    ranks: RankPool, write: Callable[..., Path], tmp_path: Path, tied: bool
) -> None:
    """Saved under TP 2 with 256 vocabulary rows, read under PP 2 into 264."""
    teacher = write(f"teacher_{tied}", tied=tied, heads=6, groups=2, layers=6)
    saved = make_config(teacher, parallel={"tensor_model_parallel_size": 2})
    ranks.run(2, save_checkpoint, saved, tmp_path / "run")
    (tmp_path / "model").mkdir()
    for file in teacher.glob("*.json"):
        (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    config = distil(
        write("student"),
        tmp_path / "model",
        {"pipeline_model_parallel_size": 2},
        model={"make_vocab_size_divisible_by": 44},
        teacher={"teacher_load": str(tmp_path / "run")},
    )
    logits = ranks.run(2, teach, config, SAMPLES)[-1]["logits"]
    assert logits.size(-1) == 264 and not logits[..., 256:].any()
    assert (logits[..., :VOCAB_SIZE] - dense_logits(teacher, SAMPLES)).abs().max() <= 1e-4


def test_packed_rows(ranks: RankPool, write: Callable[..., Path]) -> None:
    teacher = write("teacher_False", heads=6, groups=2, layers=6)
    for parallel in ({"pipeline_model_parallel_size": 2}, {"context_parallel_size": 2}):
        logits = ranks.run(2, teach_packed, distil(write("student"), teacher, parallel), SAMPLES[:4])[-1]
        assert (logits[..., :VOCAB_SIZE] - dense_logits(teacher, SAMPLES[:4])).abs().max() <= 1e-4


def teach_packed(config: Config, samples: torch.Tensor) -> torch.Tensor | None:
    """Two sequences a row; their logits, unpacked."""
    import torch.distributed as dist

    from megatron_ext.context_parallel import packed_order
    from megatron_ext.packed_rows import packed_seq_params

    teacher, parallel = build(config)
    bounds = torch.tensor([0, 16, 32], dtype=torch.int32)
    order = packed_order(bounds, parallel.cp_size)[parallel.cp_rank] if parallel.cp_size > 1 else torch.arange(32)
    positions = torch.arange(16).repeat(1, 2)[:, order]
    packed = packed_seq_params(bounds, parallel.device)
    rows = samples.view(2, 1, 32)
    hidden = teacher.hidden_states([Inputs(row[:, order], positions, packed) for row in rows])
    if not parallel.is_last_stage:
        return None
    logits = torch.cat(hidden, dim=1).transpose(0, 1) @ teacher.output_weight.t()  # [rows, s/cp, vocabulary]
    whole = logits.new_zeros(2, 32, logits.size(-1))
    whole[:, order] = logits
    if parallel.cp_size > 1:
        dist.all_reduce(whole, group=parallel.pg.cp)
    return whole.view(4, 16, -1)


def test_every_number_of_layers_is_spread_evenly(write: Callable[..., Path]) -> None:
    """Against every possible spread: none has a smaller largest stage."""
    from megatron_ext.config import ConfigError
    from megatron_ext.teacher import _spread_layers

    for stages, chunks in itertools.product((2, 3, 4, 5), (None, 2, 3)):
        parallel = {"pipeline_model_parallel_size": stages, "virtual_pipeline_model_parallel_size": chunks}
        config = distil(write("student"), write("student"), parallel)
        unit = chunks or 1
        for layers in range(1, 25):
            per_stage = range(unit, layers + 1, unit)
            possible = [
                (first, *[middle] * (stages - 2), layers - first - middle * (stages - 2))
                for first in per_stage
                for middle in per_stage
            ]
            possible = [counts for counts in possible if counts[-1] >= unit and counts[-1] % unit == 0]
            if not possible:
                with pytest.raises(ConfigError, match=f"num_hidden_layers {layers} cannot be spread over"):
                    _spread_layers(config, layers)
                continue
            first, last = _spread_layers(config, layers)
            fixed = [number for number in (first, last) if number is not None]
            each, left = divmod(layers - sum(fixed), stages - len(fixed))
            assert left == 0
            counts = (each if first is None else first, *[each] * (stages - 2), each if last is None else last)
            assert counts in possible
            assert max(counts) == min(map(max, possible))


TP, PP, VPP = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
)
TEACHERS = [  # the teacher's sizes, the layout, what the message says
    ({"heads": 3, "groups": 3}, {TP: 2}, ["num_attention_heads 3", f"{TP} 2", "use 1 or 3"]),
    ({"layers": 1}, {PP: 2}, ["num_hidden_layers 1", f"{PP} 2 stages", "at most 1"]),
    ({"layers": 3}, {PP: 2, VPP: 2}, ["num_hidden_layers 3", "2 stages of 2 virtual chunks each", f"another {VPP}"]),
]


@pytest.mark.parametrize(("sizes", "parallel", "parts"), TEACHERS)
def test_a_teacher_that_does_not_fit_is_refused(
    write: Callable[..., Path], sizes: dict[str, int], parallel: dict[str, int], parts: list[str]
) -> None:
    teacher = write("_".join(f"{name}{value}" for name, value in sizes.items()), **sizes)
    message = refusal(distil(write("student"), teacher, parallel))
    for part in [f"teacher.teacher_path {teacher}: ", *parts]:
        assert part in message


def refusal(config: Config) -> str:
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.teacher import plan_teacher

    with pytest.raises(ValueError) as error:
        plan_teacher(config, load_hf_config(config.model.hf_path))
    return str(error.value)


def test_a_teacher_of_shorter_sequences_and_one_that_is_damaged_are_refused(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    import json
    import shutil

    teacher = tmp_path / "teacher"
    shutil.copytree(write("teacher_False", heads=6, groups=2, layers=6), teacher)
    raw = json.loads((teacher / "config.json").read_text())
    (teacher / "config.json").write_text(json.dumps({**raw, "max_position_embeddings": 16}))
    message = refusal(distil(write("student"), teacher, {}))
    assert f"teacher.teacher_path {teacher}: seq_length 32" in message and "max_position_embeddings 16" in message
    (teacher / "config.json").write_text(json.dumps({**raw, "num_hidden_layers": 7}))
    message = refusal(distil(write("student"), teacher, {}))
    assert message.startswith(f"teacher.teacher_path {teacher}: ") and "tensors are missing: model.layers.6" in message


def test_another_tokenizer_is_refused_with_both_named(write: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    student = write("student")
    teacher = tmp_path / "teacher"
    shutil.copytree(write("teacher_False", heads=6, groups=2, layers=6), teacher)
    text = (teacher / "tokenizer.json").read_text()
    assert '"one": 5' in text and '"two": 6' in text
    (teacher / "tokenizer.json").write_text(text.replace('"one": 5', '"one": 6').replace('"two": 6', '"two": 5'))
    message = refusal(distil(student, teacher, {}))
    assert f"tokenizer_path {student} (22 tokens) and teacher_tokenizer_path {teacher} (22 tokens)" in message
    assert "differ in 2 of them: 'one' is 5 and 6, 'two' is 6 and 5; give a teacher" in message
    given = distil(student, teacher, {}, teacher={"teacher_tokenizer_path": str(student)})  # vouched for
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.teacher import plan_teacher

    assert plan_teacher(given, load_hf_config(student)) is not None
