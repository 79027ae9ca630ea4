"""Counter-based uniform noise: a draw depends on its request's seed, its position in the output and its purpose only.

A seeded request therefore gets the same noise alone, in any batch and in any order. A draw that was made for a token
that is later rejected is repeated at the same position with the same number: this stays exact, because nothing that was
committed by then depended on that number (a round's verdict at position i looks at the draws up to i only).
"""

import numpy as np
import numpy.typing as npt

# purposes: sampling from q; the acceptance test; sampling from the residual or from p
DRAFT, ACCEPT, NEXT = 0, 1, 2
NUM_PURPOSES = 3

_ODD_1, _ODD_2, _ODD_3 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_POSITION, _PURPOSE = np.uint64(0xD6E8FEB86659FD93), np.uint64(0xA0761D6478BD642F)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The splitmix64 finaliser (Steele et al. 2014): every input bit flips each output bit with probability 1/2."""
    x = (x ^ (x >> np.uint64(30))) * _ODD_2
    x = (x ^ (x >> np.uint64(27))) * _ODD_3
    return x ^ (x >> np.uint64(31))


def uniforms(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64], num: int, *, num_lanes: int = 1
) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1) for each row, purpose and the positions `positions[row] + 0..num-1`.

    Args:
        seeds: [n], one per row. positions: [n], index of the next output token of each row.
        num_lanes: for trees, where many guesses share a position; purpose + NUM_PURPOSES * lane is the first index.

    Returns:
        [NUM_PURPOSES * num_lanes, n, num], first axis DRAFT, ACCEPT, NEXT of each lane; multiples of 2^-24, so that float32
        holds them exactly.
    """
    with np.errstate(over="ignore"):
        at = (positions[:, None] + np.arange(num)).astype(np.uint64)
        row = _mix(seeds[:, None] + _ODD_1)
        base = _mix(row ^ (at * _POSITION + _ODD_1))
        purpose = np.arange(NUM_PURPOSES * num_lanes, dtype=np.uint64)[:, None, None]
        bits = _mix(base[None] ^ (purpose * _PURPOSE + _ODD_3))
    return (bits >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)
