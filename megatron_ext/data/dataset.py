"""An encoded data set in memory: every row of a JSONL file is encoded once, at start, on every rank. Owns
what is kept out of training, the counts of it, and the fingerprint by which a resumed run recognises its
data. Not the order in which samples are seen (loader.py).
"""

import hashlib
from array import array
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.data.chat import ChatEncoder, EncodedSample
from megatron_ext.data.rows import read_rows


@dataclass(frozen=True)
class DataReport:
    """What became of a file's rows. `samples` = `rows` - `dropped`; tokens are those of the kept samples."""

    rows: int
    samples: int
    truncated: int  # kept or dropped rows longer than seq_length
    dropped: int  # rows whose trained tokens were all cut off
    empty_answers: int  # rows in which an assistant turn has no text: only its end-of-turn token is trained
    tokens: int
    trained_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.rows} rows: {self.samples} samples, {self.truncated} truncated, {self.dropped} dropped "
            f"(no trained token left), {self.empty_answers} with an empty answer; {self.tokens} tokens, "
            f"{self.trained_tokens} of them trained"
        )


class SFTDataset:
    """The samples of one JSONL file, in file order, without the rows that keep no trained token.

    `report` counts, `fingerprint` is a hash over all token ids and masks, `max_length` the longest sample,
    `largest_token_id` what the model's vocabulary has to hold.
    Raises ValueError for a bad row (naming file and line) and when no row keeps a trained token.
    """

    def __init__(
        self,
        path: str | Path,
        encoder: ChatEncoder,
        *,
        messages_key: str = "messages",
        prompt_key: str = "prompt",
        completion_key: str = "completion",
    ) -> None:
        self.path = str(path)
        # Flat arrays: lists of Python integers would take ten times the memory, on every rank.
        self._tokens = array("i")  # each sample's inputs and its last target
        self._masks = array("f")  # each sample's loss mask
        self._ends = array("q", [0])  # position in _masks where sample i - 1 ends; one token more each in _tokens
        self._truncated = array("b")
        num_rows = num_truncated = num_empty = 0
        rows = read_rows(path, messages_key=messages_key, prompt_key=prompt_key, completion_key=completion_key)
        for row in rows:
            sample = encoder.encode(row)
            num_rows += 1
            num_truncated += sample.truncated
            if any(sample.loss_mask):
                self._append(sample)
                num_empty += any(_is_empty_answer(message) for message in row.messages)
        if len(self) == 0:
            raise ValueError(
                f"data file {path}: truncation to seq_length {encoder.seq_length} cuts every trained token "
                f"of all {num_rows} rows; raise seq_length"
            )
        self.report = DataReport(
            rows=num_rows,
            samples=len(self),
            truncated=num_truncated,
            dropped=num_rows - len(self),
            empty_answers=num_empty,
            tokens=len(self._masks),
            trained_tokens=sum(1 for weight in self._masks if weight),
        )
        self.max_length = max(end - start for start, end in zip(self._ends, self._ends[1:], strict=False))
        self.largest_token_id = max(self._tokens)
        self.fingerprint = self._hash()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> EncodedSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of a data set of {len(self)}")
        start, end = self._ends[index], self._ends[index + 1]
        tokens = self._tokens[start + index : end + index + 1].tolist()
        return EncodedSample(
            input_ids=tokens[:-1],
            labels=tokens[1:],
            loss_mask=self._masks[start:end].tolist(),
            truncated=bool(self._truncated[index]),
        )

    def length(self, index: int) -> int:
        """Positions of sample `index`, without making it."""
        return self._ends[index + 1] - self._ends[index]

    def _append(self, sample: EncodedSample) -> None:
        self._tokens.extend(sample.input_ids)
        self._tokens.append(sample.labels[-1])
        self._masks.extend(sample.loss_mask)
        self._ends.append(self._ends[-1] + len(sample))
        self._truncated.append(sample.truncated)

    def _hash(self) -> str:
        digest = hashlib.sha256()
        for values in (self._ends, self._tokens, self._masks):
            digest.update(values.tobytes())
        return digest.hexdigest()


def _is_empty_answer(message: dict) -> bool:
    return message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls")
