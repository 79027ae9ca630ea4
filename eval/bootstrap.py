"""Percentile bootstrap over prompts (Efron 1979): each reported figure carries an interval from here.

Tokens of one response are correlated, prompts are not: so whole prompts are resampled, and a figure is always
a ratio of sums over the resampled prompts. Two figures on the same prompts are compared with the same
resamples (paired), which removes the spread that the prompts have in common.

Shapes: P prompts, R resamples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A figure with the two-sided bootstrap interval around it; all three in the figure's own unit."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """The three numbers under the names that the report uses."""
        return {"value": self.value, "low": self.low, "high": self.high}


def bootstrap(
    columns: Sequence[ArrayLike],
    statistic: Callable[..., Array],
    *,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    prompt_ids: Sequence[str] | None = None,
) -> Interval:
    """Interval of `statistic(sum of column 1, sum of column 2, ...)` over resampled prompts.

    Args:
        columns: per-prompt numbers, each of shape [P]; prompt i is row i of every column, which pairs them.
        statistic: vectorised function from the columns' sums, each of shape [R], to the figure, shape [R].
        num_bootstrap: R. confidence: mass inside the interval. seed: same seed and P, same resamples.
        prompt_ids: of each number, where a prompt may have several (answers of one prompt are alike, and resampled together).

    Raises:
        ValueError: no prompts, columns of different lengths, or a figure that is undefined
            on the whole sample.
    """
    table_CP = _as_table(columns)
    if prompt_ids is not None:
        table_CP = _by_prompt(table_CP, prompt_ids)
    if num_bootstrap < 1 or not 0 < confidence < 1:
        raise ValueError(
            f"num_bootstrap={num_bootstrap}, confidence={confidence}: need >= 1 and a value in (0, 1)"
        )
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(*table_CP.sum(axis=1, keepdims=True))[0])
        if not np.isfinite(value):
            raise ValueError(
                "the figure is undefined on these prompts: the sum that it is divided by is zero"
            )
        num_prompts = table_CP.shape[1]
        rng = np.random.default_rng(seed)
        weights_RP = rng.multinomial(num_prompts, np.full(num_prompts, 1 / num_prompts), size=num_bootstrap)
        resampled_R = statistic(*(weights_RP @ table_CP.T).T)
    # A resample that happens to hold only prompts without tokens says nothing, and is left out.
    resampled_R = resampled_R[np.isfinite(resampled_R)]
    low, high = np.quantile(resampled_R, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(value, float(low), float(high))


def bootstrap_mean(
    values: ArrayLike, *, num_bootstrap: int = 1000, confidence: float = 0.95, seed: int = 0
) -> Interval:
    """Mean over prompts of one number per prompt, `values` of shape [P]."""
    values_P = np.asarray(values, dtype=np.float64)
    return bootstrap_ratio(
        values_P, np.ones_like(values_P), num_bootstrap=num_bootstrap, confidence=confidence, seed=seed
    )


def bootstrap_ratio(
    numerators: ArrayLike,
    denominators: ArrayLike,
    *,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    prompt_ids: Sequence[str] | None = None,
) -> Interval:
    """Ratio of sums, for example accepted mass over tokens (acceptance) or tokens over seconds (speed)."""
    return bootstrap(
        (numerators, denominators),
        lambda num, den: num / den,
        num_bootstrap=num_bootstrap,
        confidence=confidence,
        seed=seed,
        prompt_ids=prompt_ids,
    )


def bootstrap_difference(
    numerators_a: ArrayLike,
    denominators_a: ArrayLike,
    numerators_b: ArrayLike,
    denominators_b: ArrayLike,
    *,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
    prompt_ids: Sequence[str] | None = None,
) -> Interval:
    """Paired difference of two ratios of sums, a - b, on the same prompts."""
    return bootstrap(
        (numerators_a, denominators_a, numerators_b, denominators_b),
        lambda num_a, den_a, num_b, den_b: num_a / den_a - num_b / den_b,
        num_bootstrap=num_bootstrap,
        confidence=confidence,
        seed=seed,
        prompt_ids=prompt_ids,
    )


def bootstrap_speedup(
    tokens: ArrayLike,
    seconds: ArrayLike,
    baseline_tokens: ArrayLike,
    baseline_seconds: ArrayLike,
    *,
    num_bootstrap: int = 1000,
    confidence: float = 0.95,
    seed: int = 0,
) -> Interval:
    """Paired ratio of two speeds (tokens/s), condition over baseline, on the same prompts or batches."""
    return bootstrap(
        (tokens, seconds, baseline_tokens, baseline_seconds),
        lambda tok, sec, base_tok, base_sec: (tok / sec) / (base_tok / base_sec),
        num_bootstrap=num_bootstrap,
        confidence=confidence,
        seed=seed,
    )


def _as_table(columns: Sequence[ArrayLike]) -> Array:
    """Columns stacked to [C, P]."""
    arrays = [np.asarray(column, dtype=np.float64).ravel() for column in columns]
    lengths = [len(array) for array in arrays]
    if not arrays or lengths[0] == 0:
        raise ValueError("bootstrap: no prompts were given")
    if len(set(lengths)) > 1:
        raise ValueError(
            f"bootstrap: columns of different lengths {lengths}; each needs one number per prompt"
        )
    return np.stack(arrays)


def _by_prompt(table_CN: Array, prompt_ids: Sequence[str]) -> Array:
    """Columns [C, P]: the numbers of each prompt added up, prompts in the order in which they first come."""
    places = {name: place for place, name in enumerate(dict.fromkeys(prompt_ids))}
    places_N = np.array([places[name] for name in prompt_ids])
    return np.stack([np.bincount(places_N, weights=column_N, minlength=len(places)) for column_N in table_CN])
