"""Traces: who wrote each token, with the engine's counts and a slow reading of p and q."""

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from eval.teacher_forcing import Draft
from eval.token_trace import ACCEPTED, BONUS, CORRECTION, PREFILL, TokenTrace, token_texts, trace_tokens
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder

MakeModel = Callable[..., PreTrainedModel]
PROMPTS = [("one", [3, 4, 5]), ("two", [9, 8]), ("three", [30, 31, 32, 33])]


def words(token_ids: list[int]) -> str:
    return "".join(f" w{i}" for i in token_ids)


def noisy_copy(make_model: MakeModel, size: float) -> PreTrainedModel:
    draft = make_model(0)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += size * torch.randn_like(parameter)
    return draft


@pytest.fixture(scope="module")
def traces(make_model: MakeModel) -> list[TokenTrace]:
    drafts = {
        "near": Draft(noisy_copy(make_model, 0.05)),
        "short": Draft(noisy_copy(make_model, 0.05), torch.tensor([3, 5, 7, 11, 13, 17, 19, 23, 29, 31])),
    }
    return trace_tokens(
        make_model(0), drafts, PROMPTS, words, temperatures=[0.0, 1.0], gamma=3, max_new_tokens=20
    )


def test_one_trace_per_prompt_temperature_and_draft(traces: list[TokenTrace]) -> None:
    assert [(t.prompt, t.temperature, t.draft) for t in traces] == [
        (prompt, temperature, draft)
        for prompt, _ in PROMPTS
        for temperature in (0.0, 1.0)
        for draft in ("near", "short")
    ]


def test_counts_are_the_engines_and_texts_join_to_the_output(traces: list[TokenTrace]) -> None:
    for trace in traces:
        assert "".join(token.token.text for token in trace.tokens) == trace.text
        assert trace.num_written_by(PREFILL) == 1
        assert trace.num_written_by(ACCEPTED) == trace.num_accepted
        assert max(token.round for token in trace.tokens) == trace.num_rounds
        assert trace.block_efficiency == pytest.approx(len(trace.tokens) / (1 + trace.num_rounds))
    assert {token.writer for trace in traces for token in trace.tokens} == {PREFILL, ACCEPTED, CORRECTION, BONUS}


def test_the_output_is_that_of_decoding_without_an_observer(make_model: MakeModel, traces: list[TokenTrace]) -> None:
    decoder = SpeculativeDecoder(
        make_model(0),
        noisy_copy(make_model, 0.05),
        DecoderConfig(num_speculative_tokens=3, max_batch_size=3, min_conditional_acceptance=0.0),
    )
    for temperature in (0.0, 1.0):
        outputs = decoder.generate(
            [
                Request(ids, max_new_tokens=20, temperature=temperature, seed=i)
                for i, (_, ids) in enumerate(PROMPTS)
            ]
        )
        chosen = [t for t in traces if t.draft == "near" and t.temperature == temperature]
        assert [t.text for t in chosen] == [words(output.token_ids) for output in outputs]


def test_rejected_proposals_have_their_place_and_p_and_q_are_recomputed(
    make_model: MakeModel, traces: list[TokenTrace]
) -> None:
    target, draft = make_model(0), noisy_copy(make_model, 0.05)
    (trace,) = (t for t in traces if (t.prompt, t.temperature, t.draft) == ("three", 1.0, "near"))
    ids = list(PROMPTS[2][1])
    for token in trace.tokens:
        with torch.no_grad():
            p, q = (model(torch.tensor([ids])).logits[0, -1].softmax(-1) for model in (target, draft))
        for shown in filter(None, (token.token, token.rejected)):
            assert shown.p == pytest.approx(float(p[shown.token_id]), abs=1e-4)
            assert shown.q == pytest.approx(float(q[shown.token_id]), abs=1e-4)
        assert (token.rejected is not None) == (token.writer == CORRECTION)
        if token.rejected is not None:
            assert token.rejected.p < token.rejected.q, "a proposal with p >= q is never rejected"
        ids.append(token.token.token_id)


def test_at_temperature_0_a_rejected_proposal_is_the_drafts_best_and_not_the_targets(traces: list[TokenTrace]) -> None:
    for trace in traces:
        for token in trace.tokens if trace.temperature == 0 else ():
            if token.rejected is not None:
                assert token.rejected.token_id != token.token.token_id
                assert token.token.p > token.rejected.p


def test_a_shortlisted_draft_has_no_mass_elsewhere(traces: list[TokenTrace]) -> None:
    for trace in traces:
        for token in trace.tokens if trace.draft == "short" else ():
            assert (token.token.q == 0) == (token.token.token_id not in (3, 5, 7, 11, 13, 17, 19, 23, 29, 31))


def test_an_eos_inside_an_accepted_block_ends_the_trace(make_model: MakeModel) -> None:
    """transformers 47912: output went on behind an EOS in an accepted block."""
    target = make_model(0)
    plain = SpeculativeDecoder(target).generate([Request([3, 4, 5], max_new_tokens=20)])[0].token_ids
    target.generation_config.eos_token_id = plain[5]
    end = plain.index(plain[5])
    (trace,) = trace_tokens(target, {"self": Draft(target)}, [("p", [3, 4, 5])], words, gamma=8, max_new_tokens=20)
    assert [t.token.token_id for t in trace.tokens] == plain[: end + 1]
    assert trace.finish_reason == "stop"
    assert trace.num_written_by(ACCEPTED) == trace.num_accepted == end


def test_a_character_of_several_tokens_is_given_to_its_last_one() -> None:
    data = "aé€b".encode()

    def detokenize(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    assert token_texts(list(data), detokenize) == ["a", "", "é", "", "", "€", "b"]
    cut = list(data)[:-2]
    assert "".join(token_texts(cut, detokenize)) == detokenize(cut)
