"""A store written under any layout holds the teacher's top k as transformers computes it; training from it gives the
losses of the live teacher under any layout, order and packing; a damaged one stops every rank.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import RankPool
from test_distillation import write_tokenizer
from tiny_model import VOCAB_SIZE, make_config, write_tiny_llama

from megatron_ext.config import Config
from megatron_ext.data import EncodedSample

K = 6
LENGTHS = [32, 7, 19, 1, 26, 12, 31, 8, 3, 20]
LOSSES = {
    "forward": {"type": "forward_kl", "temperature": 1.5, "top_k": K, "tail": "bucket"},
    "reverse": {"type": "reverse_kl", "weight": 0.5, "temperature": 1.5, "top_k": K, "tail": "renormalize"},
    "logged": {"type": "jsd", "weight": 0.0, "temperature": 1.5, "top_k": K, "tail": "ignore"},
    "lm_loss": {"type": "cross_entropy", "weight": 0.3},
}


@dataclass
class Rows:
    """A data set of random rows."""

    seed: int
    lengths: list[int]
    path: str = "rows"
    fingerprint: str = field(init=False)
    max_length: int = 32

    def __post_init__(self) -> None:
        self.fingerprint = f"{self.seed}{self.lengths}"

    def __len__(self) -> int:
        return len(self.lengths)

    def length(self, index: int) -> int:
        return self.lengths[index]

    def __getitem__(self, index: int) -> EncodedSample:
        generator = torch.Generator().manual_seed(1000 * self.seed + index)
        tokens = torch.randint(0, VOCAB_SIZE, (self.lengths[index] + 1,), generator=generator).tolist()
        return EncodedSample(tokens[:-1], tokens[1:], [float(position % 3 > 0) for position in range(len(tokens) - 1)])


TRAIN, HELD_OUT = Rows(1, LENGTHS), Rows(2, [5, 32, 11])


def fill(config: Config, store: Path) -> None:
    from megatron_ext import platform
    from megatron_ext.cache_run import fill_cache
    from megatron_ext.data import RunData
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.parallel import create_context
    from megatron_ext.teacher import Teacher, plan_teacher
    from megatron_ext.teacher_cache import CacheWriter, StoreFacts

    parallel = create_context(config, platform.setup("cpu"))
    plan = plan_teacher(config, load_hf_config(config.model.hf_path))
    data = RunData(train=TRAIN, evaluation={"held_out": HELD_OUT}, pad_id=0)
    writer = CacheWriter(store, StoreFacts(K, 1.5, plan.vocab_size, plan.hf.vocab_size, {}), data.named())
    said: list[str] = []
    fill_cache(writer, Teacher(plan, parallel), data, config, parallel, said.append)
    assert said[-1] == "13/13 samples"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    student = write_tiny_llama(tmp_path_factory.mktemp("student"))
    teacher = write_tiny_llama(tmp_path_factory.mktemp("teacher"), tied=True, heads=6, layers=8)
    for folder in (student, teacher):
        write_tokenizer(folder)
    return student, teacher


def live(models: tuple[Path, Path], parallel: dict[str, Any], **sections: Any) -> Config:
    student, teacher = models
    return make_config(student, parallel=parallel, losses=LOSSES, teacher={"teacher_path": str(teacher)}, **sections)


TP, SP, PP, VPP, CP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
)
LAYOUTS = {
    "one rank": (1, {}),
    "TP2": (2, {TP: 2}),
    "DP2": (2, {}),
    "CP2": (2, {CP: 2}),
    "PP2 VPP2": (2, {PP: 2, VPP: 2}),
    "TP2 SP PP2": (4, {TP: 2, SP: True, PP: 2}),
    "TP2 SP CP2": (4, {TP: 2, SP: True, CP: 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_store_holds_what_transformers_computes(
    ranks: RankPool, models: tuple[Path, Path], tmp_path: Path, layout: str
) -> None:
    from transformers import LlamaForCausalLM

    from megatron_ext.teacher_cache import TeacherCache

    world_size, parallel = LAYOUTS[layout]
    ranks.run(world_size, fill, live(models, parallel), tmp_path / "store")
    cache = TeacherCache(tmp_path / "store")
    assert cache.verify() is None
    model = LlamaForCausalLM.from_pretrained(models[1], dtype=torch.float64)
    for rows in (TRAIN, HELD_OUT):
        for index in range(len(rows)):
            input_ids = rows[index].input_ids
            with torch.no_grad():
                expected = (model(torch.tensor([input_ids])).logits[0] / 1.5).log_softmax(-1)
            ids, log_probabilities, log_tail = map(torch.from_numpy, cache.read(np.array(input_ids)))
            best, best_ids = expected.topk(K)
            assert torch.equal(ids, best_ids)
            torch.testing.assert_close(log_probabilities.double(), best, rtol=0, atol=1e-4)
            tail = expected.scatter(-1, best_ids, -torch.inf).logsumexp(-1)
            torch.testing.assert_close(log_tail.double(), tail, rtol=0, atol=1e-4)


def test_top_k_of_the_whole_vocabulary_leaves_no_tail() -> None:
    from megatron_ext.cache_run import teacher_top_k
    from megatron_ext.losses import VocabShard

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(5, 8, generator=generator), torch.randn(16, 8, generator=generator)
    top = teacher_top_k(hidden, weight, VocabShard(None, 13), top_k=13, temperature=2.0)
    expected = ((hidden @ weight.t())[:, :13] / 2).log_softmax(-1).sort(descending=True)
    assert torch.equal(top.ids, expected.indices)
    torch.testing.assert_close(top.log_probabilities, expected.values)
    assert (top.log_tail < -1e30).all() and torch.isfinite(top.log_tail).all()


# ---------------------------------------------------------------------------------------------- training from it


def metrics_and_gradients(config: Config) -> dict[str, Any]:
    """Two steps and one evaluation, from a live teacher or a store, as the configuration says."""
    from megatron_ext import platform
    from megatron_ext.cached_teacher import build_teacher, plan_cache
    from megatron_ext.data import EvalLoader, TrainLoader
    from megatron_ext.losses import LossHead, VocabShard
    from megatron_ext.model_wrapper import MegatronModelWrapper
    from megatron_ext.models.factory import build_model
    from megatron_ext.models.hf_config import load_hf_config
    from megatron_ext.models.sources import open_source
    from megatron_ext.models.weights import load_hf_weights
    from megatron_ext.optimizer import build_optimizer
    from megatron_ext.parallel import create_context
    from megatron_ext.teacher import plan_teacher

    parallel = create_context(config, platform.setup("cpu"))
    hf = load_hf_config(config.model.hf_path)
    chunks = build_model(hf, config, parallel)
    load_hf_weights(chunks, hf, open_source(hf, config.model.random_init, 1), parallel)
    optimizer = build_optimizer(config, chunks, parallel)
    plan = plan_cache(config, hf) or plan_teacher(config, hf)
    wrapper = MegatronModelWrapper(
        chunks,
        config,
        losses=LossHead.from_config(config, VocabShard(parallel.pg.tp, plan.vocab_size)),
        parallel=parallel,
        optimizer=optimizer,
        teacher=build_teacher(plan, parallel),
    )
    sizes = {
        "micro_batch_size": 1,
        "dp_rank": parallel.dp_rank,
        "dp_size": parallel.dp_size,
        "pad_multiple": config.sequence_multiple,
        "seq_length": 32,
        "pad_id": 0,
        "micro_batches_multiple": parallel.pp_size if parallel.vp_size > 1 else 1,
        "packing": config.data.packing,
        "packing_multiple": config.packing_multiple,
    }
    loader = TrainLoader(TRAIN, global_batch_size=8, seed=3, **sizes)
    steps = []
    for _ in range(2):
        wrapper.zero_grad()
        steps.append(dict(wrapper.forward_backward(loader.next_step(), return_per_token_outputs=False).metrics))
        _, norm, _ = optimizer.step()
        steps[-1]["norm"] = float(norm)
    outputs = [wrapper.forward(step) for step in EvalLoader(HELD_OUT, global_batch_size=4, **sizes)]
    return {"steps": steps, "evaluated": dict(outputs[0].metrics), "outputs": outputs[0].loss_fn_outputs}


@pytest.fixture(scope="module")
def store(ranks: RankPool, models: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cache") / "store"
    ranks.run(2, fill, live(models, {PP: 2}), path)
    return path


@pytest.fixture(scope="module")
def expected(ranks: RankPool, models: tuple[Path, Path]) -> dict[str, Any]:
    return ranks.run(1, metrics_and_gradients, live(models, {}))[0]


def cached(models: tuple[Path, Path], store: Path, parallel: dict[str, Any], **sections: Any) -> Config:
    teacher = {"teacher_cache": str(store)}
    return make_config(models[0], parallel=parallel, losses=LOSSES, teacher=teacher, **sections)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_from_a_store_is_training_from_the_teacher(
    ranks: RankPool, models: tuple[Path, Path], store: Path, expected: dict[str, Any], layout: str, packing: bool
) -> None:
    world_size, parallel = LAYOUTS[layout]
    results = ranks.run(world_size, metrics_and_gradients, cached(models, store, parallel, data={"packing": packing}))
    for result in results:
        for step, wanted in zip(
            [*result["steps"], result["evaluated"]], [*expected["steps"], expected["evaluated"]], strict=True
        ):
            for name in (*LOSSES, "loss", "num_tokens"):
                assert step[name] == pytest.approx(wanted[name], rel=1e-4), name
            if "norm" in wanted:
                assert step["norm"] == pytest.approx(wanted["norm"], rel=1e-3)
    if world_size == 1:  # this rank has them all; packing has another order, and they differ in length
        by_length = {len(wanted["loss_mask"]): wanted for wanted in expected["outputs"]}
        assert {len(output["loss_mask"]) for output in results[0]["outputs"]} == by_length.keys() == {5, 32, 11}
        for output in results[0]["outputs"]:
            for name in ("forward", "reverse", "logged"):
                wanted = by_length[len(output["loss_mask"])][name]
                torch.testing.assert_close(output[name], wanted, rtol=1e-3, atol=1e-5)


def test_a_damaged_store_stops_every_rank(
    ranks: RankPool, models: tuple[Path, Path], store: Path, tmp_path: Path
) -> None:
    import shutil

    shutil.copytree(store, tmp_path / "store")
    path = tmp_path / "store" / "ids.bin"
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    errors = ranks.run(2, refused, cached(models, tmp_path / "store", {}))
    assert errors[0] == errors[1]
    assert "is damaged: block 0 of ids.bin does not have its checksum; write it again" in errors[0]


def refused(config: Config) -> str:
    from megatron_ext import platform
    from megatron_ext.cached_teacher import CachedTeacher
    from megatron_ext.parallel import create_context
    from megatron_ext.teacher_cache import TeacherCache

    try:
        CachedTeacher(TeacherCache(config.teacher.teacher_cache), create_context(config, platform.setup("cpu")))
    except ValueError as error:
        return str(error)
    return "no error"


def test_a_store_for_other_losses_or_another_vocabulary_is_refused(models: tuple[Path, Path], store: Path) -> None:
    from dataclasses import replace

    from megatron_ext.cached_teacher import plan_cache
    from megatron_ext.models.hf_config import load_hf_config

    hf = load_hf_config(models[0])
    config = cached(models, store, {})
    assert plan_cache(config, hf).vocab_size == VOCAB_SIZE
    assert plan_cache(config, replace(hf, vocab_size=300)).vocab_size == VOCAB_SIZE  # the teacher's 250 are shared
    with pytest.raises(ValueError, match=r"was written for 250 token ids, but .* share 240; write one for this model"):
        plan_cache(config, replace(hf, vocab_size=240))
    losses = {"kl": {"type": "forward_kl", "top_k": 5, "tail": "ignore"}}
    other = Config.from_dict({**config.to_dict(), "losses": losses})
    with pytest.raises(ValueError) as error:
        plan_cache(other, hf)
    assert "losses.kl.top_k: 5 is not the top_k 6 that teacher_cache" in str(error.value)
    assert "losses.kl.temperature: 1.0 is not the temperature 1.5 that teacher_cache" in str(error.value)
