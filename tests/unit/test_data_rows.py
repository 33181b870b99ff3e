"""Reading JSONL: what is accepted, and that each refusal names the file and the line."""

import json
import os

import pytest

from megatron_ext.data import read_rows

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def rows_of(tmp_path, text: str | bytes, **keys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(read_rows(path, **keys))


def test_reads_messages_with_their_further_keys_and_prompt_completion(tmp_path):
    named = {
        "messages": [{"role": "user", "content": "a", "name": "Ann"}, *GOOD["messages"][1:]],
        "tools": [{"x": 1}],
    }
    text = "\n".join(map(json.dumps, [named, {"prompt": "p", "completion": "c", "id": 3}]))
    first, second = rows_of(tmp_path, text)
    assert first.messages == named["messages"] and first.tools == [{"x": 1}] and first.line == 1
    assert second.messages == [{"role": "user", "content": "p"}, {"role": "assistant", "content": "c"}]
    assert second.line == 2 and second.where == f"{tmp_path / 'rows.jsonl'}, line 2"


def test_keys_can_be_named(tmp_path):
    text = json.dumps({"question": "q", "answer": "a"}) + "\n" + json.dumps({"chat": GOOD["messages"]})
    first, second = rows_of(tmp_path, text, messages_key="chat", prompt_key="question", completion_key="answer")
    assert [message["content"] for message in first.messages] == ["q", "a"]
    assert second.messages == GOOD["messages"]


def test_messages_win_over_prompt_and_null_counts_as_absent(tmp_path):
    both = GOOD | {"prompt": "p", "completion": "c"}
    nulls = {"messages": None, "prompt": "p", "completion": "c", "tools": None}
    first, second = rows_of(tmp_path, json.dumps(both) + "\n" + json.dumps(nulls))
    assert first.messages == GOOD["messages"]
    assert second.messages[1]["content"] == "c" and second.tools is None


@pytest.mark.parametrize("ending", ["", "\n", "\n\n\n", "\n  \n\r\n"])
def test_blank_lines_at_the_end_are_allowed(tmp_path, ending):
    assert [row.line for row in rows_of(tmp_path, json.dumps(GOOD) + "\n" + json.dumps(GOOD) + ending)] == [
        1,
        2,
    ]


def test_crlf_byte_order_mark_and_unicode_line_separators_inside_strings(tmp_path):
    content = "é\u2028漢\u0085🙂\x0bx"
    row = {"prompt": content, "completion": "line\r\nend\n"}
    text = "\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n" + json.dumps(GOOD) + "\r\n"
    first, second = rows_of(tmp_path, text)
    assert [message["content"] for message in first.messages] == [content, "line\r\nend\n"]
    assert second.messages == GOOD["messages"]


def test_a_turn_that_only_calls_tools_may_have_null_content(tmp_path):
    turn = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f"}}],
        "refusal": None,
    }
    messages = [
        GOOD["messages"][0],
        turn,
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "3"},
    ]
    (row,) = rows_of(tmp_path, json.dumps({"messages": messages}))
    assert row.messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f"}}],
    }


def message_row(*messages):
    return json.dumps({"messages": list(messages)})


USER, ASSISTANT = GOOD["messages"]
REFUSED = {
    "not JSON": ("{'a': 1}", "not JSON"),
    "cut off": ('{"messages": [', "not JSON"),
    "pretty-printed": ("[", "not JSON"),
    "not an object": ("[1, 2]", "expected a JSON object, found a list"),
    "no known key": (
        '{"text": "x"}',
        r"neither 'messages' nor both 'prompt' and 'completion' \(its keys: 'text'\)",
    ),
    "half a pair": ('{"prompt": "x"}', "neither 'messages' nor both"),
    "prompt not text": ('{"prompt": ["x"], "completion": "y"}', "prompt is a list, not a string"),
    "completion not text": ('{"prompt": "x", "completion": 4}', "completion is a number, not a string"),
    "messages not a list": ('{"messages": "x"}', "messages is a string"),
    "no messages": ('{"messages": []}', "messages is an empty list"),
    "message not an object": (message_row("x", ASSISTANT), r"messages\[0\] is a string"),
    "bad role": (
        message_row(USER, {"role": "bot", "content": "x"}),
        r"messages\[1\]\.role is 'bot'.*assistant",
    ),
    "no role": (message_row({"from": "human", "value": "x"}), r"messages\[0\]\.role is None"),
    "no assistant": (message_row(USER, USER), "no assistant turn"),
    "no content": (message_row({"role": "user"}, ASSISTANT), r"messages\[0\]\.content is missing or null"),
    "null answer": (
        message_row(USER, {"role": "assistant", "content": None}),
        r"messages\[1\]\.content is missing",
    ),
    "content in parts": (
        message_row(USER, {"role": "assistant", "content": [{"text": "x"}]}),
        r"\[1\]\.content is a list",
    ),
    "content true": (
        message_row(USER, {"role": "assistant", "content": True}),
        r"\[1\]\.content is a boolean",
    ),
    "tool calls not a list": (
        message_row(USER, ASSISTANT | {"tool_calls": "f"}),
        r"messages\[1\]\.tool_calls",
    ),
    "tool call by user": (message_row(USER | {"tool_calls": [{}]}, ASSISTANT), r"messages\[0\]\.tool_calls"),
    "tools not a list": (json.dumps(GOOD | {"tools": "f"}), "tools is a string"),
    "too many digits": ('{"id": ' + "9" * 5000 + "}", r"a whole number has more than \d+ digits: .*; shorten it"),
    "too deep": ('{"id": ' + "[" * 200_000 + "]" * 200_000 + "}", "nests too deeply to be read: .*; flatten"),
    "objects too deep": ('{"a":' * 200_000 + "1" + "}" * 200_000, "nests too deeply to be read: .*; flatten"),
    "repeated key": ('{"prompt": "x", "completion": "y", "prompt": "z"}', "the key 'prompt' is given twice"),
    "repeated key of a message": (
        '{"messages": [{"role": "user", "content": "a", "content": "b"}]}',
        "the key 'content' is given twice in one object; keep one",
    ),
    "half a surrogate pair": ('{"prompt": "a\\ud83d", "completion": "y"}', "surrogate pair at character 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_file_and_line(tmp_path, case):
    line, reason = REFUSED[case]
    with pytest.raises(ValueError, match=rf"rows\.jsonl, line 2: .*{reason}|rows\.jsonl, line 2: {reason}"):
        rows_of(tmp_path, json.dumps(GOOD) + "\n" + line + "\n" + json.dumps(GOOD) + "\n")


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not UTF-8"):
        rows_of(tmp_path, json.dumps(GOOD).encode() + b'\n{"prompt": "caf\xe9", "completion": "x"}\n')


def test_a_blank_line_between_rows_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: the line is blank"):
        rows_of(tmp_path, json.dumps(GOOD) + "\n\n\n" + json.dumps(GOOD) + "\n")


@pytest.mark.parametrize("text", ["", "\n", "\n \n"])
def test_a_file_without_rows_is_refused(tmp_path, text):
    with pytest.raises(ValueError, match=r"rows\.jsonl holds no row"):
        rows_of(tmp_path, text)


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        list(read_rows(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match="is a directory"):
        list(read_rows(tmp_path))


def test_special_files_and_impossible_names_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in ("/dev/null", tmp_path / "pipe"):
        with pytest.raises(ValueError, match=f"data file {path} is a device, pipe or socket, not a regular file; give"):
            list(read_rows(path))
    for path, reason in (("x" * 300, "has a name of more than 255 bytes"), ("a\0b", "holds a NUL character")):
        with pytest.raises(ValueError, match=rf"^data file .* {reason}[^\0]*; give the path of a JSONL file"):
            list(read_rows(path))
