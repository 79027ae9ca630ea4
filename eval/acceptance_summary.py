"""From tables of acceptance to what is written and shown: JSON rows with intervals, by domain, position, entropy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.acceptance_table import AcceptanceTable, paired_difference
from eval.decoded_acceptance import DecodedAcceptance
from eval.rounds import expected_rounds

Entry = dict[str, Any]


@dataclass(frozen=True)
class Resampling:
    """Of every interval: number of bootstrap resamples, and their seed."""

    num_bootstrap: int = 1000
    seed: int = 0

    @property
    def options(self) -> dict[str, int]:
        return {"num_bootstrap": self.num_bootstrap, "seed": self.seed}


def rate_row(table: AcceptanceTable, resampling: Resampling) -> Entry:
    """One `acceptance_rate` with its 95% interval over prompts. `num_skipped_rows`: too long for the context of the target or a draft."""
    return {
        **table.key,
        **table.rate(**resampling.options).as_dict(),
        "num_positions": int(table.counts.sum()),
        "num_prompts": len(set(table.prompt_ids)),
        "num_skipped_rows": table.num_skipped_rows,
        "rows_matched": table.rows_matched,
    }


def paired_differences(
    tables: Sequence[AcceptanceTable], baseline: str, resampling: Resampling
) -> list[Entry]:
    """draft - baseline on the same prompts, for every other draft, temperature, sampler and warper."""
    of_key = {tuple(table.key.values()): table for table in tables}
    result = []
    for table in tables:
        before = of_key.get((baseline, table.temperature, table.sampler, table.warper))
        if table.draft != baseline and before is not None:
            interval = paired_difference(table, before, **resampling.options)
            result.append({**table.key, "baseline": baseline, **interval.as_dict()})
    return result


def breakdown(table: AcceptanceTable, resampling: Resampling) -> Entry:
    """The table by domain, by position in the response, by the target's entropy, and by the draft's confidence."""
    return {
        **table.key,
        "by_domain": {
            domain: interval.as_dict() for domain, interval in table.by_domain(**resampling.options).items()
        },
        "by_position": table.by_position(),
        "by_entropy": table.by_entropy(),
        "by_confidence": table.by_confidence(),
    }


def rounds_row(table: AcceptanceTable, max_gamma: int, resampling: Resampling) -> Entry:
    """tau for gamma 1..max_gamma, and acceptance within a round at the longest, worked out from the text."""
    by_gamma = {gamma: expected_rounds(table, gamma) for gamma in range(1, max_gamma + 1)}
    longest = by_gamma[max_gamma]
    return {
        **table.key,
        "tau": {
            str(gamma): rounds.block_efficiency(**resampling.options).as_dict()
            for gamma, rounds in by_gamma.items()
        },
        "cumulative_acceptance": {str(gamma): rounds.cumulative for gamma, rounds in by_gamma.items()},
        "conditional_acceptance": longest.conditional,
    }


def decoded_row(decoded: DecodedAcceptance, tables: Iterable[AcceptanceTable], resampling: Resampling) -> Entry:
    """What real decoding showed, beside what the text says of the same draft, temperature, sampler and gamma.

    `agrees`: the intervals of accepted / judged proposals overlap. What no proposal was judged for is None: answers of one token,
    or of two where the limit leaves no room for a proposal.
    """
    options = resampling.options
    num_judged = sum(decoded.stats.judged_per_position)
    judged = decoded.judged_acceptance(**options) if num_judged else None
    row: Entry = {
        "draft": decoded.draft,
        "temperature": decoded.temperature,
        "sampler": decoded.sampler,
        "gamma": decoded.gamma,
        "judged_acceptance": None if judged is None else judged.as_dict(),
        "conditional_acceptance": [interval.as_dict() for interval in decoded.conditional(**options)],
        "block_efficiency": decoded.block_efficiency(**options).as_dict(),
        "num_prompts": len(decoded.outputs),
        "num_judged": num_judged,
    }
    key = {"draft": decoded.draft, "temperature": decoded.temperature, "sampler": decoded.sampler, "warper": "none"}
    for table in tables:
        if table.key == key and table.prompt_ids:
            expected = expected_rounds(table, decoded.gamma)
            from_text = expected.judged_acceptance(**options) if expected.judged.sum() > 0 else None
            row["from_text"] = {
                "acceptance_rate": table.rate(**options).as_dict(),
                "judged_acceptance": None if from_text is None else from_text.as_dict(),
                "conditional_acceptance": expected.conditional,
                "block_efficiency": expected.block_efficiency(**options).as_dict(),
            }
            row["agrees"] = None
            if judged is not None and from_text is not None:
                row["agrees"] = from_text.low <= judged.high and judged.low <= from_text.high
    return row
