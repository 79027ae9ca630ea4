"""The token viewer in a real browser: its text is the output, its counts are the engine's, and it loads nothing."""

import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from eval.teacher_forcing import Draft
from eval.token_trace import ACCEPTED, CORRECTION, TokenTrace, trace_tokens
from eval.viewer import render_viewer

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
NASTY = ['<script>alert("1")</script>', "&lt;", '" onmouseover="x', "</span>", "'", "\n", " ", "&amp;", "<b>", "é€"]


def nasty(token_ids: list[int]) -> str:
    return "".join(NASTY[i % len(NASTY)] for i in token_ids)


@pytest.fixture(scope="module")
def traces(make_model: Callable[..., PreTrainedModel]) -> list[TokenTrace]:
    drafts = {"<i>one</i>": Draft(make_model(0)), "two & three": Draft(make_model(1))}
    return trace_tokens(
        make_model(0),
        drafts,
        [("<img src=http://example.org/x.png>", [3, 4]), ("second", [5])],
        nasty,
        temperatures=[0.0, 1.0],
        gamma=3,
        max_new_tokens=16,
    )


class Page(HTMLParser):
    """The tokens and the numbers of every card of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.cards: list[dict[str, object]] = []
        self.tags: set[str] = set()
        self.prompts: list[str] = []
        self._into: list[list[str] | None] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        values = dict(attrs)
        classes = (values.get("class") or "").split()
        if tag == "article":
            self.cards.append({"data": values, "tokens": [], "writers": []})
        into: list[str] | None = None
        if "tok" in classes and self.cards:
            into = []
            self.cards[-1]["tokens"].append(into)  # type: ignore[attr-defined]
            self.cards[-1]["writers"].append(classes[1])  # type: ignore[attr-defined]
        elif "prompt" in classes:
            into = self.prompts
        if tag not in ("meta", "br", "img", "link"):
            self._into.append(into)

    def handle_endtag(self, tag: str) -> None:
        self._into.pop()

    def handle_data(self, data: str) -> None:
        if self._into and self._into[-1] is not None:
            self._into[-1].append(data)

    def text(self, card: int) -> str:
        return "".join("".join(pieces) for pieces in self.cards[card]["tokens"])  # type: ignore[attr-defined]


def check(html: str, traces: list[TokenTrace]) -> None:
    page = Page(html)
    assert len(page.cards) == len(traces)
    for index, trace in enumerate(traces):
        assert page.text(index) == trace.text
        data, writers = page.cards[index]["data"], page.cards[index]["writers"]
        assert data["data-draft"] == trace.draft  # type: ignore[index]
        assert writers == [token.writer for token in trace.tokens]
        assert writers.count(ACCEPTED) == trace.num_accepted == int(data["data-num-accepted"])  # type: ignore[attr-defined, index]
        assert int(data["data-num-rounds"]) == trace.num_rounds  # type: ignore[index]
        assert int(data["data-num-proposed"]) == trace.num_proposed  # type: ignore[index]
    assert not page.tags & {"script", "img", "iframe", "link", "b onmouseover", "object"}
    assert page.prompts == list(dict.fromkeys(trace.prompt for trace in traces))


def test_text_counts_and_escapes(traces: list[TokenTrace]) -> None:
    html = render_viewer(traces, title="A <title>", subtitle="x & y")
    check(html, traces)
    assert "A &lt;title&gt;" in html
    assert "url(" not in html and "@import" not in html and "default-src 'none'" in html


def test_corrections_show_what_they_replace_with_p_and_q(traces: list[TokenTrace]) -> None:
    html = render_viewer(traces, title="t")
    num_corrections = sum(trace.num_written_by(CORRECTION) for trace in traces)
    assert num_corrections > 0
    assert html.count("instead of ") == num_corrections
    assert html.count('class="chip rejected"') == num_corrections
    assert html.count('class="number"') == 2, "two prompts"


def test_controls_stay_inside_their_token_and_are_shown_where_texts_are_explained(traces: list[TokenTrace]) -> None:
    first = traces[0].tokens[0]
    texts = ["a\r", "\u202eb", "\0c", "\x07"]
    tokens = [replace(first, token=replace(first.token, text=text)) for text in texts]
    html = render_viewer([replace(traces[0], text="".join(texts), tokens=tokens)], title="t")
    assert Page(html).text(0) == "a\r\u202eb\u2400c\x07"
    assert "\r" not in html and "\0" not in html
    assert html.count(f'class="tok {first.writer} alone"') == 1 and ".alone{unicode-bidi:isolate}" in html
    tips = re.findall(r'data-tip="prefill\n(\S+)  p', html)
    assert tips == ["a\u240d", "U+202Eb", "\u2400c", "\u2407"]


def test_no_traces_are_refused(traces: list[TokenTrace]) -> None:
    with pytest.raises(ValueError, match="no traces"):
        render_viewer([], title="t")
    assert "0 rounds" in render_viewer([replace(traces[0], tokens=traces[0].tokens[:1], num_rounds=0)], title="t")


@pytest.fixture(scope="module")
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser here (one of {', '.join(BROWSERS)}): the page is checked by a parser only")
    return found


class Listener:
    """A port that every name leads to: what a browser asks for is seen here."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            connection.settimeout(2)
            try:
                self.requests.append(connection.recv(2000).decode("latin-1"))
            except OSError:
                self.requests.append("")
            connection.close()


def open_page(browser: str, html: str, folder: Path) -> tuple[str, list[str]]:
    """(the page as the browser understood it, requests for the outside that name example.org)."""
    page, listener = folder / "page.html", Listener()
    page.write_text(html, encoding="utf-8")
    done = subprocess.run(
        [
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", f"--proxy-server=http://127.0.0.1:{listener.port}",
            "--virtual-time-budget=2000", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    return done.stdout.decode("utf-8"), [r for r in listener.requests if "example.org" in r]


@pytest.mark.slow
def test_a_browser_shows_the_output_and_asks_for_nothing(
    browser: str, traces: list[TokenTrace], tmp_path: Path
) -> None:
    html = render_viewer(traces, title="Who wrote what")
    understood, requests = open_page(browser, html, tmp_path)
    check(understood, traces)
    assert requests == []
    # The check itself sees a request where a page makes one.
    (tmp_path / "control").mkdir()
    _, requests = open_page(browser, "<img src=http://example.org/x.png>", tmp_path / "control")
    assert requests
