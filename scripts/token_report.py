"""Makes one HTML page of a file of per-token outputs: sequences with their tokens coloured by loss, the worst first.

    python scripts/token_report.py FILE.parquet [--output FILE.html] [--limit 100] [--tokenizer DIRECTORY]

What people open when a loss looks wrong. The page loads nothing and works from a disk or in an attachment. Rows are
read one at a time; only those that are shown are kept. The page's look is `token_report.css`, `.js` beside this script.
"""

import argparse
import heapq
import html
import json
import math
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from a checkout that is not installed

from megatron_ext.token_file import FileRow, TokenFile

LEVELS = 12  # of colour
SMALLEST_SCALE = 2.0  # nats at which the colours end, at least: a good model's page is not all red
HERE = Path(__file__).resolve().parent
CONTINUED = "‥"  # what a token shows whose bytes belong to the character before
GLYPHS = {"\n": "↵\n", "\r": "␍", "\t": "⇥\t", "\u00a0": "⍽", "\u200b": "∅"}


@dataclass(frozen=True)
class Summary:
    """The whole file, also the sequences that are not shown."""

    sequences: int
    trained_tokens: int
    not_finite: int
    mean_loss: float  # of all trained tokens, weighted, those that are finite

    def __str__(self) -> str:
        text = f"{self.sequences:,} sequences, {self.trained_tokens:,} trained tokens, mean loss {self.mean_loss:.4f}"
        return text + (f"; {self.not_finite:,} sequences with values that are not finite" if self.not_finite else "")


def badness(row: FileRow) -> float:
    """What sequences are sorted by: the mean loss, and above all what is not finite."""
    finite = np.isfinite(row.values["elementwise_loss"]).all() and math.isfinite(row.mean_loss)
    return row.mean_loss if finite else math.inf


def pick_worst(rows: Iterable[FileRow], limit: int) -> tuple[list[FileRow], Summary]:
    """The `limit` worst sequences, worst first, and the summary of all."""
    heap: list[tuple[float, int, FileRow]] = []
    sequences = trained = not_finite = 0
    total = weight = 0.0
    for number, row in enumerate(rows):
        mask, losses = row.values["loss_mask"], row.values["elementwise_loss"].astype(np.float64)
        counted = (mask != 0) & np.isfinite(losses)
        sequences += 1
        trained += int((mask != 0).sum())
        not_finite += badness(row) == math.inf
        total += float((losses[counted] * mask[counted]).sum())
        weight += float(mask[counted].sum())
        entry = (badness(row), -number, row)  # of equal ones the first in the file
        if len(heap) < limit:
            heapq.heappush(heap, entry)
        else:
            heapq.heappushpop(heap, entry)
    worst = [row for _, _, row in sorted(heap, key=lambda entry: entry[:2], reverse=True)]
    return worst, Summary(sequences, trained, not_finite, total / weight if weight else math.nan)


# ------------------------------------------------------------------------------------------------------- tokens


class Vocabulary:
    """The text of tokens; without a tokenizer their ids stand for it."""

    def __init__(self, tokenizer_path: str | None) -> None:
        self._tokenizer = None
        self._known: dict[int, str | None] = {}
        if tokenizer_path is not None:
            os.environ |= {"HF_HUB_OFFLINE": "1"}
            from megatron_ext.data.tokenizer import load_tokenizer

            self._tokenizer = load_tokenizer(tokenizer_path)

    def texts(self, ids: list[int]) -> list[str]:
        """The text of each token. Where several make one character, the first has it and the others have CONTINUED."""
        if self._tokenizer is None:
            return [f"{token_id} " for token_id in ids]
        texts = [self._text(token_id) for token_id in ids]
        shown: list[str] = []
        while len(shown) < len(ids):
            first = len(shown)
            text = texts[first]
            end = next((i for i in range(first, len(ids)) if texts[i] is not None), len(ids))
            if text is not None:
                shown.append(text)
            else:
                shown += [self._decode(ids[first:end]), *[CONTINUED] * (end - first - 1)]
        return shown

    def _text(self, token_id: int) -> str | None:
        """None: bytes that are no characters by themselves."""
        if token_id not in self._known:
            self._known[token_id] = self._text_alone(token_id)
        return self._known[token_id]

    def _text_alone(self, token_id: int) -> str | None:
        if not 0 <= token_id < len(self._tokenizer):
            return f"⟨{token_id}⟩"
        text, piece = self._decode([token_id]), self._tokenizer.convert_ids_to_tokens(token_id) or ""
        if "\ufffd" in text and "\ufffd" not in piece:
            return None
        if piece.startswith("▁") and not text.startswith(" "):  # a decoder that strips the first space
            text = " " + text
        return text or f"⟨{piece or token_id}⟩"

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def visible(text: str) -> str:
    """White space that can be seen, escaped for HTML."""
    if text and not text.strip(" "):
        return "·" * len(text)
    return html.escape("".join(GLYPHS.get(character, character) for character in text))


# --------------------------------------------------------------------------------------------------------- page


def scale_of(rows: Iterable[FileRow]) -> float:
    """The loss at which the colours end: 98 of 100 trained tokens on the page are below."""
    losses = [row.values["elementwise_loss"][row.values["loss_mask"] != 0] for row in rows]
    finite = [part[np.isfinite(part)] for part in losses]
    every = np.concatenate(finite) if finite else np.empty(0)
    return max(SMALLEST_SCALE, float(np.quantile(every, 0.98))) if len(every) else SMALLEST_SCALE


def level_of(loss: float, scale: float) -> int:
    return min(LEVELS - 1, max(0, int(loss / scale * LEVELS)))


def token_class(loss: float, mask: float, scale: float) -> str:
    if not math.isfinite(loss):
        return "nan"
    return "off" if mask == 0 else f"l{level_of(loss, scale)}"


def sequence_html(rank: int, row: FileRow, vocabulary: Vocabulary, scale: float) -> str:
    mask, losses = row.values["loss_mask"], row.values["elementwise_loss"]
    names = [name for name in row.values if name not in ("loss_mask", "elementwise_loss", "logprobs")]
    ids = [int(row.token_ids[0]), *row.labels.tolist()]  # the first is no target
    first, *texts = vocabulary.texts(ids)
    tip = _tip(first, ids[0], ["no loss: nothing comes before it"])
    spans = [f'<span class="off" title="{tip}">{visible(first)}</span>']
    for t, (token_id, text) in enumerate(zip(ids[1:], texts, strict=True)):
        facts = [
            f"loss {losses[t]:.4f}" + ("" if mask[t] else " (not trained)"),
            f"logprob {row.values['logprobs'][t]:.4f}",
            f"loss_mask {mask[t]:g}",
            *(f"{name} {row.values[name][t]:.4f}" for name in names),
            f"position {t}",
        ]
        kind = token_class(float(losses[t]), float(mask[t]), scale)
        spans.append(f'<span class="{kind}" title="{_tip(text, token_id, facts)}">{visible(text)}</span>')
    trained = int((mask != 0).sum())
    worst = losses[mask != 0].max(initial=0.0) if trained else 0.0
    return (
        f'<article id="s{rank}"><header><b>{rank}</b> <span>{html.escape(row.set_name)} sample {row.sample_id}</span> '
        f'<span class="mean">mean loss <b>{row.mean_loss:.4f}</b></span> <span>largest {worst:.2f}</span> '
        f"<span>{trained} of {len(mask)} tokens trained</span></header>"
        f'<p dir="auto">{"".join(spans)}</p></article>'
    )


def _tip(text: str, token_id: int, facts: list[str]) -> str:
    # json: quotes, escapes and all invisible characters as they are
    lines = [f"{json.dumps(text, ensure_ascii=False)}  id {token_id}", *facts]
    return html.escape("\n".join(lines)).replace("\n", "&#10;")


def page(path: Path, rows: list[FileRow], summary: Summary, vocabulary: Vocabulary, origin: str) -> str:
    scale = scale_of(rows)
    steps = "".join(
        f'<span class="l{level}" title="loss from {level * scale / LEVELS:.2f}">{level * scale / LEVELS:.1f}</span>'
        for level in range(LEVELS)
    )
    legend = (
        f'<div class="legend"><span>loss of a token, from</span>{steps}<span>nats</span> '
        '<span class="off">not trained</span> <span class="nan">not finite</span></div>'
    )
    shown = f"the {len(rows)} worst of them by mean loss" if len(rows) < summary.sequences else "the worst first"
    body = "\n".join(sequence_html(rank, row, vocabulary, scale) for rank, row in enumerate(rows, start=1))
    style, script = ((HERE / f"token_report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    name = html.escape(path.name)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}: tokens by loss</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<style>\n{style}</style></head>\n'
        f"<body><div class='top'><h1>{name}</h1><p>{html.escape(str(summary))}. Shown: {shown}. "
        f"Each token is coloured by its own loss, as a target.{html.escape(origin)}</p>{legend}</div>\n"
        f"<main>{body}</main>\n<div id='tip' role='tooltip' hidden></div>\n<script>\n{script}</script></body></html>\n"
    )


def describe_origin(file: TokenFile) -> str:
    weights, iteration = file.metadata.get("load") or file.metadata.get("hf_path"), file.metadata.get("iteration")
    return f" Weights: {weights}{f', iteration {iteration}' if iteration else ''}." if weights else ""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", metavar="FILE", type=Path, help="written with --per-token-outputs")
    parser.add_argument("--output", type=Path, help="page to write (default: FILE with the ending .html)")
    parser.add_argument("--limit", type=int, default=100, help="sequences on the page (default: %(default)s)")
    parser.add_argument("--tokenizer", help="directory or .gguf file (default: what a Parquet file names)")
    arguments = parser.parse_args()
    if arguments.limit < 1:
        parser.error(f"--limit {arguments.limit} shows nothing; give at least 1")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    try:
        file = TokenFile(arguments.file)
        tokenizer = arguments.tokenizer or file.metadata.get("tokenizer")
        if tokenizer is None:
            print(f"{arguments.file} names no tokenizer: token ids are shown (--tokenizer gives one)", file=sys.stderr)
        vocabulary = Vocabulary(tokenizer)
        rows, summary = pick_worst(file.rows(), arguments.limit)
        if not rows:
            raise ValueError(f"{arguments.file} holds no sequence; give the file of an evaluation")
        target = arguments.output or arguments.file.with_suffix(".html")
        target.write_text(page(arguments.file, rows, summary, vocabulary, describe_origin(file)), encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"token_report: {error}", file=sys.stderr)
        return 2
    print(f"wrote {target}: {len(rows)} of {summary.sequences} sequences")
    return 0


if __name__ == "__main__":
    sys.exit(main())
