"""A corpus report as one HTML page that needs nothing else: pictures inside, no script, no request to anywhere."""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from pipeline.corpus.report_counts import Statistics
from pipeline.inline_image import inline_image

_MAX_GROUPS = 100
_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; margin: .6rem 0; } th, td { padding: .2rem .8rem .2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } tr { border-bottom: 1px solid #eee; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; } .figures img { max-width: 100%; width: 34rem; }
details { margin: .4rem 0; } summary { cursor: pointer; } pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f6f4;
padding: .6rem; margin: .2rem 0; } .prompt { color: #555; } .note { color: #666; }
"""


def render_page(
    title: str,
    found: Statistics,
    record: Mapping[str, Any],
    figures: Mapping[str, Figure],
    samples: Sequence[tuple[str, str]],
) -> str:
    """The page.

    Args:
        record: the content of `corpus.json`; empty for a corpus that is still being made.
        samples: prompt and response texts of `found.samples`.
    """
    parts = [
        f"<h1>{escape(title)}</h1>",
        _summary(found, record),
        "<h2>Rows</h2>",
        *(_group_table(kind, found) for kind in found.groups),
        _reasons(record),
        "<h2>Distributions</h2><div class='figures'>",
        *(inline_image(figure, description=name, dpi=110) for name, figure in figures.items()),
        "</div>",
        f"<h2>{len(samples)} random samples</h2>",
        "<p class='note'>Special tokens are shown as they are.</p>",
        *(_sample(row, texts) for row, texts in zip(found.samples, samples, strict=True)),
    ]
    return (
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>"
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _summary(found: Statistics, record: Mapping[str, Any]) -> str:
    num_tokens = sum(length * count for length, count in found.response_lengths.items())
    rows: list[tuple[str, str]] = []
    if record:
        failed, skipped = record["num_failed"], record["num_skipped"]
        rows += [
            ("requested", f"{record['requested']:,} = {found.num_rows:,} written + {skipped:,} skipped + {failed:,} failed"),
            ("engine", str(record.get("backend", ""))),
        ]
    rows += [
        ("rows", f"{found.num_rows:,} answers to {found.num_prompts:,} prompts"),
        ("response tokens", f"{num_tokens:,}, {num_tokens / max(1, found.num_rows):.1f} a row"),
        ("answers equal to an earlier one", f"{found.num_equal_answers:,} ({_percent(found.num_equal_answers, found.num_rows)})"),
    ]
    if found.variety.num:
        num_circling = found.variety.counts[: len(found.variety.counts) // 2].sum()
        rows.append(("answers in which over half of the runs of four tokens repeat", _percent(num_circling, found.variety.num)))
    if found.mass.num:
        rows.append(
            (
                f"probability of the {found.topk} stored candidates",
                f"mean {found.mass.mean:.4f}, 5% of the tokens below {found.mass.quantile(0.05):.3f} (of {found.mass.num:,} tokens)",
            )
        )
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows)
    return f"<table>{cells}</table>"


def _group_table(kind: str, found: Statistics) -> str:
    groups = sorted(found.groups[kind].items(), key=lambda item: -item[1].num_rows)
    lines = [
        f"<tr><td>{escape(name)}</td><td class='n'>{group.num_rows:,}</td><td class='n'>{_percent(group.num_rows, found.num_rows)}</td>"
        f"<td class='n'>{group.num_tokens / group.num_rows:.1f}</td><td class='n'>{_percent(group.num_cut, group.num_rows)}</td></tr>"
        for name, group in groups[:_MAX_GROUPS]
    ]
    if len(groups) > _MAX_GROUPS:
        lines.append(f"<tr><td>{len(groups) - _MAX_GROUPS:,} more</td></tr>")
    head = "".join(f"<th class='n'>{name}</th>" for name in ("rows", "share", "tokens a row", "cut"))
    return f"<table><tr><th>{escape(kind)}</th>{head}</tr>{''.join(lines)}</table>"


def _reasons(record: Mapping[str, Any]) -> str:
    lines = []
    for kind in ("skipped", "failed"):
        for reason, count in record.get(kind, {}).items():
            named = ", ".join(str(row) for row in record.get("examples", {}).get(reason, [])[:5])
            lines.append(
                f"<tr><td>{kind}: {escape(reason)}</td><td class='n'>{count:,}</td><td>{escape(named)}</td></tr>"
            )
    if not lines:
        return ""
    head = "<tr><th>not written</th><th class='n'>rows</th><th>such as</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>"


def _sample(row: Mapping[str, Any], texts: tuple[str, str]) -> str:
    prompt, response = texts
    facts = (
        f"{row['source']}{', ' + row['domain'] if row['domain'] else ''}, temperature {row['temperature']:g}, "
        f"{len(row['response_token_ids'])} tokens, {row['finish_reason']}"
    )
    return (
        f"<details open><summary>{escape(facts)}</summary><pre class='prompt'>{escape(prompt)}</pre>"
        f"<pre>{escape(response)}</pre></details>"
    )


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(1, whole):.1f}%"
