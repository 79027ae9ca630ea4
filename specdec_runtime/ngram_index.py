"""Where each n-gram of a growing text last occurred."""

from collections.abc import Sequence


class NgramIndex:
    """The n-grams of min_tokens to max_tokens tokens of one text, each with the position behind its latest occurrence.

    Takes one dictionary entry per token and length; each token is read once, however often one looks.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        assert 1 <= min_tokens <= max_tokens
        self.min_tokens, self.max_tokens = min_tokens, max_tokens
        self._end_of: dict[tuple[int, ...], int] = {}
        self._num_read = 0

    def continuation(self, token_ids: Sequence[int], num_tokens: int) -> list[int]:
        """What followed the latest earlier occurrence of the text's last tokens; empty when there is none.

        The longest n-gram that occurred before decides. Where the earlier occurrence overlaps the end of the text, the
        copy goes on into what it has copied, as in Lempel-Ziv coding: a text of period 2 is continued with period 2.

        Args:
            token_ids: the whole text; it must begin with what it was at the last call.
        """
        self._read(token_ids)
        length = len(token_ids)
        for n in range(min(self.max_tokens, length - 1), self.min_tokens - 1, -1):
            end = self._end_of.get(tuple(token_ids[length - n :]))
            if end is not None:
                copied = list(token_ids[end : end + num_tokens])
                while len(copied) < num_tokens:
                    copied.extend(copied[: num_tokens - len(copied)])
                return copied
        return []

    def _read(self, token_ids: Sequence[int]) -> None:
        """Enters every n-gram that something follows: the one at the very end would only find itself."""
        for end in range(self._num_read, len(token_ids)):
            for n in range(self.min_tokens, min(self.max_tokens, end) + 1):
                self._end_of[tuple(token_ids[end - n : end])] = end
        self._num_read = max(self._num_read, len(token_ids))
