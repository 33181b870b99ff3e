"""The data of one run, read and encoded as the configuration says. Needs no process group, so that every mistake in
tokenizer or files is found before any rank waits for another.
"""

from dataclasses import dataclass, replace
from typing import Self

from megatron_ext.config import Config
from megatron_ext.data.chat import ChatEncoder
from megatron_ext.data.dataset import SFTDataset
from megatron_ext.data.tokenizer import find_pad_id, load_tokenizer


@dataclass(frozen=True)
class RunData:
    """What is trained on, what is evaluated by set name, and the token id that fills rows up."""

    train: SFTDataset | None  # None in an evaluation run
    evaluation: dict[str, SFTDataset]
    pad_id: int

    def named(self) -> list[tuple[str, SFTDataset]]:
        """Every data set with its name, `train` first."""
        return [*([("train", self.train)] if self.train is not None else []), *self.evaluation.items()]

    def for_vocabulary(self, vocab_size: int) -> Self:
        """The same data for a model of this size; padding is any id that the model has.

        Raises:
            ValueError: a token id is none of the model's (it would look up rows that are not there), naming the data
                file, the id and the model's size.
        """
        for _, dataset in self.named():
            if dataset.largest_token_id >= vocab_size:
                raise ValueError(
                    f"data file {dataset.path} is encoded with token id {dataset.largest_token_id}, but the model's "
                    f"vocab_size is {vocab_size}; give the model's own tokenizer (tokenizer_path)"
                )
        return replace(self, pad_id=self.pad_id if self.pad_id < vocab_size else 0)


def load_run_data(config: Config) -> RunData:
    """Encode every evaluation set and, unless the run only evaluates, the training file.

    Raises:
        ValueError: naming the set, the file, the row and the remedy, or what is wrong with the tokenizer.
    """
    data = config.data
    trains = not config.evaluation.eval_only
    assert not trains or data.train_data_path is not None, "the command line requires it"
    tokenizer = load_tokenizer(config.tokenizer_path, config.model.chat_template)
    encoder = ChatEncoder(tokenizer, seq_length=data.seq_length)

    def encode(path: str) -> SFTDataset:
        return SFTDataset(
            path,
            encoder,
            messages_key=data.messages_key,
            prompt_key=data.prompt_key,
            completion_key=data.completion_key,
        )

    def encode_set(name: str, path: str) -> SFTDataset:
        try:
            return encode(path)
        except ValueError as error:
            raise ValueError(f"evaluation set {name}: {error}") from None

    return RunData(
        train=encode(data.train_data_path) if trains and data.train_data_path is not None else None,
        evaluation={name: encode_set(name, path) for name, path in config.evaluation_sets.items()},
        pad_id=find_pad_id(tokenizer),
    )
