"""Intervals of a figure that was measured with several training seeds on the same prompts.

Two things vary by chance: the training (its seed) and the prompts that happened to be held out. Both are
resampled, independently of each other and with replacement (Owen, "The pigeonhole bootstrap", 2007): a resample
takes S of the S seeds and P of the P prompts, and every draft's figure on every prompt counts as often as both were drawn.
Resampling S seeds shows only (S - 1) / S of their variance, which matters at S = 3: their deviations from the mean are
scaled by sqrt(S / (S - 1)), which makes up for it. With one seed the interval is that of the prompts alone.

Shapes: S seeds, P prompts, R resamples.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from eval.bootstrap import Interval

Array = NDArray[np.float64]


def crossed_bootstrap(
    sums: ArrayLike, counts: ArrayLike, *, num_bootstrap: int = 2000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Mean over seeds of a ratio of sums over prompts, such as accepted mass over measured positions.

    Args:
        sums: [S, P], of each training seed's draft on each prompt. counts: [P], the same for every seed.
        num_bootstrap: R. confidence: mass inside the interval. seed: of the resampling.

    Raises:
        ValueError: no seeds, no prompts, shapes that do not fit, or counts that add up to nothing.
    """
    sums_SP, counts_P = np.asarray(sums, dtype=np.float64), np.asarray(counts, dtype=np.float64)
    if sums_SP.ndim != 2 or 0 in sums_SP.shape or sums_SP.shape[1:] != counts_P.shape or counts_P.sum() <= 0:
        raise ValueError(
            f"sums of shape {sums_SP.shape}, counts of shape {counts_P.shape}: need [seeds, prompts] and [prompts], not empty"
        )
    num_seeds, num_prompts = sums_SP.shape
    rng = np.random.default_rng(seed)
    prompts_RP = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_bootstrap)
    seeds_RS = _seed_weights(num_seeds, num_bootstrap, rng)
    numerators_R = np.einsum("rs,sp,rp->r", seeds_RS, sums_SP, prompts_RP, optimize=True)
    denominators_R = prompts_RP @ counts_P
    usable_R = denominators_R > 0  # a resample of prompts without tokens says nothing
    tail = (1 - confidence) / 2
    low, high = np.quantile(numerators_R[usable_R] / denominators_R[usable_R], [tail, 1 - tail])
    return Interval(float(sums_SP.mean(axis=0).sum() / counts_P.sum()), float(low), float(high))


def crossed_difference(
    sums_a: ArrayLike,
    sums_b: ArrayLike,
    counts: ArrayLike,
    *,
    num_bootstrap: int = 2000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Paired difference a - b of two such figures; row s of both was trained with the same seed, column p is the same prompt.

    Raises:
        ValueError: as `crossed_bootstrap`, or a and b have different shapes.
    """
    a_SP, b_SP = np.asarray(sums_a, dtype=np.float64), np.asarray(sums_b, dtype=np.float64)
    if a_SP.shape != b_SP.shape:
        raise ValueError(f"sums of shapes {a_SP.shape} and {b_SP.shape}: a paired difference needs the same seeds and prompts")
    return crossed_bootstrap(a_SP - b_SP, counts, num_bootstrap=num_bootstrap, confidence=confidence, seed=seed)


def _seed_weights(num_seeds: int, num_bootstrap: int, rng: np.random.Generator) -> Array:
    """Weights of the seeds in each resample, [R, S]; each row sums to 1."""
    if num_seeds == 1:
        return np.ones((num_bootstrap, 1))
    shares_RS = rng.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds), size=num_bootstrap) / num_seeds
    weights_RS: Array = 1 / num_seeds + np.sqrt(num_seeds / (num_seeds - 1)) * (shares_RS - 1 / num_seeds)
    return weights_RS
