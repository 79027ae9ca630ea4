"""Exact and near duplicates among short texts."""

import re

_WORDS = re.compile(r"\w+")
_SHINGLE_WORDS = 3
_MIN_JACCARD = 0.7
# Longer lists belong to phrases such as "what is the", which tell no two questions apart.
_MAX_POSTINGS = 64


class DuplicateFilter:
    """Says of each text whether one like it came before: same words, or Jaccard >= 0.7 over its word triples.

    The answer depends on the texts and their order only.
    """

    def __init__(self) -> None:
        self._normalised: set[str] = set()
        self._shingles: list[frozenset[str]] = []
        self._postings: dict[str, list[int]] = {}

    def reason(self, text: str) -> str | None:
        """`duplicate`, `near_duplicate`, or None for a new text, which is remembered."""
        words = _WORDS.findall(text.casefold())
        normalised = " ".join(words) or text.strip()
        if normalised in self._normalised:
            return "duplicate"
        shingles = frozenset(
            " ".join(words[i : i + _SHINGLE_WORDS]) for i in range(max(1, len(words) - _SHINGLE_WORDS + 1))
        )
        if self._is_near(shingles):
            return "near_duplicate"
        self._remember(normalised, shingles)
        return None

    def _is_near(self, shingles: frozenset[str]) -> bool:
        shared: dict[int, int] = {}
        for shingle in shingles:
            for other in self._postings.get(shingle, ()):
                shared[other] = shared.get(other, 0) + 1
        for other in shared:
            known = self._shingles[other]
            if len(shingles & known) >= _MIN_JACCARD * len(shingles | known):
                return True
        return False

    def _remember(self, normalised: str, shingles: frozenset[str]) -> None:
        self._normalised.add(normalised)
        for shingle in shingles:
            postings = self._postings.setdefault(shingle, [])
            if len(postings) < _MAX_POSTINGS:
                postings.append(len(self._shingles))
        self._shingles.append(shingles)
