"""Exact and near duplicates among short texts, in memory that is counted in hashes.

Near means Jaccard over the sets of word triples. Candidates come from MinHash with banding (Broder 1997; Leskovec,
Rajaraman, Ullman, "Mining of Massive Datasets", section 3.4), and each is then compared exactly.
"""

import hashlib
import re
from array import array

import numpy as np

from pipeline.corpus.hash_table import HashMultiMap, HashSet

_WORDS = re.compile(r"\w+")
_SHINGLE_WORDS = 3
# A pair of Jaccard .7 shares one of 12 bands of 3 with probability .99, one of .9 with probability 1 - 3e-7.
_NUM_BANDS, _ROWS_PER_BAND = 12, 3
# A band's bucket this full belongs to phrases that tell no two texts apart.
_MAX_CANDIDATES = 64


class DuplicateFilter:
    """Says of each text whether one like it came before: the same words, or Jaccard >= `min_jaccard` over word triples.

    The answer depends on the texts and their order only. A remembered text takes some 500 bytes.
    """

    def __init__(self, min_jaccard: float = 0.7) -> None:
        self.min_jaccard = min_jaccard
        self._normalised = HashSet()
        self._bands = HashMultiMap()
        self._shingles = array("Q")
        self._starts = array("Q", [0])
        generator = np.random.Generator(np.random.Philox(0))
        shape = (_NUM_BANDS * _ROWS_PER_BAND, 1)
        # Odd multipliers: multiply-shift hashing (Dietzfelbinger et al. 1997).
        self._multipliers = generator.integers(0, 2**63, shape, dtype=np.uint64) * np.uint64(2) + np.uint64(1)

    def reason(self, text: str) -> str | None:
        """`duplicate`, `near_duplicate`, or None for a new text, which is remembered."""
        words = _WORDS.findall(text.casefold())
        if not self._normalised.add(_hash(" ".join(words) or text.strip())):
            return "duplicate"
        if self.min_jaccard >= 1 or not words:
            return None
        shingles = {
            _hash(" ".join(words[i : i + _SHINGLE_WORDS])) for i in range(max(1, len(words) - _SHINGLE_WORDS + 1))
        }
        bands = self._band_keys(shingles)
        if self._is_near(shingles, bands):
            return "near_duplicate"
        self._remember(shingles, bands)
        return None

    def _band_keys(self, shingles: set[int]) -> list[int]:
        """One key for each band of the text's MinHash signature."""
        hashes = np.fromiter(shingles, dtype=np.uint64, count=len(shingles))
        minima = (self._multipliers * hashes[None, :]).min(axis=1) >> np.uint64(16)
        rows = minima.reshape(_NUM_BANDS, _ROWS_PER_BAND)
        return [_hash(f"{band}:{row.tobytes().hex()}") for band, row in enumerate(rows)]

    def _is_near(self, shingles: set[int], bands: list[int]) -> bool:
        compared: set[int] = set()
        for key in bands:
            for num_seen, other in enumerate(self._bands.get(key)):
                if num_seen == _MAX_CANDIDATES:
                    break
                if other in compared:
                    continue
                compared.add(other)
                known = self._shingles[self._starts[other] : self._starts[other + 1]]
                num_shared = sum(shingle in shingles for shingle in known)
                if num_shared >= self.min_jaccard * (len(known) + len(shingles) - num_shared):
                    return True
        return False

    def _remember(self, shingles: set[int], bands: list[int]) -> None:
        index = len(self._starts) - 1
        for key in bands:
            self._bands.add(key, index)
        self._shingles.extend(sorted(shingles))
        self._starts.append(len(self._shingles))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
