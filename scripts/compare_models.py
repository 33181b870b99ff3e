"""Prints what a fine-tuning run changed: evaluation loss and one answer, before and after, as a short table.

It owns the table. Models are run through transformers alone, on the CPU, so the exported model is seen as any
other program would see it; losses come from the run's metrics file and are not computed again.
"""

import argparse
import json
import os
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:  # both take seconds to import; mistakes on the command line are told before
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Row:
    model: str
    loss: str
    answer: str


def read_losses(path: Path, split: str, loss: str) -> tuple[dict, dict]:
    """Returns iteration and loss of the first and the last record of one evaluation set; ValueError names what is
    missing."""
    if not path.is_file():
        raise ValueError(f"--metrics {path} is not a file; it is the metrics.jsonl in the run's folder")
    records, splits = [], set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            splits.add(record["split"])
            if record["split"] == split:
                records.append({"iteration": int(record["iteration"]), "loss": float(record[loss])})
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}, line {number}: no metrics record ({error!r})") from None
    if len(records) < 2:
        raise ValueError(
            f"{path} holds {len(records)} records of --split {split}, and two are needed, from before "
            f"and after training; evaluate at both ends, or use one of: {', '.join(sorted(splits)) or 'none'}"
        )
    return records[0], records[-1]


def check_model(option: str, path: Path) -> None:
    if path.is_dir():
        if not list(path.glob("*.safetensors")):
            raise ValueError(f"{option} {path} holds no *.safetensors; give a Hugging Face model directory")
    elif not (path.is_file() and path.suffix == ".gguf"):
        raise ValueError(f"{option} {path} is neither a Hugging Face model directory nor a .gguf file")


def load_model(path: Path, config: "PretrainedConfig") -> "PreTrainedModel":
    """A model in float32. A GGUF file's own config is not used: reading it takes longer than an answer."""
    import torch
    from transformers import AutoModelForCausalLM

    if path.is_dir():
        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    return AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=config, dtype=torch.float32, local_files_only=True
    )


def answer(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompt: str, max_new_tokens: int) -> str:
    """The model's greedy answer to one user turn."""
    import torch

    # Tokens come one after the other: a second thread gains nothing, and on a busy machine loses a lot.
    torch.set_num_threads(1)
    if tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        messages = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
    with torch.inference_mode():
        output = model.generate(
            input_ids=inputs["input_ids"],  # [1, prompt]
            attention_mask=inputs["attention_mask"],
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            max_new_tokens=max_new_tokens,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
        )[0]  # [prompt + answer]
    new_tokens = output[inputs["input_ids"].shape[1] :]
    text = tokenizer.decode(new_tokens, skip_special_tokens=True).strip()
    stopped = len(new_tokens) < max_new_tokens or new_tokens[-1].item() == tokenizer.eos_token_id
    return text if stopped else text + " ..."


def format_table(rows: list[Row], width: int, loss: str) -> str:
    """Left-aligned columns; only the answer, the last one, is wrapped."""
    header = Row("model", f"eval {loss}", "answer")
    model_width = max(len(row.model) for row in [header, *rows])
    loss_width = max(len(row.loss) for row in [header, *rows])
    answer_width = max(24, width - model_width - loss_width - 4)

    def line(model: str, loss: str, text: str) -> str:
        return f"{model:<{model_width}}  {loss:>{loss_width}}  {text}".rstrip()

    lines = [line(*vars(header).values()), line("-" * model_width, "-" * loss_width, "-" * answer_width)]
    for row in rows:
        paragraphs = row.answer.splitlines() or [""]
        wrapped = [part for text in paragraphs for part in textwrap.wrap(text, answer_width)]
        first, *rest = wrapped or ["(nothing)"]
        lines.append(line(row.model, row.loss, first))
        lines += [line("", "", text) for text in rest]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", type=Path, help="model before training: .gguf file or Hugging Face directory")
    parser.add_argument("--after", type=Path, required=True, help="Hugging Face directory written by the run")
    parser.add_argument("--metrics", type=Path, required=True, help="the run's metrics.jsonl")
    parser.add_argument("--split", default="validation", help="evaluation set (default: validation)")
    parser.add_argument("--loss", default="loss", help="which of the run's losses to show (default: loss)")
    parser.add_argument("--prompt", required=True, help="one user turn, given to both models")
    parser.add_argument("--max-new-tokens", type=int, default=60, help="length of an answer (default: 60)")
    return parser.parse_args()


def fail(error: Exception) -> NoReturn:
    print(f"compare_models: {error}", file=sys.stderr)
    sys.exit(1)


def main() -> None:
    arguments = parse_arguments()
    try:
        first, last = read_losses(arguments.metrics, arguments.split, arguments.loss)
        check_model("--after", arguments.after)
        if arguments.before is not None:
            check_model("--before", arguments.before)
    except ValueError as error:
        fail(error)

    # Read by the libraries when they are imported: no look-ups on a hub, no progress bars before the table.
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

    rows = []
    try:
        # Fine-tuning changes neither, so both models are asked with the ones that the run wrote.
        config = AutoConfig.from_pretrained(arguments.after, local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(arguments.after, local_files_only=True)
        for name, path, record in (("before", arguments.before, first), ("after", arguments.after, last)):
            text = "(not asked)"
            if path is not None:
                model = load_model(path, config)
                text = answer(model.eval(), tokenizer, arguments.prompt, arguments.max_new_tokens)
            rows.append(Row(f"{name} (iteration {record['iteration']})", f"{record['loss']:.4f}", text))
    except (OSError, ValueError, SafetensorError) as error:
        fail(error)
    print(f"\nPrompt: {arguments.prompt}\n")
    print(format_table(rows, min(shutil.get_terminal_size().columns, 110), arguments.loss))


if __name__ == "__main__":
    main()
