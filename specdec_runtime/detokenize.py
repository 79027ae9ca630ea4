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
        self.has_found = False
        self._ids: list[int] = []
        self._text_ends: list[int] = []  # length of the text with which each token ends
        self._context, self._done = 0, 0  # decode from `_context`; text of ids before `_done` is final
        self._num_given = 0  # characters behind these that were given out already
        self._num_sharing = 0  # newest tokens that share a character which is not whole yet

    def add(self, token_ids: Sequence[int]) -> Optional[int]:
        """Appends tokens. When a stop string is found: the number of tokens that lie wholly before it, and `text` is cut
        there; else None."""
        for token_id in token_ids:
            num_before = len(self.text)
            self._ids.append(token_id)
            new, is_whole = self._new_text()
            self.text += new
            # Tokens that share a character end where it does: behind the text, until it is whole.
            num_sharing = self._num_sharing + 1
            self._text_ends[len(self._ids) - num_sharing :] = [len(self.text) + (not is_whole)] * num_sharing
            self._num_sharing = 0 if is_whole else num_sharing
            if len(self._ids) < self._min_tokens:
                continue
            found = [self.text.find(s, self._search_from(s, num_before)) for s in self._stop]
            found = [at for at in found if at >= 0]
            if found:
                self.has_found, self.text = True, self.text[: min(found)]
                return self._num_tokens_within(min(found))
        return None

    def num_safe_tokens(self) -> int:
        """Tokens that no longer stop string can reach into: the rest of the text may be the beginning of one, and a character
        that is not whole yet a part of one."""
        longest = 0
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(self.text)), longest, -1):
                if self.text.endswith(stop[:length]):
                    longest = length
                    break
        return self._num_tokens_within(len(self.text) - longest)

    def _new_text(self) -> tuple[str, bool]:
        """Text that the newest token adds, and whether its last character is whole. Decoded together with a few tokens before it,
        because decoders treat the first token specially (leading spaces) and characters may be spread over tokens."""
        before = self._detokenize(self._ids[self._context : self._done])
        now = self._detokenize(self._ids[self._context :])
        is_whole = not now.endswith(_UNFINISHED)
        new = now.rstrip(_UNFINISHED)[len(before) + self._num_given :]
        if not is_whole:
            self._num_given += len(new)
        elif len(now) > len(before):
            self._context, self._done, self._num_given = self._done, len(self._ids), 0
        return new, is_whole

    def _search_from(self, stop: str, num_before: int) -> int:
        """A string that was not there before must reach into the newest token's text, behind `num_before` characters."""
        earliest = self._text_ends[self._min_tokens - 1] if self._min_tokens else 0
        return max(earliest, num_before - len(stop) + 1)

    def _num_tokens_within(self, num_chars: int) -> int:
        """Tokens whose text ends at or before `num_chars`."""
        kept = 0
        while kept < len(self._text_ends) and self._text_ends[kept] <= num_chars:
            kept += 1
        return kept
