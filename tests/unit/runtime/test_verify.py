"""The rule by itself, against hand-made cases and its own definition."""

import torch

from specdec_runtime.verify import sample_by_inverse_cdf, verify_chain


def verdict(draft, target, num_proposed=None):
    draft_ids = torch.tensor(draft)
    counts = torch.tensor(num_proposed or [draft_ids.shape[1]] * draft_ids.shape[0])
    return verify_chain(draft_ids_BG=draft_ids, num_proposed_B=counts, target_ids_BT=torch.tensor(target))


def test_accepts_up_to_the_first_fall():
    """vllm 2658: an accept mask [T, F, T, T] is 1 accepted token."""
    result = verdict([[5, 6, 7, 8]], [[5, 9, 7, 8, 4]])
    assert result.num_accepted_B.tolist() == [1]
    assert result.next_ids_B.tolist() == [9]


def test_bonus_follows_a_full_run():
    """sglang 11572: the bonus is committed but is not an accepted token."""
    result = verdict([[5, 6]], [[5, 6, 3]])
    assert result.num_accepted_B.tolist() == [2]
    assert result.next_ids_B.tolist() == [3]


def test_rows_with_fewer_or_no_proposals():
    """vllm-gaudi 593: a row without proposals sits next to others; what lies behind a row's count is not judged."""
    result = verdict([[5, 6], [5, 6], [5, 6]], [[5, 6, 1], [5, 6, 2], [4, 6, 3]], num_proposed=[2, 1, 0])
    assert result.num_accepted_B.tolist() == [2, 1, 0]
    assert result.next_ids_B.tolist() == [1, 6, 4]


def test_no_proposals_at_all():
    result = verify_chain(
        draft_ids_BG=torch.zeros(2, 0, dtype=torch.long),
        num_proposed_B=torch.zeros(2, dtype=torch.long),
        target_probs_BTV=torch.tensor([[[0.0, 1.0]], [[1.0, 0.0]]]),
        accept_uniform_BG=torch.zeros(2, 0),
        next_uniform_BT=torch.full((2, 1), 0.7),
    )
    assert result.next_ids_B.tolist() == [1, 0]


def sampled(draft, p, q, *, accept, following, ids=None, num_proposed=None):
    p_BTV, draft_ids = torch.tensor([p]), torch.tensor([draft])
    return verify_chain(
        draft_ids_BG=draft_ids,
        num_proposed_B=torch.tensor([len(draft) if num_proposed is None else num_proposed]),
        target_probs_BTV=p_BTV,
        draft_probs_BGN=None if q is None else torch.tensor([q]),
        draft_vocab_ids_N=None if ids is None else torch.tensor(ids),
        accept_uniform_BG=torch.tensor([accept]),
        next_uniform_BT=torch.tensor([following]),
    )


P1, P2, P3 = [0.5, 0.2, 0.3], [0.1, 0.6, 0.3], [0.0, 0.0, 1.0]


def test_residual_is_taken_at_the_rejected_position():
    """openvino.genai 4190: the second token falls, so the residual is max(P2 - q2, 0) = [0, .5, 0]: always id 1."""
    for u in (0.0, 0.5, 0.999):
        result = sampled(
            [0, 2], [P1, P2, P3], [[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], accept=[0.9, 0.9], following=[u] * 3
        )
        assert result.num_accepted_B.tolist() == [1]
        assert result.next_ids_B.tolist() == [1]


def test_acceptance_is_p_over_q():
    q = [[0.2, 0.8, 0.0]]
    for u, num_accepted in ((0.24, 1), (0.26, 0)):  # p / q = 0.2 / 0.8
        result = sampled([1], [P1, P3], q, accept=[u], following=[0.0, 0.0])
        assert result.num_accepted_B.tolist() == [num_accepted]


def test_argmax_draft_is_a_one_hot_q():
    """vllm 40149: a draft chosen by argmax is accepted with p(d), and the residual is p without d."""
    for u, num_accepted in ((0.49, 1), (0.51, 0)):
        result = sampled([0], [P1, P3], None, accept=[u], following=[0.41, 0.0])
        assert result.num_accepted_B.tolist() == [num_accepted]
        assert result.next_ids_B.tolist() == [2]
    low = sampled([0], [P1, P3], None, accept=[0.51], following=[0.39, 0.0])
    assert low.next_ids_B.tolist() == [1]  # residual [0, .2, .3]: id 1 below .4


def test_a_shortlist_head_has_no_mass_elsewhere():
    """q lives on ids {0, 2}; the residual at id 1 is all of p(1)."""
    result = sampled([2], [P2, P3], [[0.5, 0.5]], ids=[0, 2], accept=[0.99], following=[0.0, 0.0])
    assert result.num_accepted_B.tolist() == [0]
    assert result.next_ids_B.tolist() == [1]


def test_fewer_proposals_than_columns_give_the_bonus_of_p():
    """A row that proposed 1 of 2 columns and kept it draws from p, not from the residual of the unused column."""
    q = [[0.5, 0.3, 0.2], [0.0, 1.0, 0.0]]
    result = sampled([0, 1], [P1, P2, P3], q, accept=[0.1, 0.1], following=[0.0, 0.5, 0.0], num_proposed=1)
    assert result.num_accepted_B.tolist() == [1]
    assert result.next_ids_B.tolist() == [1]


def test_identical_models_accept_everything():
    """sglang 11572, vllm 9730: p == q is never rejected, and rounding leaves no empty residual."""
    torch.manual_seed(0)
    p = torch.rand(64, 4, 50).softmax(dim=2)
    ids = torch.multinomial(p[:, :3].flatten(0, 1), 1).view(64, 3)
    result = verify_chain(
        draft_ids_BG=ids,
        num_proposed_B=torch.full((64,), 3),
        target_probs_BTV=p,
        draft_probs_BGN=p[:, :3],
        accept_uniform_BG=torch.rand(64, 3),
        next_uniform_BT=torch.rand(64, 4),
    )
    assert result.num_accepted_B.tolist() == [3] * 64


def test_inverse_cdf_never_draws_an_id_without_mass():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]])
    last = 1 - 2.0**-24
    drawn = [int(sample_by_inverse_cdf(weights, torch.tensor([u]))) for u in (0.0, 0.29, 0.31, 0.9, last)]
    assert drawn == [1, 1, 3, 3, 3]
