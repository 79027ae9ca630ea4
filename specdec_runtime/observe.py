"""What a round was, for an observer: nobody pays for it who does not ask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Optional

from specdec_runtime.proposal import Proposal
from specdec_runtime.scheduler import Row


@dataclass(frozen=True)
class RoundRecord:
    """One round of one request.

    start: generated tokens before it. proposed_ids: what the target judged, rejected ones included; empty in plain
    decoding. num_accepted: the leading ones of them that stood. committed_ids: what the output got, the accepted ones
    and the correction or bonus behind them, cut at an EOS, stop id or the length limit.
    """

    request_index: int
    start: int
    proposed_ids: list[int]
    num_accepted: int
    committed_ids: list[int]


OnRound = Callable[[RoundRecord], None]


def report_rounds(on_round: OnRound, rows: Sequence[Row], proposal: Optional[Proposal]) -> None:
    """Call `on_round` for each row of a round that was just committed."""
    proposed = [] if proposal is None else proposal.ids_BG.tolist()
    for slot, row in enumerate(rows):
        start, num_proposed, num_accepted = row.rounds[-1]
        ids = proposed[slot][:num_proposed] if num_proposed else []
        on_round(RoundRecord(row.index, start, ids, num_accepted, row.output_ids[start:]))
