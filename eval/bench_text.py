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
from specdec_runtime.medusa_heads import MedusaHeads


def add_acceptance_from_text(
    rows: Sequence[Row],
    measurements: Sequence[Measurement],
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Sequence[Sequence[int]],
    *,
    sampler: str,
) -> None:
    """Give each native chain of a draft model with a fixed gamma `acceptance_from_text`: P(proposals 1..i all stand), i = 1..gamma.

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
    measured = {row["draft"]: drafts[row["draft"]] for row in drafted}
    tables = teacher_forced_acceptance(target, measured, answers, temperatures=[temperature], samplers=[sampler])
    of_draft = {table.draft: table for table in tables}
    for row in drafted:
        row["acceptance_from_text"] = expected_rounds(of_draft[row["draft"]], row["gamma"]).cumulative


def _is_predictable(row: Row, drafts: Mapping[str, Draft]) -> bool:
    draft, is_chain = drafts.get(row["draft"]), row["gamma_policy"] == "fixed" and row["tree"] is None
    is_model = draft is not None and not isinstance(draft.model, MedusaHeads)
    return row["backend"] == "native" and is_model and is_chain
