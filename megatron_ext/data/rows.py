"""Reads JSONL training files strictly: each line becomes a `Row` of checked chat messages, or an error that
names the file and the line. Owns the file format and nothing behind it: no template, no tokens.

Two shapes of row are understood:

    {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
    {"prompt": "...", "completion": "..."}

`messages` wins where a row has both; keys that are not named here are ignored. A message keeps its further
keys (`tool_calls`, `name`, `reasoning_content`, ...), because chat templates read them.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.config.paths import path_in_words, why_no_file

ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Row:
    """One conversation and where it was read.

    `messages` each hold `role` and a str `content`; at least one is an assistant turn. `line` counts from 1.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    source: str = "<memory>"
    line: int = 1

    @property
    def where(self) -> str:
        return f"{self.source}, line {self.line}"


def read_rows(
    path: str | Path,
    *,
    messages_key: str = "messages",
    prompt_key: str = "prompt",
    completion_key: str = "completion",
) -> Iterator[Row]:
    """Yield the rows of a JSONL file (UTF-8, LF or CRLF, blank lines allowed at the end only), one line at a
    time.

    Raises ValueError naming file and line for anything else, and for a file without a row.
    """
    source = str(path)
    file = Path(path)
    reason = why_no_file(file)
    if reason is not None:
        raise ValueError(
            f"data file {path_in_words(source)} {reason}; give the path of a JSONL file, one JSON object per line"
        )
    num_rows = 0
    first_blank_line = 0
    # Bytes, not text: text mode and str.splitlines() also end lines at characters that JSON strings may hold.
    with file.open("rb") as lines:
        for line, raw in enumerate(lines, start=1):
            if not raw.strip():
                first_blank_line = first_blank_line or line
                continue
            if first_blank_line:
                raise ValueError(f"{source}, line {first_blank_line}: the line is blank but rows follow it; remove it")
            where = f"{source}, line {line}"
            values = _parse_line(raw, line, where)
            messages = _row_messages(values, messages_key, prompt_key, completion_key, where)
            yield Row(messages, _check_tools(values, where), source, line)
            num_rows += 1
    if num_rows == 0:
        raise ValueError(f"data file {source} holds no row; write one JSON object per line into it")


def _parse_line(raw: bytes, line: int, where: str) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8-sig" if line == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); save it as UTF-8") from error
    try:
        values = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error}): {_shorten(text)}; JSONL holds one complete JSON object per line"
        ) from error
    except RecursionError as error:
        raise ValueError(f"{where}: nests too deeply to be read: {_shorten(text)}; flatten the row") from error
    except _RepeatedKey as error:
        key = _shorten(repr(error.key))
        raise ValueError(f"{where}: the key {key} is given twice in one object; keep one of them") from error
    except ValueError as error:  # the only other one: Python reads no whole number of so many digits
        raise ValueError(
            f"{where}: a whole number has more than {sys.get_int_max_str_digits()} digits: {_shorten(text)}; "
            "shorten it or put it in quotes"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(
            f"{where}: expected a JSON object, found {_kind(values)}: {_shorten(text)}; "
            'write the row as {"messages": [...]}'
        )
    return values


class _RepeatedKey(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose keys differ: of a key given twice, the last would win without a word."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _RepeatedKey(next(key for key in keys if keys.count(key) > 1))
    return values


def _row_messages(
    values: dict[str, Any], messages_key: str, prompt_key: str, completion_key: str, where: str
) -> list[dict[str, Any]]:
    """The row's checked messages. A key holding null counts as absent: exports of mixed tables write it."""
    messages = values.get(messages_key)
    if messages is not None:
        return _check_messages(messages, messages_key, where)
    missing = [key for key in (prompt_key, completion_key) if values.get(key) is None]
    if missing:
        raise ValueError(
            f"{where}: the row has neither {messages_key!r} nor both {prompt_key!r} and {completion_key!r} "
            f"(its keys: {', '.join(map(repr, values)) or 'none'}); name the row's keys with messages_key, "
            "or with prompt_key and completion_key"
        )
    for key in (prompt_key, completion_key):
        _check_text(values[key], f"{where}: {key}")
    return [
        {"role": "user", "content": values[prompt_key]},
        {"role": "assistant", "content": values[completion_key]},
    ]


def _check_messages(messages: Any, messages_key: str, where: str) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        found = "an empty list" if messages == [] else _kind(messages)
        raise ValueError(f"{where}: {messages_key} is {found}; give a list of messages with 'role' and 'content'")
    checked = [_check_message(message, f"{where}: {messages_key}[{index}]") for index, message in enumerate(messages)]
    if all(message["role"] != "assistant" for message in checked):
        raise ValueError(
            f"{where}: {messages_key} has no assistant turn, so nothing to train on; add one or remove the row"
        )
    return checked


def _check_message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"{where} is {_kind(message)}; give an object with 'role' and 'content'")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(
            f"{where}.role is {_shorten(repr(role))}, which is not a known role; use one of {', '.join(ROLES)}"
        )
    calls = message.get("tool_calls")
    if calls is not None and (
        not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls) or role != "assistant"
    ):
        raise ValueError(f"{where}.tool_calls is not a list of objects in an assistant message; correct or remove it")
    content = message.get("content")
    if content is None and calls:
        content = ""  # the usual way of writing a turn that only calls tools
    _check_text(content, f"{where}.content")
    # templates print None or fail on it where they handle a missing key
    return {key: value for key, value in message.items() if value is not None} | {"content": content}


def _check_text(text: Any, where: str) -> None:
    if not isinstance(text, str):
        raise ValueError(f"{where} is {_kind(text)}, not a string; only text can be trained on")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where} holds half of a surrogate pair at character {error.start}, which is not text; repair it"
            ) from error


def _check_tools(values: dict[str, Any], where: str) -> list[dict[str, Any]] | None:
    tools = values.get("tools")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"{where}: tools is {_kind(tools)}; give a list of tool descriptions (JSON schema objects)")
    return tools


def _kind(value: Any) -> str:
    names = {
        dict: "an object",
        list: "a list",
        str: "a string",
        bool: "a boolean",
        type(None): "missing or null",
    }
    return names.get(type(value), "a number")


def _shorten(text: str, limit: int = 80) -> str:
    text = text.strip()
    return text if len(text) <= limit else text[:limit] + "..."
