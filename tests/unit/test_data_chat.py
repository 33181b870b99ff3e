"""What is trained: the loss mask, read back as text, is the answers, over many templates and tokenizers."""

import re

import pytest
from data_helpers import (
    CHATML,
    DROPS_REASONING,
    GENERATION,
    LLAMA3,
    MISTRAL,
    all_tokens,
    byte_level_tokenizer,
    metaspace_tokenizer,
    row_of,
    trained_runs,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.data import ChatEncoder, Row

TOOL_CALL = {"type": "function", "function": {"name": "tide_table", "arguments": {"day": "Monday"}}}


def encoder_for(template, seq_length=512, **options):
    return ChatEncoder(byte_level_tokenizer(template, **options), seq_length=seq_length)


CASES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "generation tags": (GENERATION, "<|im_end|>"),
}


@pytest.mark.parametrize("case", CASES)
def test_trains_each_answer_and_its_end_of_turn_and_nothing_else(case):
    template, end_of_turn = CASES[case]
    encoder = encoder_for(template)
    row = row_of("Hello", "Hi there.", "And 漢字?", "Yes: 漢字 🙂, of course", system="Be short.")
    sample = encoder.encode(row)
    answers = ["Hi there.", "Yes: 漢字 🙂, of course"]
    assert trained_runs(encoder.tokenizer, sample) == [answer + end_of_turn for answer in answers]


@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_the_served_template_and_labels_are_shifted_once(case):
    encoder = encoder_for(CASES[case][0])
    row = row_of("Hello", "Hi there.", "Again", "Hi again.")
    sample = encoder.encode(row)
    served = encoder.tokenizer.apply_chat_template(row.messages, tokenize=True, return_dict=True)["input_ids"]
    assert all_tokens(sample) == served
    assert sample.labels == served[1:] and sample.input_ids == served[:-1]
    assert len(sample.loss_mask) == len(sample) == len(served) - 1


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=30)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), case=st.sampled_from(sorted(CASES)))
def test_any_text_is_found_again(turns, case):
    template, end_of_turn = CASES[case]
    encoder = encoder_for(template)
    sample = encoder.encode(row_of(*(text for turn in turns for text in turn)))
    expected = [(answer.strip() if case == "llama3" else answer) + end_of_turn for _, answer in turns]
    assert trained_runs(encoder.tokenizer, sample) == expected


@pytest.mark.parametrize(
    "content", ["", " ", "  two spaces  ", "\r\n\r\nlines\r\n", "a\n\nb\n", "<|im_end|>", "a<|im_end|>b"]
)
def test_white_space_empty_and_special_contents(content):
    encoder = encoder_for(CHATML)
    sample = encoder.encode(row_of("assistant\n", content, content, "assistant"))
    assert trained_runs(encoder.tokenizer, sample) == [content + "<|im_end|>", "assistant<|im_end|>"]


def test_answers_equal_to_the_question_or_to_each_other():
    encoder = encoder_for(CHATML)
    sample = encoder.encode(row_of("Hello", "Hello", "Hello", "Hello", system="Hello"))
    assert trained_runs(encoder.tokenizer, sample) == ["Hello<|im_end|>"] * 2
    assert sample.loss_mask.index(1.0) > len(encoder.tokenizer("<|im_start|>system\nHello<|im_end|>").input_ids)


def test_pad_equal_to_end_of_turn_changes_nothing():
    row = row_of("Hello", "Hi.", "Bye", "Goodbye.")
    plain = encoder_for(CHATML).encode(row)
    assert encoder_for(CHATML, pad="<|im_end|>").encode(row) == plain
    assert encoder_for(CHATML, bos="<|im_start|>", pad="<|im_end|>").encode(row) == plain


@pytest.mark.parametrize("build", ["byte-level", "metaspace"])
def test_mistral_template_has_one_bos_and_trains_the_first_word(build):
    tokenizer = (
        byte_level_tokenizer(MISTRAL, bos="<s>", eos="</s>") if build == "byte-level" else metaspace_tokenizer(MISTRAL)
    )
    bos = tokenizer.bos_token_id
    assert tokenizer("x").input_ids[0] == bos  # plain encoding would add a second one
    encoder = ChatEncoder(tokenizer, seq_length=512)
    sample = encoder.encode(row_of("When is the tide?", "At six é 漢.", "Thanks", "Welcome"))
    assert all_tokens(sample).count(bos) == 1 and sample.input_ids[0] == bos
    runs = [run.removeprefix(" ") for run in trained_runs(tokenizer, sample)]
    assert runs == ["At six é 漢.</s>", "Welcome</s>"]


def test_a_first_token_that_begins_in_the_header_is_trained():
    # "Assistant: " ends with a space that the tokenizer gives to the answer's first word
    template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '</s>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    for tokenizer in (byte_level_tokenizer(template, eos="</s>"), metaspace_tokenizer(template)):
        sample = ChatEncoder(tokenizer, seq_length=64).encode(row_of("Hello", "the tide"))
        assert [run.strip() for run in trained_runs(tokenizer, sample)] == ["the tide</s>"]


def test_only_the_first_closing_token_is_trained_where_the_template_closes_the_conversation_too():
    template = CHATML.replace(
        "{% if add_generation_prompt %}",
        "{% if not add_generation_prompt %}<|endoftext|>{% endif %}{% if add_generation_prompt %}",
    )
    encoder = encoder_for(template)
    row = row_of("Hello", "Hi.", "Bye", "Goodbye.")
    assert encoder.tokenizer.decode(all_tokens(encoder.encode(row))).endswith("<|im_end|>\n<|endoftext|>")
    assert trained_runs(encoder.tokenizer, encoder.encode(row)) == ["Hi.<|im_end|>", "Goodbye.<|im_end|>"]


def test_the_closing_token_is_left_out_behind_reasoning_too():
    template = DROPS_REASONING.replace(
        "{% if add_generation_prompt %}",
        "{% if not add_generation_prompt %}<|endoftext|>{% endif %}{% if add_generation_prompt %}",
    )
    encoder = encoder_for(template)
    sample = encoder.encode(row_of("When?", "<think>The table says six.</think>At six."))
    assert encoder.tokenizer.decode(all_tokens(sample)).endswith("<|im_end|>\n<|endoftext|>")
    rendered = "<think>\nThe table says six.\n</think>\n\nAt six."
    assert trained_runs(encoder.tokenizer, sample) == [rendered + "<|im_end|>"]


def test_a_template_ending_turns_with_white_space_trains_it():
    template = (
        "{% for m in messages %}{{ '### ' + m['role'] + ':\\n' + m['content'] + '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
    )
    encoder = encoder_for(template)
    sample = encoder.encode(row_of("Hello", "Hi.", "Bye", "Goodbye."))
    assert trained_runs(encoder.tokenizer, sample) == ["Hi.\n\n", "Goodbye.\n\n"]


def test_an_end_of_turn_that_is_plain_text_is_trained_without_the_newline_behind():
    encoder = encoder_for(CHATML.replace("<|im_end|>", "[END]"))
    sample = encoder.encode(row_of("Hello", "Hi.", "Bye", "Goodbye."))
    assert trained_runs(encoder.tokenizer, sample) == ["Hi.[END]", "Goodbye.[END]"]


def test_conversation_may_begin_with_the_assistant_and_end_with_the_user():
    messages = [
        {"role": "assistant", "content": "Welcome!"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": "Bye"},
    ]
    encoder = encoder_for(CHATML)
    assert trained_runs(encoder.tokenizer, encoder.encode(Row(messages))) == [
        "Welcome!<|im_end|>",
        "Hi.<|im_end|>",
    ]


# -- reasoning, tools ----------------------------------------------------------------------------------------


def test_reasoning_in_the_last_turn_is_trained():
    encoder = encoder_for(DROPS_REASONING)
    answer = "<think>\nThe tide table says six.\n</think>\n\nAt six."
    sample = encoder.encode(row_of("When?", answer))
    assert trained_runs(encoder.tokenizer, sample) == [answer + "<|im_end|>"]


def test_a_template_that_writes_an_empty_reasoning_block_still_gives_exact_turns():
    encoder = encoder_for(DROPS_REASONING)
    sample = encoder.encode(row_of("When?", "At six.", "And then?", "At noon."))
    assert trained_runs(encoder.tokenizer, sample) == [
        "At six.<|im_end|>",
        "<think>\n\n</think>\n\nAt noon.<|im_end|>",
    ]


def test_reasoning_dropped_from_an_earlier_turn_is_refused_with_the_row():
    row = row_of("When?", "<think>\nTable.\n</think>\n\nAt six.", "And then?", "At noon.")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 7: the end of .*messages\[1\].*generation"):
        encoder_for(DROPS_REASONING).encode(row)


def test_reasoning_under_its_own_key_is_refused_when_the_template_ignores_it():
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "6", "reasoning_content": "Hm."},
    ]
    with pytest.raises(ValueError, match=r"line 3: .*messages\[1\]\.reasoning_content"):
        encoder_for(CHATML).encode(Row(messages, source="a.jsonl", line=3))


def test_earlier_messages_rendered_differently_later_are_refused_with_the_row():
    # the system text is moved into the last user message, as some Mistral templates do
    template = (
        "{% set system = messages[0]['content'] if messages[0]['role'] == 'system' else '' %}"
        "{% for m in messages if m['role'] != 'system' %}{% if m['role'] == 'user' %}"
        "{% set last = loop.last or loop.index0 + 2 == loop.length %}"
        "{{ '[INST] ' + (system + ' ' if last else '') + m['content'] + '[/INST]' }}"
        "{% else %}{{ m['content'] + '</s>' }}{% endif %}{% endfor %}"
    )
    encoder = encoder_for(template)
    assert trained_runs(encoder.tokenizer, encoder.encode(row_of("a", "b", system="s"))) == ["b</s>"]
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 7: .*messages\[2\].*messages before it"):
        encoder.encode(row_of("a", "b", "c", "d", system="s"))


NEWLINE_BEHIND_CALLS = LLAMA3.replace("'<|eom_id|>'", "'<|eom_id|>\\n'")


@pytest.mark.parametrize(
    ("template", "end", "end_of_turn"),
    [
        (LLAMA3, "}<|eom_id|>", "<|eot_id|>"),
        (NEWLINE_BEHIND_CALLS, "}<|eom_id|>", "<|eot_id|>"),
        (MISTRAL, "]</s>", "</s>"),
    ],
)
def test_a_tool_call_is_trained_and_the_tool_result_is_not(template, end, end_of_turn):
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
        {"role": "tool", "content": "high water 06:00"},
        {"role": "assistant", "content": "At six."},
    ]
    tokenizer = byte_level_tokenizer(template.replace("== 'user'", "in ('user', 'tool')"))
    first, last = trained_runs(tokenizer, ChatEncoder(tokenizer, seq_length=512).encode(Row(messages)))
    assert "tide_table" in first and first.endswith(end)
    assert last.strip() == "At six." + end_of_turn


def test_a_tool_call_that_the_template_ignores_is_refused():
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
    ]
    with pytest.raises(ValueError, match=r"messages\[1\]\.tool_calls"):
        encoder_for(CHATML).encode(Row(messages))


def test_tools_of_a_row_reach_the_template():
    template = "{% if tools %}{{ tools[0].name }}{% endif %}" + CHATML
    encoder = encoder_for(template)
    row = Row(row_of("a", "b").messages, tools=[{"name": "tide_table"}])
    assert encoder.tokenizer.decode(all_tokens(encoder.encode(row))).startswith("tide_table<|im_start|>")
    assert trained_runs(encoder.tokenizer, encoder.encode(row)) == ["b<|im_end|>"]


# -- generation tags -----------------------------------------------------------------------------------------


def test_tags_without_the_end_of_turn_token_still_train_it():
    template = GENERATION.replace(
        "{% generation %}{{ message['content'] + '<|im_end|>\\n' }}{% endgeneration %}",
        "{% generation %}{{ message['content'] }}{% endgeneration %}{{ '<|im_end|>\\n' }}",
    )
    assert template != GENERATION
    encoder = encoder_for(template)
    sample = encoder.encode(row_of("Hello", "Hi.", "Bye", ""))
    assert trained_runs(encoder.tokenizer, sample)[0] == "Hi.<|im_end|>"


def test_tags_make_a_template_usable_that_rewrites_earlier_turns():
    tagged = DROPS_REASONING.replace(
        "{{ text + '<|im_end|>\\n' }}",
        "{% if message['role'] == 'assistant' %}"
        "{% generation %}{{ text + '<|im_end|>\\n' }}{% endgeneration %}"
        "{% else %}{{ text + '<|im_end|>\\n' }}{% endif %}",
    )
    encoder = encoder_for(tagged)
    sample = encoder.encode(row_of("When?", "<think>\nTable.\n</think>\n\nAt six.", "And then?", "At noon."))
    assert trained_runs(encoder.tokenizer, sample) == ["At six.<|im_end|>", "At noon.<|im_end|>"]


def test_tags_in_the_wrong_place_are_refused_with_the_row():
    row = row_of("What is the time?", "At six.")
    around_user = GENERATION.replace("== 'assistant'", "== 'user'")
    with pytest.raises(
        ValueError, match=r"line 7: .*'What is the time\?<\|im_end\|>'.*not the text of an assistant turn"
    ):
        encoder_for(around_user).encode(row)
    nowhere = GENERATION.replace("== 'assistant'", "== 'nobody'")
    with pytest.raises(ValueError, match=r"line 7: .*mark no text"):
        encoder_for(nowhere).encode(row)


# -- length --------------------------------------------------------------------------------------------------


def test_truncation_keeps_seq_length_inputs_and_their_targets():
    row = row_of("Hello", "Hi there, the tide turns at six.")
    whole = encoder_for(CHATML).encode(row)
    length = len(whole)
    assert not whole.truncated
    assert encoder_for(CHATML, seq_length=length).encode(row) == whole
    cut = encoder_for(CHATML, seq_length=length - 3).encode(row)
    assert cut.truncated
    assert (cut.input_ids, cut.labels, cut.loss_mask) == (
        whole.input_ids[:-3],
        whole.labels[:-3],
        whole.loss_mask[:-3],
    )
    assert not any(encoder_for(CHATML, seq_length=3).encode(row).loss_mask)


def test_truncation_and_padding_stored_in_the_tokenizer_are_ignored():
    row = row_of("Hello", "Hi there, the tide turns at six.")
    tokenizer = byte_level_tokenizer(CHATML, pad="<|im_end|>")
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=99)
    tokenizer.model_max_length = 5
    assert ChatEncoder(tokenizer, seq_length=512).encode(row) == encoder_for(CHATML).encode(row)


# -- templates -----------------------------------------------------------------------------------------------


def test_no_template_is_an_error_with_the_remedy():
    with pytest.raises(ValueError, match=r"no chat template.*set chat_template"):
        encoder_for(None)
    tokenizer = byte_level_tokenizer(None)
    assert ChatEncoder(tokenizer, CHATML, seq_length=64).encode(row_of("a", "b")) == encoder_for(CHATML).encode(
        row_of("a", "b")
    )


def test_given_template_replaces_the_tokenizers_own():
    tokenizer = byte_level_tokenizer(LLAMA3)
    sample = ChatEncoder(tokenizer, CHATML, seq_length=64).encode(row_of("a", "b"))
    assert trained_runs(tokenizer, sample) == ["b<|im_end|>"]


def test_a_header_that_the_generation_prompt_lacks_is_refused():
    without_prompt = CHATML[: CHATML.index("{% if add_generation_prompt %}")]
    with pytest.raises(ValueError, match=re.escape(repr("<|im_start|>assistant\n"))):
        encoder_for(without_prompt)


RAISING = {  # Jinja text, what is said of it
    "{{ 1 // 0 }}": "ZeroDivisionError: integer division or modulo by zero",
    "{{ 10.0 ** 400 }}": "OverflowError: ",
    "{{ range(10 ** 9) }}": "OverflowError: Range too big",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError: ",
    "{{ {}.popitem() }}": "",
    "{{ 'x'.encode('none') }}": "LookupError: unknown encoding",
    "{{ 'x' + none }}": "TypeError: ",
    "{{ [] | max(attribute='x') + nothing.at.all }}": "'nothing' is undefined",
    "{{ raise_exception('no storms') }}": "no storms",
}


@pytest.mark.parametrize("template", [CHATML, GENERATION], ids=["plain", "tagged"])
@pytest.mark.parametrize("fault", RAISING)
def test_whatever_a_template_raises_names_the_row(fault, template):
    encoder = encoder_for("{% if messages[0].content == 'storm' %}" + fault + "{% endif %}" + template)
    row = Row([{"role": "user", "content": "storm"}, {"role": "assistant", "content": "x"}], source="f.jsonl", line=7)
    pattern = rf"^f\.jsonl, line 7: the chat template refuses .*\({re.escape(RAISING[fault])}.*\); correct the row"
    with pytest.raises(ValueError, match=pattern):
        encoder.encode(row)


@pytest.mark.parametrize("fault", RAISING)
def test_a_template_that_always_raises_is_refused(fault):
    with pytest.raises(ValueError, match=r"^the chat template cannot render a user and an assistant message"):
        encoder_for(fault + CHATML)


def test_a_template_that_refuses_a_conversation_names_the_row():
    row = row_of("a", "b", system="s")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 7: .*roles must alternate"):
        encoder_for(MISTRAL).encode(row)


def test_the_date_in_a_template_does_not_change_from_day_to_day():
    template = "{{ 'Today: ' + strftime_now('%d %b %Y') }}" + CHATML
    encoder = encoder_for(template)
    assert "Today: 26 Jul 2024<" in encoder.tokenizer.decode(all_tokens(encoder.encode(row_of("a", "b"))))
    with pytest.raises(ValueError, match="today's date"):
        encoder_for("{% set f = '%d' %}{{ strftime_now(f) }}" + CHATML)
