"""Small tokenizers and chat templates built in code, and readers of a loss mask. Holds no tests."""

import json
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from megatron_ext.data import EncodedSample, Row

SPECIAL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
]
CORPUS = [
    "The tide turns at six and the boats come in before the evening rain.",
    "system user assistant You are a helpful assistant. Hello there, how are you today?",
    "A kettle boils at one hundred degrees; tea steeps for four minutes, no more.",
]

CHATML = """{% for message in messages %}\
{% if loop.first and message['role'] != 'system' %}<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

LLAMA3 = """{{ '<|begin_of_text|>' }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}\
{% if message.tool_calls %}{{ message.tool_calls[0].function | tojson }}{{ '<|eom_id|>' }}\
{% else %}{{ message['content'] | trim }}{{ '<|eot_id|>' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'user' %}\
{% if loop.index0 % 2 == 1 %}{{ raise_exception('roles must alternate') }}{% endif %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message.tool_calls %}\
{{ '[TOOL_CALLS] ' }}{{ message.tool_calls | tojson }}{{ '</s>' }}\
{% else %}{{ ' ' + message['content'] + '</s>' }}{% endif %}{% endfor %}"""

# the tags hold the newline too, which must not be trained
GENERATION = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% if message['role'] == 'assistant' %}\
{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}\
{% else %}{{ message['content'] + '<|im_end|>\\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# reasoning stays in the last turn only; an empty block is written where it has none
DROPS_REASONING = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}\
{% set text = message['content'] %}{% set reasoning = '' %}\
{% if '</think>' in text %}{% set reasoning = text.split('</think>')[0].split('<think>')[-1].strip() %}\
{% set text = text.split('</think>')[-1].lstrip() %}{% endif %}\
{% if message['role'] == 'assistant' and loop.last %}\
{{ '<think>\\n' + reasoning + '\\n</think>\\n\\n' }}{% endif %}\
{{ text + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


@cache
def _byte_level_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer.to_str()


def byte_level_tokenizer(
    template: str | None, *, bos: str | None = None, eos: str = "<|im_end|>", pad: str | None = None
) -> PreTrainedTokenizerFast:
    """Byte-level BPE (as GPT-2, Llama 3, Qwen, SmolLM). With `bos`, plain encoding puts a BOS in front."""
    backend = Tokenizer.from_str(_byte_level_json())
    if bos is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


@cache
def _metaspace_json() -> str:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", *SPECIAL_TOKENS, *(f"<0x{value:02X}>" for value in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=480, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    values = json.loads(tokenizer.to_str())
    # bytes are ordinary tokens: as special ones they would match the text "<0x41>"
    values["added_tokens"] = [token for token in values["added_tokens"] if not token["content"].startswith("<0x")]
    values["pre_tokenizer"] = None  # training words only; Llama's file has none
    return json.dumps(values)


def metaspace_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """BPE with byte fallback, like SentencePiece (Llama 2, Mistral): spaces belong to the word behind."""
    backend = Tokenizer.from_str(_metaspace_json())
    bos = ("<s>", backend.token_to_id("<s>"))
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


def row_of(*turns: str, system: str | None = None) -> Row:
    """A row of user and assistant turns in alternation."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": "assistant" if index % 2 else "user", "content": turn} for index, turn in enumerate(turns)]
    return Row(messages, source="rows.jsonl", line=7)


def trained_runs(tokenizer: PreTrainedTokenizerFast, sample: EncodedSample) -> list[str]:
    """The text of each unbroken run of trained targets, read from the tokens."""
    runs: list[list[int]] = []
    previous = 0.0
    for label, weight in zip(sample.labels, sample.loss_mask, strict=True):
        if weight and not previous:
            runs.append([])
        if weight:
            runs[-1].append(label)
        previous = weight
    return [tokenizer.decode(run, skip_special_tokens=False, clean_up_tokenization_spaces=False) for run in runs]


def all_tokens(sample: EncodedSample) -> list[int]:
    return sample.input_ids + sample.labels[-1:]


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path
