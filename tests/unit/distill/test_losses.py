"""Every loss against a brute-force fp64 oracle: values, gradients, extremes, padding, bounds."""

import math

import pytest
import torch
from torch import Tensor

from distill import losses

NAMES = ["forward_kl", "reverse_kl", "jsd", "tv", "nla", "lk_hybrid", "cross_entropy"]
DIVERGENCES = NAMES[:-1]
BOUNDS = ["forward_kl", "reverse_kl", "jsd", "tv", "nla"]


def oracle(name: str, p: Tensor, q: Tensor) -> Tensor:
    """One position, plain probabilities in fp64, term by term with Python's own rules for zero mass."""
    alpha = sum(torch.minimum(p_v, q_v) for p_v, q_v in zip(p, q, strict=True))
    terms = [(p_v, q_v) for p_v, q_v in zip(p, q, strict=True)]
    if name == "forward_kl":
        return sum((p_v * (p_v.log() - q_v.log()) for p_v, q_v in terms if p_v > 0), torch.tensor(0.0).double())
    if name == "reverse_kl":
        return sum((q_v * (q_v.log() - p_v.log()) for p_v, q_v in terms if q_v > 0), torch.tensor(0.0).double())
    if name == "jsd":
        middle = (p + q) / 2
        return (oracle("forward_kl", p, middle) + oracle("forward_kl", q, middle)) / 2
    if name == "tv":
        return 1 - alpha
    if name == "nla":
        return -alpha.log()
    if name == "lk_hybrid":
        lam = math.exp(-3.0 * float(alpha.detach()))
        return lam * oracle("forward_kl", p, q) + (1 - lam) * (1 - alpha)
    return sum((-p_v * q_v.log() for p_v, q_v in terms if p_v > 0), torch.tensor(0.0).double())


def oracle_value_and_grad(name: str, p_NV: Tensor, logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    logits = logits_NV.double().requires_grad_()
    q_NV = torch.softmax(logits, -1)
    values = torch.stack([oracle(name, p, q) for p, q in zip(p_NV.double(), q_NV, strict=True)])
    (grad,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), grad


def value_and_grad(name: str, target_logp: Tensor, logits_NV: Tensor, **options: float) -> tuple[Tensor, Tensor]:
    logits = logits_NV.clone().requires_grad_()
    values = getattr(losses, name)(target_logp, torch.log_softmax(logits, -1), **options)
    (grad,) = torch.autograd.grad(values.sum(), logits)
    return values.detach(), grad


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_full_loss_equals_oracle(name: str, spread: float) -> None:
    torch.manual_seed(1)
    target_logp = torch.log_softmax(torch.randn(5, 9) * spread, -1)
    logits = torch.randn(5, 9) * spread
    value, grad = value_and_grad(name, target_logp, logits)
    expected, expected_grad = oracle_value_and_grad(name, target_logp.double().exp(), logits)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_topk_of_all_ids_equals_full(name: str) -> None:
    torch.manual_seed(2)
    target_logp = torch.log_softmax(torch.randn(4, 7), -1)
    draft_logp = torch.log_softmax(torch.randn(4, 7), -1)
    ids = torch.argsort(target_logp, -1, descending=True)
    cached = getattr(losses, f"{name}_topk")(ids, target_logp.gather(-1, ids), draft_logp)
    torch.testing.assert_close(cached, getattr(losses, name)(target_logp, draft_logp), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_topk_equals_oracle_on_merged_tail(name: str) -> None:
    """Values and gradients of the cached form are those of the full form once the tail is one outcome."""
    torch.manual_seed(3)
    logits = torch.randn(4, 11) * 2
    top = torch.log_softmax(torch.randn(4, 11) * 2, -1).topk(4)

    def merged(q_NV: Tensor) -> Tensor:
        return torch.cat([q_NV.gather(-1, top.indices), 1 - q_NV.gather(-1, top.indices).sum(-1, keepdim=True)], -1)

    p_NB = torch.cat([top.values.double().exp(), 1 - top.values.double().exp().sum(-1, keepdim=True)], -1)
    leaf = logits.double().requires_grad_()
    expected = torch.stack([oracle(name, p, q) for p, q in zip(p_NB, merged(torch.softmax(leaf, -1)), strict=True)])
    (expected_grad,) = torch.autograd.grad(expected.sum(), leaf)
    own = logits.clone().requires_grad_()
    value = getattr(losses, f"{name}_topk")(top.indices, top.values, torch.log_softmax(own, -1))
    (grad,) = torch.autograd.grad(value.sum(), own)
    torch.testing.assert_close(value.double(), expected, rtol=2e-5, atol=2e-6)
    torch.testing.assert_close(grad.double(), expected_grad, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("name", BOUNDS)
def test_topk_is_a_lower_bound(name: str) -> None:
    torch.manual_seed(4)
    target_logp = torch.log_softmax(torch.randn(200, 13) * 2, -1)
    draft_logp = torch.log_softmax(torch.randn(200, 13) * 2, -1)
    top = target_logp.topk(3)
    gap = getattr(losses, name)(target_logp, draft_logp) - getattr(losses, f"{name}_topk")(*top[::-1], draft_logp)
    assert float(gap.min()) > -1e-5
    assert float(gap.mean()) > 1e-3


def test_cached_overlap_brackets_alpha() -> None:
    """sum_topk min <= alpha <= sum_topk min + min(tails): 1 - tv_topk is the upper end."""
    torch.manual_seed(5)
    target_logp = torch.log_softmax(torch.randn(100, 13), -1)
    draft_logp = torch.log_softmax(torch.randn(100, 13), -1)
    top = target_logp.topk(5)
    listed = torch.minimum(top.values, draft_logp.gather(-1, top.indices)).exp().sum(-1)
    alpha = 1 - losses.tv(target_logp, draft_logp)
    upper = 1 - losses.tv_topk(top.indices, top.values, draft_logp)
    assert bool(((listed <= alpha + 1e-6) & (alpha <= upper + 1e-6)).all())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_overlap_one_is_zero_without_gradient(name: str) -> None:
    torch.manual_seed(6)
    logits = torch.randn(6, 40)
    value, grad = value_and_grad(name, torch.log_softmax(logits, -1), logits)
    assert float(value.abs().max()) < 2e-6
    assert float(grad.abs().max()) < 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [30.0, 90.0, 150.0, 400.0])
def test_overlap_zero_has_no_nan_and_the_true_gradient(name: str, gap: float) -> None:
    """Where min(p, q) underflows in fp32 the gradient is still the fp64 one: -log alpha and KL pull hardest there."""
    target_logits = torch.tensor([[gap, 0.0, 0.5, 0.0]])
    logits = torch.tensor([[0.0, gap, 1.0, -1.0]])
    value, grad = value_and_grad(name, torch.log_softmax(target_logits, -1), logits)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(grad).all())
    # reverse KL takes log p as at least log of the smallest fp32, and has no such pull anyway.
    if name != "reverse_kl" or gap < 80:
        expected, expected_grad = oracle_value_and_grad(name, torch.softmax(target_logits.double(), -1), logits)
        torch.testing.assert_close(value.double(), expected, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(grad.double(), expected_grad, rtol=1e-4, atol=1e-6)
    if name in ("forward_kl", "nla", "cross_entropy", "lk_hybrid"):
        assert float(grad[0, 0]) < -0.2


@pytest.mark.parametrize("name", ["forward_kl", "nla", "cross_entropy"])
def test_topk_with_an_underflowing_tail_keeps_its_gradient(name: str) -> None:
    """1 - sum(top-k of q) rounds to 0 here, yet the target puts .4 of its mass into the tail."""
    ids, logp = torch.tensor([[0, 1]]), torch.tensor([[0.6, 1e-6]]).log()
    logits = torch.tensor([[200.0, 0.0, 1.0, 0.0, 0.5]], requires_grad=True)
    value = getattr(losses, f"{name}_topk")(ids, logp, torch.log_softmax(logits, -1))
    (grad,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(value).all())
    if name != "nla":
        torch.testing.assert_close(grad[0, 2:].sum(), torch.tensor(-0.4), atol=1e-3, rtol=0)


def test_reverse_kl_gradient_survives_where_the_target_has_no_mass() -> None:
    """A clamp on the draft's side would leave no gradient; q must still be pushed off an id with p = 0."""
    target_logp = torch.tensor([[0.0, -math.inf]])
    value, grad = value_and_grad("reverse_kl", target_logp, torch.zeros(1, 2))
    assert bool(torch.isfinite(value).all())
    assert float(grad[0, 1]) > 1.0
    logits = torch.zeros(1, 6, requires_grad=True)
    cached = losses.reverse_kl_topk(torch.tensor([[0]]), torch.zeros(1, 1), torch.log_softmax(logits, -1))
    (cached_grad,) = torch.autograd.grad(cached.sum(), logits)
    assert float(cached_grad[0, 0]) < -0.5
    assert float(cached_grad[0, 1:].min()) > 0.1


@pytest.mark.parametrize("name", NAMES)
def test_padding_ids_change_nothing(name: str) -> None:
    """trl 3028: ids that pad a vocabulary are -inf on both sides, and value and gradient are those without them."""
    torch.manual_seed(7)
    target_logits, logits = torch.randn(3, 6), torch.randn(3, 6)
    pad = torch.full((3, 4), -math.inf)
    plain = value_and_grad(name, torch.log_softmax(target_logits, -1), logits)
    target_logp = torch.log_softmax(torch.cat([target_logits, pad], -1), -1)
    padded = value_and_grad(name, target_logp, torch.cat([logits, pad], -1))
    torch.testing.assert_close(padded[0], plain[0])
    torch.testing.assert_close(padded[1][:, :6], plain[1])
    assert float(padded[1][:, 6:].abs().max()) == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_ids_out_of_reach(name: str) -> None:
    """-inf on the draft's side only (a shortlist): finite, and the same from the cached form with id -1."""
    torch.manual_seed(8)
    target_logp = torch.log_softmax(torch.randn(3, 6), -1)
    logits = torch.randn(3, 4)
    full = torch.log_softmax(torch.cat([logits, torch.full((3, 2), -math.inf)], -1), -1)
    value = getattr(losses, name)(target_logp, full)
    ids = torch.tensor([[0, 1, 2, 3, -1, -1]]).expand(3, -1)
    own = logits.clone().requires_grad_()
    cached = getattr(losses, f"{name}_topk")(ids, target_logp, torch.log_softmax(own, -1))
    torch.testing.assert_close(cached, value)
    (grad,) = torch.autograd.grad(cached.sum(), own)
    assert bool(torch.isfinite(grad).all())
    assert float(grad.abs().max()) > 1e-3
    if name == "tv":
        out_of_reach = target_logp.exp()[:, 4:].sum(-1)
        assert bool((value >= out_of_reach - 1e-6).all())
    if name in ("forward_kl", "cross_entropy"):
        p, q = target_logp.exp()[:, :4], torch.softmax(logits, -1)
        torch.testing.assert_close(grad, p.sum(-1, keepdim=True) * q - p)


@pytest.mark.parametrize("name", NAMES)
def test_no_reachable_id_gives_a_finite_loss_without_gradient(name: str) -> None:
    ids, logp = torch.full((2, 3), -1), torch.log_softmax(torch.randn(2, 3), -1)
    logits = torch.randn(2, 5, requires_grad=True)
    value = getattr(losses, f"{name}_topk")(ids, logp, torch.log_softmax(logits, -1))
    (grad,) = torch.autograd.grad(value.sum(), logits)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_temperature_divides_both_sides(name: str) -> None:
    torch.manual_seed(9)
    target_logits, draft_logits = torch.randn(3, 8), torch.randn(3, 8)
    at_half = [torch.log_softmax(logits / 0.5, -1) for logits in (target_logits, draft_logits)]
    at_one = [torch.log_softmax(logits, -1) for logits in (target_logits, draft_logits)]
    expected = getattr(losses, name)(*at_half)
    torch.testing.assert_close(getattr(losses, name)(*at_one, temperature=0.5), expected)
    ids = torch.arange(8).expand(3, -1)
    cached = getattr(losses, f"{name}_topk")(ids, at_one[0], at_one[1], temperature=0.5)
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-5)


def test_jsd_ends_and_bound() -> None:
    torch.manual_seed(10)
    pair = [torch.log_softmax(torch.randn(5, 8) * 5, -1) for _ in range(2)]
    torch.testing.assert_close(losses.jsd(*pair, beta=0.0), losses.forward_kl(*pair))
    torch.testing.assert_close(losses.jsd(*pair, beta=1.0), losses.reverse_kl(*pair))
    exact = [logp.double() for logp in pair]
    torch.testing.assert_close(losses.jsd(*exact, beta=1e-9) / 1e-9, losses.forward_kl(*exact), rtol=1e-4, atol=1e-4)
    assert float(losses.jsd(*pair).max()) <= math.log(2.0)
    with pytest.raises(ValueError, match=r"beta=1\.5"):
        losses.jsd(*pair, beta=1.5)


def test_nla_gradient_is_tv_gradient_over_alpha() -> None:
    torch.manual_seed(11)
    target_logp, logits = torch.log_softmax(torch.randn(4, 9), -1), torch.randn(4, 9)
    rejection, tv_grad = value_and_grad("tv", target_logp, logits)
    _, nla_grad = value_and_grad("nla", target_logp, logits)
    torch.testing.assert_close(nla_grad, tv_grad / (1 - rejection)[:, None])


def test_cross_entropy_on_tokens() -> None:
    torch.manual_seed(12)
    logits = torch.randn(4, 9)
    draft_logp, tokens = torch.log_softmax(logits, -1), torch.tensor([1, 0, 8, 3])
    expected = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    one_hot = torch.full((4, 9), -math.inf).scatter(-1, tokens[:, None], 0.0)
    torch.testing.assert_close(losses.cross_entropy(one_hot, draft_logp), expected)
    torch.testing.assert_close(losses.cross_entropy(one_hot, draft_logp, token_ids_N=tokens), expected)
    cached = losses.cross_entropy_topk(tokens[:, None], torch.zeros(4, 1), draft_logp)
    torch.testing.assert_close(cached, expected)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_match_finite_differences_in_fp64(name: str) -> None:
    torch.manual_seed(13)
    target_logp = torch.log_softmax(torch.randn(2, 6).double(), -1)
    logits = torch.randn(2, 6).double().requires_grad_()
    full, cached = getattr(losses, name), getattr(losses, f"{name}_topk")
    # lk_hybrid's weight is held constant by definition, so its difference quotient is another function's.
    if name != "lk_hybrid":
        assert torch.autograd.gradcheck(lambda x: full(target_logp, torch.log_softmax(x, -1)), (logits,))
        top = target_logp.topk(3)
        assert torch.autograd.gradcheck(
            lambda x: cached(top.indices, top.values, torch.log_softmax(x, -1)), (logits,)
        )


def test_softmax_is_fp32_even_from_bf16() -> None:
    """bf16 log-probabilities cost a fifth of the gradient at high overlap; inputs are raised before any sum."""
    target_logp = torch.log_softmax(torch.randn(3, 50), -1)
    assert losses.tv(target_logp.bfloat16(), target_logp.bfloat16()).dtype == torch.float32


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="cut both to the ids they share"):
        losses.tv(torch.zeros(2, 5), torch.zeros(2, 6))
    with pytest.raises(ValueError, match="holds id 7"):
        losses.tv_topk(torch.tensor([[7]]), torch.zeros(1, 1), torch.zeros(1, 6))


@pytest.mark.parametrize("name", NAMES)
def test_nan_logits_are_not_hidden(name: str) -> None:
    """Handling -inf must not turn a diverged draft into a finite loss."""
    draft_logp = torch.full((1, 4), math.nan)
    target_logp = torch.log_softmax(torch.randn(1, 4), -1)
    assert bool(getattr(losses, name)(target_logp, draft_logp).isnan())
    assert bool(getattr(losses, f"{name}_topk")(torch.tensor([[0, 1]]), target_logp[:, :2], draft_logp).isnan())
