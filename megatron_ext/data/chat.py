"""Turns one conversation into token ids, targets and a loss mask. Where an assistant turn begins and ends in
the text is found in template.py; here turns are carried over to tokens by character offset.

The text is tokenized once, as a whole, as it will be when served. A token is trained if it carries at least
one character of a turn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from megatron_ext.data.rows import Row
from megatron_ext.data.template import ChatTemplate


@dataclass(frozen=True)
class EncodedSample:
    """One sequence, already shifted: `labels[t]` is the target of position t, `loss_mask[t]` its weight, 0/1.

    All three are equally long: one less than the conversation has tokens, at most seq_length.
    """

    input_ids: list[int]
    labels: list[int]
    loss_mask: list[float]
    truncated: bool = False

    def __len__(self) -> int:
        return len(self.input_ids)


class ChatEncoder:
    """Encodes rows with a tokenizer and its chat template, or `chat_template` (template text) in its place.

    `seq_length` counts model inputs, so a conversation of seq_length + 1 tokens still fits. Raises ValueError
    when the tokenizer keeps no offsets or there is no usable template.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None, *, seq_length: int
    ) -> None:
        if not tokenizer.is_fast:
            raise ValueError(f"tokenizer {type(tokenizer).__name__} gives no character offsets; use a fast tokenizer")
        if seq_length < 1:
            raise ValueError(f"seq_length {seq_length} leaves no position to train on; give at least 1")
        self.tokenizer = tokenizer
        self.seq_length = seq_length
        self._template = ChatTemplate(tokenizer, chat_template)

    def encode(self, row: Row) -> EncodedSample:
        """The row's tokens; without a 1 in the mask if truncation cut every trained token (callers drop it).

        Raises ValueError naming the row when the template refuses it or its assistant turns cannot be found.
        """
        text, spans = self._template.render(row)
        # truncation and padding are off explicitly: a tokenizer.json may store either
        encoding = self.tokenizer(
            text,
            add_special_tokens=False,  # the template has written them, BOS included
            truncation=False,
            padding=False,
            return_attention_mask=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        token_ids = encoding["input_ids"]
        trained = _mark_tokens(encoding["offset_mapping"], spans, row)
        limit = self.seq_length + 1
        return EncodedSample(
            input_ids=token_ids[: limit - 1][: len(token_ids) - 1],
            labels=token_ids[1:limit],
            loss_mask=trained[1:limit],
            truncated=len(token_ids) > limit,
        )


def _mark_tokens(offsets: Sequence[tuple[int, int]], spans: list[tuple[int, int]], row: Row) -> list[float]:
    """1.0 for each token that overlaps a span, else 0.0; spans are in order and do not overlap."""
    marks = [0.0] * len(offsets)
    counts = [0] * len(spans)
    current = 0
    for position, (start, end) in enumerate(offsets):
        while current < len(spans) and spans[current][1] <= start:
            current += 1
        if current == len(spans):
            break
        if end > spans[current][0]:
            marks[position] = 1.0
            counts[current] += 1
    for (start, end), count in zip(spans, counts, strict=True):
        if count == 0 and end > start:
            raise ValueError(
                f"{row.where}: no token lies in the assistant turn at characters {start} to {end}, so the "
                "tokenizer's offsets do not describe the text; use a tokenizer that keeps offsets"
            )
    return marks
