"""Acceptance of Medusa heads: position by position, as written out."""

import pytest
import torch

from eval.acceptance_summary import Resampling
from eval.head_acceptance import HeadAcceptance
from specdec_runtime.medusa_heads import heads_of_target


@pytest.mark.parametrize("vocab_ids", [None, list(range(0, 40, 3))])
def test_scores_are_those_of_the_definition(make_model, make_rows, vocab_ids) -> None:
    target, rows = make_model(0), make_rows(6, temperatures=(1.0,))
    heads = heads_of_target(target, num_heads=2, num_layers=1, vocab_ids=vocab_ids)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    sums = {(k, name): 0.0 for k in (1, 2) for name in ("top1", "top5", "acceptance_rate")}
    counts = {1: 0, 2: 0}
    ids = torch.arange(40) if vocab_ids is None else torch.tensor(vocab_ids)
    for row in rows:
        tokens = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
        with torch.no_grad():
            logits, hidden = target(tokens).logits[0], target.base_model(tokens).last_hidden_state[0]
        first, last = len(row["prompt_token_ids"]) - 1, tokens.shape[1] - 2
        for k in (1, 2):
            for t in range(first, last - k + 1):
                with torch.no_grad():
                    own = heads(hidden[t][None])[0, k - 1]
                p, wanted = logits[t + k].softmax(-1), int(logits[t + k].argmax())
                q = torch.zeros(40).index_copy(0, ids, own.softmax(-1))
                ranked = ids[own.argsort(descending=True)].tolist()
                counts[k] += 1
                sums[k, "top1"] += ranked[0] == wanted
                sums[k, "top5"] += wanted in ranked[:5]
                sums[k, "acceptance_rate"] += float(torch.minimum(p, q).sum())
    tables = HeadAcceptance(target, rows, temperatures=[1.0], chunk_positions=3).tables(heads)
    assert [(table.head, table.temperature) for table in tables] == [(1, 1.0), (2, 1.0)]
    for table in tables:
        row = table.row(Resampling(num_bootstrap=20))
        assert row["num_positions"] == counts[table.head]
        for name in ("top1", "top5", "acceptance_rate"):
            assert row[name]["value"] == pytest.approx(sums[table.head, name] / counts[table.head], abs=1e-5)
            assert row[name]["low"] <= row[name]["value"] <= row[name]["high"]


def test_temperature_0_counts_agreement_and_the_call_is_its_mean(make_model, make_rows) -> None:
    target, rows = make_model(0), make_rows(8)
    heads = heads_of_target(target, num_heads=3, num_layers=1)
    measured = HeadAcceptance(target, rows, max_tokens=60)
    tables = measured.tables(heads)
    assert len(tables) == 6
    assert all(t.sums["top1"] == t.sums["acceptance_rate"] for t in tables if t.temperature == 0)
    assert measured(heads) == pytest.approx(sum(t.rate("top1") for t in tables) / 6)
    assert sum(tables[0].counts.values()) <= 30
