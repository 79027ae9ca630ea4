"""The table of an ablation: acceptance of every variant, and its difference from the baseline on the same prompts and seeds.

Intervals are 95% and cover both what the training seeds and what the held-out prompts leave to chance; see
`eval/crossed_bootstrap.py`.

Shapes: S seeds, P prompts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from eval.bootstrap import Interval
from eval.crossed_bootstrap import crossed_bootstrap, crossed_difference
from pipeline.markdown import table_lines
from pipeline.prompt_sums import Key, PromptSums, read_prompt_sums
from pipeline.report import read_result
from pipeline.trials import Trial

Sums = dict[int, dict[Key, PromptSums]]
"""By seed, by (draft, temperature, sampler)."""


@dataclass
class Outcome:
    """What became of one (variant, seed)."""

    variant: str
    seed: int
    trial: Trial
    finished: bool = False
    failure: str | None = None


@dataclass(frozen=True)
class Cell:
    """`acceptance_rate` of a variant at one temperature and sampler. `difference`: variant - baseline, None for the baseline."""

    temperature: float
    sampler: str
    value: Interval
    difference: Interval | None

    @property
    def name(self) -> str:
        """As in the heading of its column; at temperature 0 all samplers are one."""
        return "T=0" if self.temperature == 0 else f"T={self.temperature:g} {self.sampler}"


@dataclass(frozen=True)
class Row:
    """One variant over its finished `seeds`; `steps` and `tokens_per_second` of its training are means."""

    variant: str
    overrides: list[str]
    seeds: list[int]
    num_steps: float
    tokens_per_second: float
    train_minutes: float
    cells: list[Cell]


@dataclass(frozen=True)
class AblationResult:
    """`rows` in the plan's order, without variants that have no finished run; `failures` as (variant, seed, reason)."""

    baseline: str
    num_prompts: dict[str, int]
    rows: list[Row] = field(default_factory=list)
    failures: list[tuple[str, int, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """What `ablation.json` holds."""
        return asdict(self)

    def metrics(self) -> dict[str, float]:
        """Each variant's figures by name, for MLflow."""
        return {
            f"{row.variant} {cell.name.replace('=', ' ')}": cell.value.value for row in self.rows for cell in row.cells
        }


def summarise(
    outcomes: Sequence[Outcome], *, variants: dict[str, list[str]], baseline: str, num_bootstrap: int
) -> AblationResult:
    """The table of the outcomes so far; without rows until a run of the baseline is finished.

    Raises:
        ValueError: two runs were measured on different prompts.
    """
    failures = [(one.variant, one.seed, one.failure) for one in outcomes if one.failure is not None]
    done: dict[str, list[Outcome]] = {name: [] for name in variants}
    for outcome in outcomes:
        if outcome.finished:
            done[outcome.variant].append(outcome)
    if not done[baseline]:
        return AblationResult(baseline, {}, [], failures)
    sums = {name: {one.seed: _distilled(one.trial) for one in runs} for name, runs in done.items()}
    rows = [
        Row(
            variant=name,
            overrides=variants[name],
            seeds=list(sums[name]),
            cells=_cells(sums[name], None if name == baseline else sums[baseline], num_bootstrap),
            **_training_means(runs),
        )
        for name, runs in done.items()
        if runs
    ]
    some_run = next(iter(sums[baseline].values()))
    num_prompts = {f"T={temperature:g}": len(one.prompt_ids) for (_, temperature, _), one in some_run.items()}
    return AblationResult(baseline, num_prompts, rows, failures)


def _distilled(trial: Trial) -> dict[Key, PromptSums]:
    """At temperature 0 the samplers agree: one of them is enough."""
    found: dict[Key, PromptSums] = {}
    for key, sums in read_prompt_sums(trial.folders["eval"]).items():
        draft, temperature, _ = key
        if draft == "distilled" and not (temperature == 0 and any(known[1] == 0 for known in found)):
            found[key] = sums
    return found


def _training_means(runs: Sequence[Outcome]) -> dict[str, float]:
    records = [read_result(one.trial.folders["distill"], "train.json") for one in runs]
    return {
        "num_steps": float(np.mean([record["num_steps"] for record in records])),
        "tokens_per_second": float(np.mean([record["tokens_per_second"] for record in records])),
        "train_minutes": float(np.mean([record["seconds"] / 60 for record in records])),
    }


def _cells(runs: Sums, baseline: Sums | None, num_bootstrap: int) -> list[Cell]:
    common = [] if baseline is None else [seed for seed in runs if seed in baseline]
    cells = []
    for key in next(iter(runs.values())):
        sums_SP, counts_P = _stack([runs[seed][key] for seed in runs])
        difference = None
        if baseline is not None and common:
            ours, theirs = ([side[seed][key] for seed in common] for side in (runs, baseline))
            both_SP, _ = _stack(ours + theirs)  # which also checks that the prompts are the same
            difference = crossed_difference(
                both_SP[: len(common)], both_SP[len(common) :], counts_P, num_bootstrap=num_bootstrap
            )
        value = crossed_bootstrap(sums_SP, counts_P, num_bootstrap=num_bootstrap)
        cells.append(Cell(key[1], key[2], value, difference))
    return cells


def _stack(runs: Sequence[PromptSums]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sums [S, P] and counts [P] of runs on the same prompts."""
    first = runs[0]
    for other in runs[1:]:
        if other.prompt_ids != first.prompt_ids or not np.array_equal(other.counts, first.counts):
            raise ValueError(
                "ablation: the runs were measured on different held-out answers, so they cannot be compared in pairs; "
                "variants must not change the corpus or corpus.held_out_fraction"
            )
    return np.stack([one.sums for one in runs]), first.counts


def markdown_table(result: AblationResult) -> str:
    """The table as Markdown, best first; differences whose interval leaves out 0 are bold."""
    if not result.rows:
        return f"no run of the baseline {result.baseline} is finished yet\n"
    names = [cell.name for cell in result.rows[0].cells]
    headings = ["variant", "seeds", "steps", "tokens/s"]
    for name in names:
        headings += [f"alpha {name}", "difference"]
    rows = []
    for row in sorted(result.rows, key=lambda row: -row.cells[0].value.value):
        words = [row.variant, str(len(row.seeds)), f"{row.num_steps:.0f}", f"{row.tokens_per_second:.0f}"]
        for cell in row.cells:
            words += [_shown(cell.value), "baseline" if cell.difference is None else _difference(cell.difference)]
        rows.append(words)
    lines = table_lines(headings, rows)
    prompts = ", ".join(f"{number} at {name}" for name, number in result.num_prompts.items())
    over = "training seeds and held-out answers" if all(len(row.seeds) > 1 for row in result.rows) else (
        "held-out answers, and over training seeds only where there are several"
    )
    lines += ["", f"95% intervals over {over} ({prompts}); differences are paired."]
    lines += [f"Failed: {variant}, seed {seed}: {reason}." for variant, seed, reason in result.failures]
    return "\n".join(lines) + "\n"


def _shown(interval: Interval) -> str:
    return f"{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def _difference(interval: Interval) -> str:
    text = f"{interval.value:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
    return f"**{text}**" if interval.low > 0 or interval.high < 0 else text


def ablation_figure(result: AblationResult) -> Figure:
    """One panel per temperature and sampler: each variant's acceptance with its interval, the baseline's as a line."""
    rows = result.rows[::-1]
    num_panels = len(rows[0].cells)
    figure = Figure(figsize=(1.5 + 3.4 * num_panels, 1.2 + 0.4 * len(rows)), layout="constrained")
    for index, axes in enumerate(figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]):
        intervals = [row.cells[index].value for row in rows]
        values = np.array([one.value for one in intervals])
        ends = np.array([[one.low, one.high] for one in intervals]).T
        axes.errorbar(values, range(len(rows)), xerr=np.abs(ends - values), fmt="o", color="#2f6db5", capsize=3)
        level = next(row.cells[index].value.value for row in rows if row.variant == result.baseline)
        axes.axvline(level, color="#7f7f7f", linewidth=1)
        axes.set_yticks(range(len(rows)), [row.variant for row in rows])
        axes.set_xlabel(f"acceptance rate, {rows[0].cells[index].name}")
        axes.grid(axis="x", alpha=0.3)
    return figure
