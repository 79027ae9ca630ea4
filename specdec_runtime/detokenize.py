"""Stop strings: which tokens of an output lie before them."""

from collections.abc import Callable, Sequence
from typing import Optional

Detokenize = Callable[[list[int]], str]

_UNFINISHED = "�"  # what decoders give for bytes that do not form a character yet


class StopStringFinder:
    """Decodes an output step by step and finds the first stop string in it.

    Args:
        detokenize: ids -> text, e.g. `lambda ids: tokenizer.decode(ids, skip_special_tokens=True)`.
        stop: non-empty strings.
        min_tokens: a string before which there are fewer tokens is passed over.
    """

    def __init__(self, detokenize: Detokenize, stop: Sequence[str], *, min_tokens: int = 0) -> None:
        self._detokenize, self._stop, self._min_tokens = detokenize, tuple(stop), min_tokens
        self.text = ""
        self._ids: list[int] = []
        self._text_ends: list[int] = []  # length of the text after each token
        self._context, self._done = 0, 0  # decode from `_context`; text of ids before `_done` is final

    def add(self, token_ids: Sequence[int]) -> Optional[int]:
        """Appends tokens. When a stop string is found: the number of tokens that lie wholly before it, and `text` is cut
        there; else None."""
        for token_id in token_ids:
            self._ids.append(token_id)
            self.text += self._new_text()
            self._text_ends.append(len(self.text))
            if len(self._ids) < self._min_tokens:
                continue
            found = [at for at in (self.text.find(s, self._search_from(s)) for s in self._stop) if at >= 0]
            if found:
                self.text = self.text[: min(found)]
                return self._num_tokens_within(min(found))
        return None

    def num_safe_tokens(self) -> int:
        """Tokens that no longer stop string can reach into: the rest of the text may be the beginning of one."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return self._num_tokens_within(len(self.text) - longest)

    def _new_text(self) -> str:
        """Text that the newest token adds. Decoded together with a few tokens before it, because decoders treat the
        first token specially (leading spaces) and characters may be spread over tokens."""
        before = self._detokenize(self._ids[self._context : self._done])
        now = self._detokenize(self._ids[self._context :])
        if now.endswith(_UNFINISHED) or len(now) <= len(before):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return now[len(before) :]

    def _search_from(self, stop: str) -> int:
        """A string that was not there before must reach into the newest token's text."""
        previous = self._text_ends[-2] if len(self._text_ends) > 1 else 0
        earliest = self._text_ends[self._min_tokens - 1] if self._min_tokens else 0
        return max(earliest, previous - len(stop) + 1)

    def _num_tokens_within(self, num_chars: int) -> int:
        """Tokens whose text ends at or before `num_chars`."""
        kept = 0
        while kept < len(self._text_ends) and self._text_ends[kept] <= num_chars:
            kept += 1
        return kept
