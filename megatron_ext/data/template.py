"""Writes a conversation as text with a chat template and finds the assistant's turns in that text. Knows
characters, not tokens (chat.py).

A conversation is rendered once, exactly as it will be served. How a turn is found in it:

- With `{% generation %}` tags in the template: the tagged text.
- Without: a turn begins where the template's generation prompt for the messages before it ends. That
  rendering must be a prefix of the whole one, otherwise the template rewrites earlier turns and the row is
  refused.
- It ends with the template's end-of-turn token (what the template writes right after a plain answer). Text
  that the template adds behind that token, a newline say, does not belong to the turn. Where a template ends
  turns with white space alone, that white space does, since nothing else can teach the model to stop.
"""

import datetime
import re
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from megatron_ext.data.rows import Row

# Templates that print today's date would give other tokens tomorrow, and a resumed run would be refused its
# own data. Llama 3's template falls back to the same day.
TEMPLATE_DATE = datetime.date(2024, 7, 26)

_GENERATION_TAG = re.compile(r"\{%[-+]?\s*generation\b")
_DATE_CALL = re.compile(r"""\bstrftime_now\(\s*(?:"([^"\\]*)"|'([^'\\]*)')\s*\)""")
_PROBE = "xmegatronxprobex"
_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_TAG_REMEDY = "mark the assistant's text in the chat template with {% generation %} ... {% endgeneration %}"


class ChatTemplate:
    """A tokenizer's chat template, or `chat_template` (template text) in its place.

    Raises ValueError when there is none, or when turns could not be told apart in what it writes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, chat_template: str | None = None) -> None:
        if chat_template is None and not tokenizer.chat_template:
            raise ValueError(
                "the tokenizer has no chat template, so conversations cannot be written as text; set "
                "chat_template to the path of a Jinja file"
            )
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._pinned_templates: dict[str, str] = {}
        added = [token.content for token in tokenizer.added_tokens_decoder.values()]
        self._added_token = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))) or r"(?!)")
        self._end_of_turn = self._find_end_of_turn()

    def render(self, row: Row) -> tuple[str, list[tuple[int, int]]]:
        """The conversation as text, and the characters [start, end) of each assistant turn, in order.

        Raises ValueError naming the row when the template refuses it or its assistant turns cannot be found.
        """
        if _GENERATION_TAG.search(self._template_for(row.tools)):
            return self._render_tagged(row)
        text = self._apply(row, row.messages)
        spans = []
        for index, message in enumerate(row.messages):
            if message["role"] != "assistant":
                continue
            start = self._find_start(row, index, text)
            end = self._find_end(row, index, text, start)
            _check_kept(row, index, text[start:end])
            if spans and start < spans[-1][1]:
                raise ValueError(f"{row.where}: messages[{index}] overlaps the assistant turn before it; {_TAG_REMEDY}")
            spans.append((start, end))
        return text, spans

    def _template_for(self, tools: list[dict[str, Any]] | None) -> str:
        """Template text (a tokenizer may keep a second one for tools), with the date pinned."""
        template = self._chat_template or self._tokenizer.get_chat_template(None, tools)
        if template not in self._pinned_templates:
            pinned = _DATE_CALL.sub(lambda call: repr(TEMPLATE_DATE.strftime(call[1] or call[2] or "")), template)
            if re.search(r"\bstrftime_now\(", pinned):
                raise ValueError(
                    "the chat template prints today's date in a format that is not a plain string, so "
                    "tokens would change from day to day; write a fixed date into a chat_template file"
                )
            self._pinned_templates[template] = pinned
        return self._pinned_templates[template]

    def _apply(self, row: Row, messages: list[dict[str, Any]], *, add_generation_prompt: bool = False) -> str:
        template = self._template_for(row.tools)
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=row.tools,
                chat_template=template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it may divide by zero, recurse, look up what is not there
            raise ValueError(
                f"{row.where}: the chat template refuses the first {len(messages)} of {len(row.messages)} "
                f"messages ({_reason(error)}); correct the row or set chat_template"
            ) from error

    def _render_tagged(self, row: Row) -> tuple[str, list[tuple[int, int]]]:
        template = self._template_for(row.tools)
        try:
            rendered, tagged = render_jinja_template(
                conversations=[row.messages],
                tools=row.tools,
                chat_template=template,
                return_assistant_tokens_mask=True,
                add_generation_prompt=False,
                **self._tokenizer.special_tokens_map,
            )
        except Exception as error:  # as in _apply
            raise ValueError(
                f"{row.where}: the chat template refuses the conversation ({_reason(error)}); correct the row or "
                "set chat_template"
            ) from error
        text = rendered[0]
        spans = [self._close_tagged(text, start, end) for start, end in _merge_touching(tagged[0])]
        _check_tagged(row, text, spans, self._end_of_turn)
        return text, spans

    def _find_end_of_turn(self) -> str:
        """What the template writes after a plain answer, up to and including its end-of-turn token."""
        answer = {"role": "assistant", "content": _PROBE}
        probes = (
            [{"role": "user", "content": "a"}, answer],
            [{"role": "system", "content": "a"}, {"role": "user", "content": "a"}, answer],
        )
        failure: Exception | None = None
        for messages in probes:
            try:
                rendered = self._apply(Row(messages, source="a plain conversation"), messages)
            except ValueError as error:
                failure = error
                continue
            if rendered.count(_PROBE) == 1:
                head, tail = rendered.split(_PROBE)
                self._check_header(messages[:-1], head)
                token = self._added_token.search(tail)
                return tail[: token.end()].lstrip() if token else (tail.strip() or tail)
            failure = ValueError("the assistant's content does not appear exactly once in the rendered text")
        raise ValueError(
            f"the chat template cannot render a user and an assistant message ({failure}); set chat_template "
            "to a Jinja file that can"
        ) from failure

    def _check_header(self, messages: list[dict[str, Any]], head: str) -> None:
        """Refuse a header that the generation prompt lacks: it would be trained."""
        if _GENERATION_TAG.search(self._template_for(None)):
            return
        row = Row(messages, source="a plain conversation")
        prompt = self._apply(row, messages, add_generation_prompt=True)
        writes_prompt = prompt != self._apply(row, messages)
        if not writes_prompt and head.startswith(prompt) and head[len(prompt) :].strip():
            raise ValueError(
                f"the chat template writes {head[len(prompt) :]!r} before the assistant's text but not as "
                "its generation prompt, so that header cannot be told from the answer; write it under "
                f"add_generation_prompt in a chat_template file, or {_TAG_REMEDY}"
            )

    def _find_start(self, row: Row, index: int, text: str) -> int:
        """Where the assistant turn at `index` begins: right behind the template's header."""
        if index == 0:
            # there is nothing to render before it: look at where the template puts another content
            probe = {**row.messages[0], "content": _PROBE}
            header = self._apply(row, [probe, *row.messages[1:]]).partition(_PROBE)[0]
        else:
            header = self._apply(row, row.messages[:index], add_generation_prompt=True)
        if not text.startswith(header):
            raise ValueError(
                f"{row.where}: the assistant turn messages[{index}] cannot be found in the rendered "
                "conversation, because the chat template renders the messages before it differently once "
                f"the conversation goes on (or its generation prompt differs from its turns); {_TAG_REMEDY}, "
                "or split the row"
            )
        return len(header)

    def _find_end(self, row: Row, index: int, text: str, start: int) -> int:
        """Where the turn that begins at `start` ends: behind its end-of-turn token."""
        if self._end_of_turn.strip():
            content = row.messages[index]["content"].strip()
            cursor = _skip_space(text, start)
            if text.startswith(content, cursor):
                cursor = _skip_space(text, cursor + len(content))
                if text.startswith(self._end_of_turn, cursor):
                    return cursor + len(self._end_of_turn)
        # The template writes more than the content (tool calls, reasoning), or has no end-of-turn token.
        closed = self._apply(row, row.messages[: index + 1])
        if len(closed) < start or not text.startswith(closed):
            raise ValueError(
                f"{row.where}: the end of the assistant turn messages[{index}] cannot be found in the "
                "rendered conversation, because the chat template renders the turn differently once the "
                f"conversation goes on (reasoning dropped from earlier turns, for instance); {_TAG_REMEDY}, "
                "or split the row"
            )
        return self._close(text, start, len(closed))

    def _close(self, text: str, start: int, end: int) -> int:
        """`end`, or the end of the last end-of-turn token before it if only template text follows that."""
        turn = text[start:end]
        cut = turn.rfind(self._end_of_turn)
        if cut >= 0:
            cut += len(self._end_of_turn)
            if not self._added_token.sub("", turn[cut:]).strip():
                return start + cut
        tokens = list(self._added_token.finditer(turn))  # a tool call may end with a token of its own
        if tokens and not turn[tokens[-1].end() :].strip():
            return start + tokens[-1].end()
        return end

    def _close_tagged(self, text: str, start: int, end: int) -> tuple[int, int]:
        """A tagged span with its end-of-turn token, which templates write inside or right behind the tags."""
        if self._end_of_turn.strip():
            cursor = _skip_space(text, end)
            if self._end_of_turn not in text[start:end] and text.startswith(self._end_of_turn, cursor):
                return start, cursor + len(self._end_of_turn)
        return start, self._close(text, start, end)


def _reason(error: Exception) -> str:
    """What a template raised, on one line; what it raises on purpose (raise_exception) without the kind."""
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    return text if text and isinstance(error, TemplateError) else f"{kind}: {text}" if text else kind


def _check_kept(row: Row, index: int, turn: str) -> None:
    """Refuse a turn of which the template has dropped content, reasoning or tool calls, white space aside."""
    message = row.messages[index]
    parts = [("content", message["content"])]
    parts += [(key, message[key]) for key in _REASONING_KEYS if isinstance(message.get(key), str)]
    for call in message.get("tool_calls", []):
        function = call.get("function", call)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parts.append(("tool_calls", function["name"]))
    dense = "".join(turn.split())
    for key, value in parts:
        if "".join(value.split()) not in dense:
            raise ValueError(
                f"{row.where}: the chat template drops or rewrites messages[{index}].{key}, so it would not "
                f"be trained; use a chat_template that renders it, {_TAG_REMEDY}, or split the row"
            )


def _check_tagged(row: Row, text: str, spans: list[tuple[int, int]], end_of_turn: str) -> None:
    """Each tagged span must hold an assistant turn's content or, where the template drops reasoning, its last
    part; in order.
    """
    if not spans:
        raise ValueError(f"{row.where}: the chat template's generation tags mark no text of this conversation")
    turns = iter("".join(turn["content"].split()) for turn in row.messages if turn["role"] == "assistant")
    for start, end in spans:
        body = "".join(text[start:end].removesuffix(end_of_turn).split())
        if not any(turn in body or (body and turn.endswith(body)) for turn in turns):
            raise ValueError(
                f"{row.where}: the chat template's generation tags mark {text[start:end][:60]!r}, which is "
                "not the text of an assistant turn; put the tags around the assistant's content, outside "
                "macros and set blocks"
            )


def _merge_touching(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Non-empty spans with neighbours joined: a template may tag a turn's parts one by one."""
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if start == end:
            continue
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, end))
    return merged


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position].isspace():
        position += 1
    return position
