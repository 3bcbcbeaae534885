"""Render results and engines as HTML without scripts, for notebooks.

Colours are translucent or the theme's own (`currentColor`), so that text is readable on dark and on light pages. Every
text from a model, a prompt or an option is escaped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from typing import Any

MAX_CHARS = 4_000  # characters of one text that are shown
MAX_ROWS = 50
MONO = "font-family:var(--jp-code-font-family,monospace);white-space:pre-wrap;overflow-wrap:anywhere"


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> str:
    """Return an HTML table. Cells are escaped, unless they are `Html`."""
    head = "".join(f"<th style='text-align:left'>{escape(name)}</th>" for name in header)
    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left;vertical-align:top'>{_cell(cell)}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"


class Html(str):
    """Text that is already HTML and is not escaped again."""

    __slots__ = ()


class HtmlView:
    """HTML that a notebook shows. In a terminal, `print` shows its text."""

    def __init__(self, shown: str) -> None:
        self._shown = shown

    def _repr_html_(self) -> str:
        return self._shown

    def __str__(self) -> str:
        return unescape(re.sub(r"<[^>]*>", "", self._shown))

    __repr__ = __str__


def _cell(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value))


def text(value: str) -> Html:
    """Return an escaped text with its line breaks, truncated to `MAX_CHARS` characters."""
    more = f" … ({len(value) - MAX_CHARS} further characters)" if len(value) > MAX_CHARS else ""
    return Html(f"<div style='{MONO}'>{escape(value[:MAX_CHARS])}{more}</div>")


def tokens(pieces: Iterable[tuple[str, float | None]]) -> Html:
    """Return the tokens as HTML, coloured by probability: red is unlikely, green is likely.

    Each of the `pieces` is a token's text and log-probability. The tooltip of a token shows its probability.
    """
    spans = []
    for piece, logprob in pieces:
        if logprob is None:
            spans.append(escape(piece))
            continue
        probability = math.exp(min(0.0, logprob))
        colour = f"hsla({120 * probability:.0f},85%,45%,0.35)"
        title = f"{probability:.1%}, logprob {logprob:.3f}"
        spans.append(f"<span title='{title}' style='background:{colour};border-radius:2px'>{escape(piece)}</span>")
    return Html(f"<div style='{MONO}'>{''.join(spans)}</div>")


def generated(answer: Any) -> str:
    """Return an output as HTML: its text or its tokens coloured by probability, its counts and its times."""
    return "".join((_body(answer), table(_facts(answer))))


def batch(answers: Sequence[Any]) -> str:
    """Return a table of outputs as HTML."""
    rows = []
    for number, answer in enumerate(answers[:MAX_ROWS]):
        meta = answer["meta_info"]
        counts = f"{meta['cached_tokens']} / {meta['prompt_tokens']}"
        prompt = "" if answer.prompt is None else text(answer.prompt)
        rows.append((number, prompt, _body(answer), counts, meta["completion_tokens"], answer.finish_reason or ""))
    more = f"<p>{len(answers) - MAX_ROWS} further outputs</p>" if len(answers) > MAX_ROWS else ""
    return table(rows, ("", "prompt", "output", "cached / prompt", "tokens", "end")) + more


def _body(answer: Any) -> Html:
    logprobs = answer.token_logprobs
    if logprobs and all(each.text is not None for each in logprobs):
        return tokens((each.text, each.logprob) for each in logprobs)
    return text(answer["text"])


def _facts(answer: Any) -> list[tuple[object, object]]:
    meta = answer["meta_info"]
    rows: list[tuple[object, object]] = [
        ("prompt", f"{meta['prompt_tokens']} tokens, {meta['cached_tokens']} of them cached"),
        ("output", f"{meta['completion_tokens']} tokens, {answer.finish_reason or 'not ended'}"),
    ]
    cost = answer.account
    if cost is not None:
        milliseconds = (1000 * each for each in (cost.queue_s, cost.prefill_s, cost.decode_s))
        waits = "queue {:.1f} ms, prefill {:.1f} ms, decode {:.1f} ms".format(*milliseconds)
        rows.append(("time", waits))
        rows.append(("memory", f"{cost.page_seconds:.2f} page-seconds, {cost.computed_tokens} tokens computed"))
    return rows


def encoded(answer: Mapping[str, Any]) -> str:
    """Return the result of a pooling model as HTML: an embedding's first numbers, or a classifier's probabilities."""
    vector, rows = answer.get("embedding"), []
    if answer.get("label") is not None:
        rows.append(("label", answer["label"]))
    if answer.get("probs") is not None:
        rows += [("", bar(each, f"{each:.1%}")) for each in answer["probs"][:MAX_ROWS]]
    if isinstance(vector, list):
        first = ", ".join(f"{each:.4f}" for each in vector[:8] if isinstance(each, float))
        rows.append(("embedding", f"{len(vector)} numbers: {first}{', …' if len(vector) > 8 else ''}"))
    rows.append(("prompt", f"{(answer.get('meta_info') or {}).get('prompt_tokens', 0)} tokens"))
    return table(rows)


def chat(answer: Mapping[str, Any]) -> str:
    """Return an answer of the chat API as HTML: its texts, tool calls and token counts."""
    rows = []
    for choice in answer["choices"]:
        message = choice.get("message") or choice.get("delta") or {}
        if message.get("reasoning_content"):
            rows.append(("reasoning", text(message["reasoning_content"])))
        if message.get("content"):
            rows.append(("answer", text(message["content"])))
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            rows.append(("tool call", text(f"{function.get('name', '')}({function.get('arguments', '')})")))
        if choice.get("finish_reason"):
            rows.append(("end", choice["finish_reason"]))
    usage = answer.get("usage")
    if usage:
        rows.append(("tokens", f"{usage['prompt_tokens']} in the prompt, {usage['completion_tokens']} in the output"))
    return table(rows)


def scores(values: Mapping[str, float], chosen: str) -> str:
    """Return an HTML table of texts and their scores, best first. The chosen text is bold."""
    ordered = sorted(values.items(), key=lambda each: -each[1])
    return table(
        [(Html(f"<b>{text(name)}</b>") if name == chosen else text(name), f"{value:.3f}") for name, value in ordered],
        ("text", "score"),
    )


def bar(part: float, label: str) -> Html:
    """Return a horizontal bar as HTML, filled up to the fraction `part` (0 to 1), with a label."""
    width = f"{100 * min(1.0, max(0.0, part)):.1f}%"
    fill = f"<div style='background:hsla(210,80%,50%,0.45);width:{width};height:1.1em'></div>"
    frame = "border:1px solid currentColor;width:16em;display:inline-block;vertical-align:middle;opacity:0.85"
    return Html(f"<div style='{frame}'>{fill}</div> {escape(label)}")


def facts(values: Mapping[str, object]) -> str:
    """Return an HTML table of names and values."""
    return table(list(values.items()))
