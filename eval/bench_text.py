"""What the benchmark's own texts say of the drafts: acceptance within a round, from plain decoding's answers by teacher forcing.

Beside what speculation then did on the same prompts it tells whether a prediction missed because the prompts were
easier or harder than the text that it came from, or because the clock ran otherwise.
"""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedModel

from eval.bench_measure import Measurement
from eval.bench_rows import Row
from eval.rounds import expected_rounds
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft


def add_acceptance_from_text(
    rows: Sequence[Row],
    measurements: Sequence[Measurement],
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Sequence[int]],
    *,
    sampler: str,
) -> None:
    """Give each native row with a draft and a fixed gamma `acceptance_from_text`: P(proposals 1..i all stand), i = 1..gamma.

    Args:
        rows: the bench's rows of one temperature and batch size, of which `measurements` are the source; changed in place.
            Without native plain decoding among them nothing is added.
    """
    plain = next((m for m in measurements if m.condition.is_plain and m.condition.backend == "native"), None)
    drafted = [row for row in rows if _is_predictable(row, drafts)]
    if plain is None or not drafted:
        return
    temperature = plain.condition.temperature
    answers = [
        {
            "prompt_id": str(index),
            "source": "bench",
            "prompt_token_ids": list(prompt),
            "response_token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "temperature": temperature,
        }
        for index, (prompt, output) in enumerate(zip(prompts, plain.outputs, strict=False))
    ]
    tables = teacher_forced_acceptance(target, drafts, answers, temperatures=[temperature], samplers=[sampler])
    of_draft = {table.draft: table for table in tables}
    for row in drafted:
        row["acceptance_from_text"] = expected_rounds(of_draft[row["draft"]], row["gamma"]).cumulative


def _is_predictable(row: Row, drafts: Mapping[str, Draft]) -> bool:
    return row["backend"] == "native" and row["draft"] in drafts and row["gamma_policy"] == "fixed"
