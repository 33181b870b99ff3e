"""The encoded data set: what is kept, what is counted, and when its fingerprint changes."""

from pathlib import Path

import pytest
from data_helpers import CHATML, byte_level_tokenizer, write_jsonl

from megatron_ext.data import ChatEncoder, SFTDataset, read_rows

CHATS = [
    {"prompt": "When is high water?", "completion": "At six."},
    {"prompt": "Tea?", "completion": ""},
    {"messages": [{"role": role, "content": role + "!"} for role in ("user", "assistant", "user", "assistant")]},
    {"prompt": "The tide " * 30, "completion": "cut off"},
    {"prompt": "Long answer?", "completion": "The boats come in before the evening rain. " * 8},
]


def encoder(seq_length=100, template=CHATML):
    return ChatEncoder(byte_level_tokenizer(template), seq_length=seq_length)


def test_samples_equal_the_encoder_and_counts_are_right(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", CHATS)
    dataset = SFTDataset(path, encoder())
    encoded = [encoder().encode(row) for row in read_rows(path)]
    kept = [sample for sample in encoded if sum(sample.loss_mask)]
    assert [sample.truncated for sample in encoded] == [False, False, False, True, True]
    assert len(kept) == 4 and kept[-1].truncated
    assert [dataset[index] for index in range(len(dataset))] == kept
    report = dataset.report
    assert (report.rows, report.samples, report.dropped, report.truncated, report.empty_answers) == (
        5,
        4,
        1,
        2,
        1,
    )
    assert report.tokens == sum(map(len, kept))
    assert report.trained_tokens == sum(sum(sample.loss_mask) for sample in kept)
    assert dataset.max_length == 100
    assert "1 dropped" in str(report) and "2 truncated" in str(report)


def test_index_outside_the_data_set(tmp_path):
    dataset = SFTDataset(write_jsonl(tmp_path / "rows.jsonl", CHATS), encoder())
    for index in (-1, 4):
        with pytest.raises(IndexError):
            dataset[index]


def test_every_trained_token_cut_from_every_row_is_an_error(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", CHATS)
    with pytest.raises(ValueError, match="seq_length 8 cuts every trained token of all 5 rows; raise seq_length"):
        SFTDataset(path, encoder(seq_length=8))


def test_keys_are_passed_on_and_bad_rows_are_named(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    dataset = SFTDataset(path, encoder(), prompt_key="question", completion_key="answer")
    assert len(dataset) == 1
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1"):
        SFTDataset(path, encoder())


def test_fingerprint_changes_with_tokens_masks_and_order_only(tmp_path):
    def fingerprint(rows, name="rows.jsonl", **options):
        return SFTDataset(write_jsonl(tmp_path / name, rows), encoder(**options)).fingerprint

    base = fingerprint(CHATS)
    assert fingerprint(CHATS, name="copy.jsonl") == base
    assert fingerprint([{**CHATS[0], "id": 4}, *CHATS[1:]]) == base
    # the same tokens, another mask: only the first answer is tagged
    tagged = CHATML.replace(
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}",
        "{{ '<|im_start|>' + message['role'] + '\\n' }}"
        "{% if message['role'] == 'assistant' and loop.index0 == 1 %}"
        "{% generation %}{{ message['content'] }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ message['content'] }}<|im_end|>{% endif %}{{ '\\n' }}",
    )
    first, second = (SFTDataset(tmp_path / "rows.jsonl", encoder(template=template)) for template in (CHATML, tagged))
    assert [sample.input_ids for sample in first] == [sample.input_ids for sample in second]
    assert [sample.loss_mask for sample in first] != [sample.loss_mask for sample in second]
    changed = [
        second.fingerprint,
        fingerprint(CHATS[1:]),
        fingerprint([CHATS[1], CHATS[0], *CHATS[2:]]),
        fingerprint([{**CHATS[0], "completion": "At seven."}, *CHATS[1:]]),
        fingerprint([{**CHATS[0], "completion": "At six!"}, *CHATS[1:]]),  # as many tokens, the same mask
        fingerprint(CHATS, seq_length=99),
    ]
    assert len({base, *changed}) == len(changed) + 1


def test_the_shipped_example_data_is_clean():
    folder = Path(__file__).parents[2] / "examples" / "data"
    prompts, sizes = {}, {}
    for name in ("train", "held_out"):
        path = folder / f"{name}.jsonl"
        rows = list(read_rows(path))
        prompts[name] = [row.messages[0]["content"] for row in rows]
        sizes[name] = len(rows)
        assert path.stat().st_size < 200_000
        for row in rows:
            for message in row.messages:
                parts = message["content"].split(" | ")
                if message["role"] == "assistant":
                    assert [part.split(": ")[0] for part in parts] == ["Short answer", "Why", "Next step"], row.where
    assert sizes["train"] >= 300 and sizes["held_out"] == 24
    every = [prompt.casefold() for name in prompts for prompt in prompts[name]]
    assert len(set(every)) == len(every)
