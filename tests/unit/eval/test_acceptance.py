"""Teacher-forced acceptance against a slow reading of its definition."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from eval.acceptance import Warper, acceptance_given_token, entropy, overlap
from eval.acceptance_table import paired_difference
from eval.head import num_shared_token_ids
from eval.teacher_forced import teacher_forced_acceptance
from eval.teacher_forcing import Draft

Rows = list[dict[str, Any]]


@torch.no_grad()
def acceptance_by_definition(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    row: dict[str, Any],
    temperature: float,
    sampler: str,
    vocab_ids: list[int] | None = None,
    num_ids: int = 40,
) -> list[float]:
    """One unbatched pass per prefix, sums of minima written out."""
    values = []
    for t in range(len(row["response_token_ids"])):
        prefix = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"][:t]])
        p_logits = target(prefix).logits[0, -1, :num_ids].double()
        q_logits = draft(prefix).logits[0, -1, :num_ids].double()
        if vocab_ids is not None:
            outside = torch.ones(num_ids, dtype=torch.bool)
            outside[vocab_ids] = False
            q_logits[outside] = -torch.inf
        if temperature == 0:
            values.append(float(p_logits.argmax() == q_logits.argmax()))
            continue
        p, q = (p_logits / temperature).softmax(-1), (q_logits / temperature).softmax(-1)
        values.append(float(p[q.argmax()]) if sampler == "greedy" else float(torch.minimum(p, q).sum()))
    return values


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("sampler", ["probabilistic", "greedy"])
@pytest.mark.parametrize("vocab_ids", [None, [3, 5, 8, 13, 21, 34, 35, 36]])
def test_equals_the_definition_position_by_position(
    make_model: Callable[..., PreTrainedModel],
    make_rows: Callable[..., Rows],
    temperature: float,
    sampler: str,
    vocab_ids: list[int] | None,
) -> None:
    target, draft, rows = (
        make_model(0),
        make_model(1, num_layers=1),
        make_rows(5, temperatures=(temperature,)),
    )
    ids = None if vocab_ids is None else torch.tensor(vocab_ids)
    (table,) = teacher_forced_acceptance(
        target, {"d": Draft(draft, ids)}, rows, temperatures=[temperature], samplers=[sampler],
        batch_tokens=40, chunk_positions=7,
    )  # fmt: skip
    assert table.prompt_ids == [row["prompt_id"] for row in rows]
    for row, values in zip(rows, table.values, strict=True):
        expected = acceptance_by_definition(target, draft, row, temperature, sampler, vocab_ids)
        np.testing.assert_allclose(values, expected, atol=2e-5)
    assert table.counts.tolist() == [len(row["response_token_ids"]) for row in rows]


@pytest.mark.parametrize("sampler", ["probabilistic", "greedy"])
def test_the_target_as_its_own_draft_scores_exactly_one(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows], sampler: str
) -> None:
    """Soup 345: draft == target scored .862 because the generation config carried a repetition penalty."""
    target = make_model(0)
    target.generation_config.repetition_penalty = 1.3
    tables = teacher_forced_acceptance(
        target, {"self": Draft(target)}, make_rows(8), temperatures=[0.0, 1.0], samplers=[sampler]
    )
    assert tables[0].rate().value == 1.0
    if sampler == "probabilistic":
        assert tables[1].rate() == tables[0].rate()
        assert all((values == 1.0).all() for values in tables[1].values)
    else:
        assert 0 < tables[1].rate().value < 1


def test_bf16_target_as_its_own_draft_scores_exactly_one(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target = make_model(0).to(torch.bfloat16)
    (table,) = teacher_forced_acceptance(
        target, {"self": Draft(target)}, make_rows(8), temperatures=[1.0], samplers=["probabilistic"]
    )
    assert all((values == 1.0).all() for values in table.values)


def test_each_sampler_has_its_own_figure(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    """vllm 40149: the draft was sampled by argmax, the acceptance computed with softmax q."""
    tables = teacher_forced_acceptance(
        make_model(0), {"d": Draft(make_model(1))}, make_rows(8), temperatures=[1.0]
    )
    rates = {table.sampler: table.rate().value for table in tables}
    assert set(rates) == {"probabilistic", "greedy"}
    assert rates["probabilistic"] != pytest.approx(rates["greedy"], abs=1e-3)


def test_every_token_to_eos_counts_and_none_after(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    """vllm 56101; EAGLE 146, 191: tokens after EOS were counted."""
    target, drafts = make_model(0), {"d": Draft(make_model(1))}
    with_eos, with_rest = (make_rows(2, temperatures=(1.0,)) for _ in range(2))
    for row in with_eos:
        row["response_token_ids"] += [2]
    for row in with_rest:
        row["response_token_ids"] += [2, 7, 2, 9]
    tables = [
        teacher_forced_acceptance(target, drafts, rows, temperatures=[1.0], samplers=["probabilistic"])[0]
        for rows in (with_eos, with_rest)
    ]
    assert tables[0].counts.tolist() == [len(row["response_token_ids"]) for row in with_eos]
    for a, b in zip(tables[0].values, tables[1].values, strict=True):
        np.testing.assert_array_equal(a, b)


def test_rows_of_the_measured_temperature_are_used(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    rows = make_rows(6)
    tables = teacher_forced_acceptance(
        make_model(0),
        {"d": Draft(make_model(1))},
        rows,
        temperatures=[0.0, 1.0, 0.5],
        samplers=["probabilistic"],
    )
    assert tables[0].prompt_ids == ["prompt-0", "prompt-2", "prompt-4"]
    assert tables[1].prompt_ids == ["prompt-1", "prompt-3", "prompt-5"]
    assert tables[2].prompt_ids == [row["prompt_id"] for row in rows]
    assert [table.rows_matched for table in tables] == [True, True, False]


def test_one_target_pass_serves_every_draft(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target = make_model(0)
    num_passes = 0

    def count(*_: Any) -> None:
        nonlocal num_passes
        num_passes += 1

    target.model.layers[0].register_forward_hook(count)
    drafts = {str(seed): Draft(make_model(seed, num_layers=1)) for seed in range(1, 4)}
    teacher_forced_acceptance(target, drafts, make_rows(4, temperatures=(1.0,)), temperatures=[0.0, 1.0])
    # One batch, and the three-token check of the head.
    assert num_passes <= 3


def test_padded_widths_get_no_mass(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    """trl 3028, 2215; ModelOpt 2489: logits 151936 against 152064 wide, one tokenizer."""
    target, draft, rows = (
        make_model(0, vocab_size=48),
        make_model(1, vocab_size=56),
        make_rows(4, temperatures=(1.0,)),
    )
    with pytest.raises(ValueError, match=r"\[48, 56\] wide.*num_token_ids"):
        teacher_forced_acceptance(target, {"d": Draft(draft)}, rows, temperatures=[1.0])
    (table,) = teacher_forced_acceptance(
        target, {"d": Draft(draft)}, rows, temperatures=[1.0], samplers=["probabilistic"], num_token_ids=40
    )
    for row, values in zip(rows, table.values, strict=True):
        np.testing.assert_allclose(
            values, acceptance_by_definition(target, draft, row, 1.0, "probabilistic"), atol=2e-5
        )


def test_a_head_that_is_cut_to_its_shortlist_equals_a_masked_one(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target, full, ids = make_model(0), make_model(1), torch.tensor([3, 7, 11, 30])
    cut = make_model(1)
    cut.lm_head = torch.nn.Linear(32, 4, bias=False)
    cut.lm_head.weight.data = full.lm_head.weight.data[ids]
    tables = teacher_forced_acceptance(
        target, {"full": Draft(full, ids), "cut": Draft(cut, ids)}, make_rows(4), temperatures=[1.0]
    )
    assert tables[0].rate() == tables[2].rate()
    assert paired_difference(tables[0], tables[2]).value == 0


def test_a_warper_is_applied_on_both_sides(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    def keep_two(logits_NV: torch.Tensor) -> torch.Tensor:
        return logits_NV.masked_fill(logits_NV < logits_NV.topk(2).values[:, -1:], -torch.inf)

    target, draft, rows = make_model(0), make_model(1), make_rows(4, temperatures=(1.0,))
    tables = teacher_forced_acceptance(
        target, {"d": Draft(draft), "self": Draft(target)}, rows, temperatures=[1.0], samplers=["probabilistic"],
        warpers=[Warper(top_k=2)],
    )  # fmt: skip
    row, values = rows[0], tables[0].values[0]
    with torch.no_grad():
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"][:-1]])
        start = len(row["prompt_token_ids"]) - 1
        p, q = (keep_two(model(ids).logits[0, start:]).softmax(-1) for model in (target, draft))
    np.testing.assert_allclose(values, torch.minimum(p, q).sum(-1), atol=1e-5)
    assert tables[1].rate().value == 1.0


def test_the_warpers_are_the_runtimes() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    kept = {
        "top_k": Warper(top_k=3),
        "top_p": Warper(top_p=0.6),
        "min_p": Warper(min_p=0.5),
        "none": Warper(),
    }
    assert {name: int(warp(logits).isfinite().sum()) for name, warp in kept.items()} == {
        "top_k": 3,
        "top_p": 2,
        "min_p": 2,
        "none": 4,
    }


def test_rows_past_a_models_context_are_left_out_and_counted(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    """SpecForge 271; vllm 58080: a context longer than the draft's collapsed or crashed."""
    rows = make_rows(3, temperatures=(1.0,))
    rows[1]["response_token_ids"] = [5] * 90
    short = make_model(1, max_position_embeddings=64)
    table = teacher_forced_acceptance(make_model(0), {"d": Draft(short)}, rows, temperatures=[1.0])[0]
    assert table.prompt_ids == ["prompt-0", "prompt-2"]
    assert table.num_skipped_rows == 1


def test_tables_group_by_domain_and_position(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    table = teacher_forced_acceptance(
        make_model(0),
        {"d": Draft(make_model(1))},
        make_rows(6),
        temperatures=[0.5],
        samplers=["probabilistic"],
    )[0]
    by_domain = table.by_domain()
    sums = {
        s: [v.sum() for v, src in zip(table.values, table.sources, strict=True) if src == s] for s in "ab"
    }
    counts = {
        s: [len(v) for v, src in zip(table.values, table.sources, strict=True) if src == s] for s in "ab"
    }
    assert {s: i.value for s, i in by_domain.items()} == pytest.approx(
        {s: sum(sums[s]) / sum(counts[s]) for s in "ab"}
    )
    first, *rest = table.by_position((0, 1, 4))
    assert first["num_tokens"] == 6
    assert first["value"] == pytest.approx(np.mean([v[0] for v in table.values]))
    assert first["num_tokens"] + sum(r["num_tokens"] for r in rest) == table.counts.sum()


def test_tables_group_by_domain_entropy_and_confidence(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target, draft, rows = make_model(0), make_model(1), make_rows(6, temperatures=(1.0,))
    for row in rows[:2]:
        row["domain"] = "code"
    table = teacher_forced_acceptance(
        target, {"d": Draft(draft)}, rows, temperatures=[1.0], samplers=["probabilistic"], chunk_positions=5
    )[0]
    assert table.by_domain().keys() == {"a", "b", "code"}, "without a domain, the source is taken"
    code = np.concatenate(table.values[:2])
    assert table.by_domain()["code"].value == pytest.approx(code.mean(), abs=1e-6)
    row = rows[0]
    with torch.no_grad():
        ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"][:-1]])
        start = len(row["prompt_token_ids"]) - 1
        p, q = (model(ids).logits[0, start:].softmax(-1) for model in (target, draft))
    np.testing.assert_allclose(table.entropies[0], -(p * p.log()).sum(-1), atol=1e-4)
    np.testing.assert_allclose(table.confidences[0], q.amax(-1), atol=1e-5)
    all_values = np.concatenate(table.values).astype(np.float64)
    for ranges, measure in (
        (table.by_entropy((0, 0.5, 1)), np.concatenate(table.entropies)),
        (table.by_confidence(4), np.concatenate(table.confidences)),
    ):
        assert sum(r["num_tokens"] for r in ranges) == len(all_values)
        for r in ranges:
            inside = (measure >= r["start"]) & (measure < r["end"])
            assert r["value"] == pytest.approx(all_values[inside].mean())
            assert r["mean_measure"] == pytest.approx(measure[inside].mean(), rel=1e-5)


def test_a_restricted_table_is_that_of_shorter_responses(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target, drafts, rows = make_model(0), {"d": Draft(make_model(1))}, make_rows(6, temperatures=(1.0,))
    rows[2]["finish_reason"] = "stop"
    rows[2]["response_token_ids"] = rows[2]["response_token_ids"][:3]
    short = [dict(row, response_token_ids=row["response_token_ids"][:5]) for row in rows[1:4]]
    table, expected = (
        teacher_forced_acceptance(target, drafts, some, temperatures=[1.0], samplers=["probabilistic"])[0]
        for some in (rows, short)
    )
    restricted = table.restricted({"prompt-1", "prompt-2", "prompt-3"}, 5)
    assert restricted.prompt_ids == expected.prompt_ids
    assert restricted.was_cut == [True, False, True]
    for name in ("values", "given_token", "entropies", "confidences"):
        for a, b in zip(getattr(restricted, name), getattr(expected, name), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)


def test_given_the_token_acceptance_is_min_one_q_over_p(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target, draft, rows = make_model(0), make_model(1), make_rows(3, temperatures=(1.0,))
    ids = torch.tensor([3, 5, 8, 13, 21, 34, 35, 36])
    tables = teacher_forced_acceptance(
        target, {"d": Draft(draft, ids)}, rows, temperatures=[1.0], chunk_positions=4
    )
    for row, probabilistic, greedy in zip(rows, tables[0].given_token, tables[1].given_token, strict=True):
        for t, token in enumerate(row["response_token_ids"]):
            with torch.no_grad():
                prefix = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"][:t]])
                p = target(prefix).logits[0, -1].softmax(-1)
                q = torch.zeros_like(p).index_copy(0, ids, draft(prefix).logits[0, -1, ids].softmax(-1))
            assert probabilistic[t] == pytest.approx(float((q[token] / p[token]).clamp(max=1)), abs=1e-4)
            assert greedy[t] == float(int(q.argmax()) == token)


def test_the_mean_of_acceptance_given_the_token_is_the_overlap() -> None:
    p, q = torch.tensor([[0.5, 0.3, 0.2, 0.0]]), torch.tensor([[0.1, 0.6, 0.0, 0.3]])
    given = torch.stack([acceptance_given_token(p[:, i], q[:, i]) for i in range(4)], dim=1)
    assert float((p * given).sum()) == pytest.approx(float(overlap(p, q)))


def test_entropy_of_known_distributions() -> None:
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [100.0, 0.0, 0.0, 0.0]])
    assert entropy(logits).tolist() == pytest.approx([np.log(4), 0.0])


def test_each_warper_has_its_own_figure_at_temperatures_above_0(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    """vllm 9834: sampling parameters were not applied when verifying."""
    warpers = [Warper(), Warper(top_p=0.5), Warper(top_k=3)]
    tables = teacher_forced_acceptance(
        make_model(0), {"d": Draft(make_model(1))}, make_rows(4), temperatures=[0.0, 1.0],
        samplers=["probabilistic"], warpers=warpers,
    )  # fmt: skip
    assert [(t.temperature, t.warper) for t in tables] == [
        (0.0, "none"),
        (1.0, "none"),
        (1.0, "top_p=0.5"),
        (1.0, "top_k=3"),
    ]
    assert len({table.rate().value for table in tables[1:]}) == 3
    with pytest.raises(ValueError, match=r"top_p=1\.5"):
        Warper(top_p=1.5)


def test_overlap_stays_within_bounds_for_disjoint_and_equal_rows() -> None:
    p = torch.tensor([[1.0, 0.0, 0.0], [0.2, 0.3, 0.5]])
    q = torch.tensor([[0.0, 0.5, 0.5], [0.2, 0.3, 0.5]])
    assert overlap(p, q).tolist() == [0.0, 1.0]


def test_users_mistakes_are_refused(
    make_model: Callable[..., PreTrainedModel], make_rows: Callable[..., Rows]
) -> None:
    target, drafts = make_model(0), {"d": Draft(make_model(1))}
    with pytest.raises(ValueError, match="top_p"):
        teacher_forced_acceptance(target, drafts, make_rows(2), temperatures=[1.0], samplers=["top_p"])
    with pytest.raises(ValueError, match="no rows"):
        teacher_forced_acceptance(target, drafts, [], temperatures=[1.0])
    foreign = make_rows(1)
    foreign[0]["prompt_token_ids"] = [77]
    with pytest.raises(ValueError, match="another tokenizer"):
        teacher_forced_acceptance(target, drafts, foreign, temperatures=[1.0])
    with pytest.raises(ValueError, match="vocab_ids"):
        teacher_forced_acceptance(
            target, {"d": Draft(target, torch.tensor([90]))}, make_rows(1), temperatures=[1.0]
        )
    tables = teacher_forced_acceptance(
        target, drafts, make_rows(4), temperatures=[0.0, 1.0], samplers=["greedy"]
    )
    with pytest.raises(ValueError, match="different prompts"):
        paired_difference(*tables)


def test_tokenizers_are_compared_by_their_maps() -> None:
    """vllm 7252, 42775: same size but another tokenizer was silently wrong."""
    target = {"a": 0, "b": 1, "c": 2}
    assert num_shared_token_ids(target, dict(target)) == 3
    with pytest.raises(ValueError, match=r"2 tokens.*'b': 1 / 2"):
        num_shared_token_ids(target, {"a": 0, "b": 2, "c": 1})
    with pytest.raises(ValueError, match="'c': 2 / None"):
        num_shared_token_ids(target, {"a": 0, "b": 1})
