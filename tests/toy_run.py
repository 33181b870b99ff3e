"""A complete toy setup on disk for runs of pretrain_sft.py: model config, tokenizer with a chat template, data."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = [
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("red", "green", "blue", "up", "down", "left", "right"),
]


def write_toy_model(directory: Path, **changes: Any) -> Path:
    """A random-weight Llama config and a tokenizer; weights come from `--random-init`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    special = ["<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
    vocabulary = {word: i for i, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(special)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    config = LlamaConfig(**(sizes | changes), initializer_range=0.1)
    config.architectures = changes.get("architectures", ["LlamaForCausalLM"])
    config.save_pretrained(directory)
    return directory


def write_toy_teacher(directory: Path, *, seed: int = 1, **changes: Any) -> Path:
    """A model of another depth and width than the toy model, with its tokenizer and with random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    write_toy_model(directory, **({"hidden_size": 48, "num_hidden_layers": 6} | changes))
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig.from_pretrained(directory)).save_pretrained(directory)
    return directory


def write_toy_data(path: Path, rows: int = 24) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            question = " ".join(WORDS[(i + j) % len(WORDS)] for j in range(1 + i % 5))
            answer = " ".join(WORDS[(2 * i + j) % len(WORDS)] for j in range(1 + i % 7))
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def launch_environment(path: Path | None = None) -> dict[str, str]:
    """For a run of its own: the GPUs that are hidden from the test process are visible again."""
    python_path = str(ROOT) if path is None else f"{path}:{ROOT}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": python_path}
    return {name: value for name, value in environment.items() if name not in ("CUDA_VISIBLE_DEVICES", "RANK")}


class ToyRun:
    """Everything a run needs in one folder, and the command line for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_toy_model(folder / "model")
        self.train_data = write_toy_data(folder / "train.jsonl")
        self.valid_data = write_toy_data(folder / "valid.jsonl", rows=7)

    def config(self, name: str = "toy", **changes: Any) -> Path:
        """The same as `flags`, as a file for --config."""
        from megatron_ext.config import config_to_yaml, load_config

        path = self.folder / f"{name}.yaml"
        path.write_text(config_to_yaml(load_config(self.flags(**changes))), encoding="utf-8")
        return path

    def flags(self, **changes: Any) -> list[str]:
        """Flags of a short run; `changes` by setting name, None leaves a setting out."""
        settings = {
            "hf_path": self.model,
            "random_init": "true",
            "train_data_path": self.train_data,
            "valid_data_path": self.valid_data,
            "seq_length": 32,
            "train_iters": 6,
            "global_batch_size": 8,
            "micro_batch_size": 2,
            "lr": 1e-3,
            "device": "cpu",
            "log_dir": self.folder / "log",
        } | changes
        return [
            text
            for name, value in settings.items()
            if value is not None
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]

    def run(
        self, ranks: int, *, timeout: float = 150, path: Path | None = None, **changes: Any
    ) -> subprocess.CompletedProcess:
        """pretrain_sft.py under torchrun; `path` holds packages that come before the installed ones."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        return subprocess.run(
            [*command, str(ROOT / "pretrain_sft.py"), *self.flags(**changes)],
            cwd=self.folder,
            env=launch_environment(path),
            capture_output=True,
            text=True,
            timeout=timeout,
        )


def read_metrics(log_directory: Path, split: str = "train") -> list[dict[str, Any]]:
    lines = (log_directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["split"] == split]


def read_conversations(path: Path) -> list[list[dict[str, str]]]:
    return [json.loads(line)["messages"] for line in path.read_text(encoding="utf-8").splitlines()]


def evaluate_with_transformers(model: Any, tokenizer: Any, conversations: list[list[dict[str, str]]]) -> float:
    """Mean loss over the last assistant turn and its end-of-turn token, each conversation on its own.

    For templates in which the turn ends with the token that ends it (white space behind it is left out).
    """
    import torch

    total, count = 0.0, 0
    for messages in conversations:
        prompt = tokenizer.apply_chat_template(messages[:-1], add_generation_prompt=True, return_dict=False)
        whole = tokenizer.apply_chat_template(messages, return_dict=False)
        while not tokenizer.decode(whole[-1]).strip():
            whole = whole[:-1]
        with torch.no_grad():
            logits = model(torch.tensor([whole])).logits[0].double().log_softmax(-1)
        for position in range(len(prompt), len(whole)):
            total -= logits[position - 1, whole[position]].item()
            count += 1
    return total / count
