"""The token viewer: traces as one HTML page that needs nothing else, no script and no network.

Every text is escaped, and the page's own policy forbids it to load anything.
"""

from collections.abc import Sequence
from html import escape
from itertools import groupby

from eval.token_trace import (
    ACCEPTED,
    BONUS,
    CORRECTION,
    PREFILL,
    WRITERS,
    Probability,
    TokenTrace,
    TracedToken,
)
from eval.viewer_style import STYLE

LEGEND = {
    ACCEPTED: "proposed by the draft, accepted",
    CORRECTION: "the target's correction of a rejected proposal",
    BONUS: "the target's bonus after a round without rejection",
    PREFILL: "first token, from the prompt",
}
#: What HTML cannot hold as it is, or a reader cannot see: shown by its picture where texts are explained.
_PICTURES = {code: chr(0x2400 + code) for code in range(32)} | {127: "\u2421", 10: "↵", 9: "⇥", 32: "·"}
#: Controls that turn the direction of all text behind them, another token's too.
_TURNING = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_SHOWN = _PICTURES | {ord(character): f"U+{ord(character):04X}" for character in _TURNING}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def render_viewer(traces: Sequence[TokenTrace], *, title: str, subtitle: str = "") -> str:
    """The page: a section per prompt, in it a card per temperature and draft.

    Raises:
        ValueError: no traces.
    """
    if not traces:
        raise ValueError("render_viewer: no traces to show")
    sections = [
        _section(number, list(group))
        for number, (_, group) in enumerate(groupby(traces, key=lambda trace: trace.prompt), start=1)
    ]
    legend = "".join(
        f'<li><span class="tok {writer}">{writer}</span> {escape(meaning)}</li>'
        for writer, meaning in LEGEND.items()
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><header>"
        f"<h1>{escape(title)}</h1><p>{escape(subtitle)}</p><ul class=legend>{legend}</ul>"
        "<p class=hint>A frame is a round: what one forward of the target settled. Point at a token for its "
        "p (target) and q (draft).</p></header><main>"
        f"{''.join(sections)}</main></body></html>\n"
    )


def _section(number: int, traces: Sequence[TokenTrace]) -> str:
    cards = "".join(map(_card, traces))
    return (
        f'<section><h2><span class="number">{number}</span> <span class="prompt">{escape(traces[0].prompt)}</span></h2>'
        f'<div class="cards">{cards}</div></section>'
    )


def _card(trace: TokenTrace) -> str:
    counts = {writer: trace.num_written_by(writer) for writer in WRITERS}
    rounds = [list(group) for _, group in groupby(trace.tokens, key=lambda token: token.round)]
    flow = "".join(
        f'<span class="round">{"".join(_token(token, trace) for token in tokens)}</span>' for tokens in rounds
    )
    data = " ".join(
        f'data-{name.replace("_", "-")}="{getattr(trace, name)}"'
        for name in ("num_rounds", "num_proposed", "num_accepted", "gamma", "temperature")
    )
    return (
        f'<article class="card" data-draft="{escape(trace.draft)}" {data}>'
        f'<h3>{escape(trace.draft)} <small>temperature {trace.temperature:g}, gamma {trace.gamma}, '
        f"{escape(trace.sampler)}</small></h3>"
        f'<p class="figure"><b>{trace.block_efficiency:.2f}</b> tokens per target forward '
        f"<small>{len(trace.tokens)} tokens, {trace.num_rounds} rounds, "
        f"{trace.num_accepted} of {trace.num_proposed} proposals accepted, "
        f"ended by {escape(trace.finish_reason)}</small></p>"
        f"{_bar(counts)}"
        f'<div class="text">{flow}</div>'
        f"<details><summary>round by round</summary><ol>{''.join(_round(r) for r in rounds if r[0].round)}</ol>"
        "</details></article>"
    )


def _bar(counts: dict[str, int]) -> str:
    """Shares of the writers as one bar."""
    order = (ACCEPTED, BONUS, CORRECTION, PREFILL)
    parts = "".join(
        f'<i class="{writer}" style="flex-grow:{counts[writer]}" title="{counts[writer]} {writer}"></i>'
        for writer in order
        if counts[writer]
    )
    return f'<div class="bar">{parts}</div>'


def _token(token: TracedToken, trace: TokenTrace) -> str:
    text = token.token.text
    classes = f"tok {token.writer}{' nl' if chr(10) in text else ''}{' alone' if set(text) & set(_TURNING) else ''}"
    tip = _tip(token, trace)
    return f'<span class="{classes}" data-id="{token.token.token_id}" data-tip="{escape(tip)}">{_escaped(text)}</span>'


def _escaped(text: str) -> str:
    """As text of the page: a browser makes a line feed of a carriage return, and drops a NUL."""
    return escape(text).replace("\r", "&#13;").replace("\0", _PICTURES[0])


def _tip(token: TracedToken, trace: TokenTrace) -> str:
    place = "prefill" if token.round == 0 else f"round {token.round}, {token.writer}"
    lines = [place, f"{_shown(token.token)}  p {_number(token.token.p)}  q {_number(token.token.q)}"]
    if token.rejected is not None:
        fell = token.rejected
        lines.append(f"instead of {_shown(fell)}  p {_number(fell.p)}  q {_number(fell.q)}")
    if trace.temperature == 0:
        lines.append("p and q at temperature 1")
    return "\n".join(lines)


def _round(tokens: Sequence[TracedToken]) -> str:
    """One line: what was accepted, what fell, what came after it."""
    accepted = "".join(_chip(token.token, ACCEPTED) for token in tokens if token.writer == ACCEPTED)
    last = tokens[-1]
    end = ""
    if last.rejected is not None:
        end += _chip(last.rejected, "rejected")
    if last.writer != ACCEPTED:
        end += f'<span class="arrow">→</span>{_chip(last.token, last.writer)}'
    return f"<li>{accepted}{end}</li>"


def _chip(token: Probability, kind: str) -> str:
    tip = f"p {_number(token.p)}  q {_number(token.q)}"
    return f'<span class="chip {kind}" data-tip="{escape(tip)}">{escape(_shown(token))}</span>'


def _shown(token: Probability) -> str:
    """The token's text with its blanks and controls made visible, or its id where it has no text of its own."""
    text = token.text.translate(_SHOWN)
    return text or f"#{token.token_id}"


def _number(probability: float) -> str:
    return f"{probability:.3f}" if probability >= 0.0005 else f"{probability:.0e}"
