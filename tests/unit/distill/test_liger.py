"""The optional Triton kernels: refused where they cannot work, equal to the chunked loss where they can."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from distill.config import LossConfig
from distill.draft_init import draft_from_layers
from distill.head import LMHead, chunked_head_loss
from distill.liger import fused_summed_loss, require_fusable, require_liger
from distill.objective import Objective
from tests.unit.distill.training_call import MakeModel, MakeRows, train


def test_refused_without_the_package_or_cuda(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.liger.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"train.liger=true needs the package liger-kernel: pip install .*or set train.liger=false"):
        train(draft_from_layers(llama(), [0, 3]), rows(llama()), tmp_path / "new", max_steps=1, liger=True)
    assert not (tmp_path / "new").exists()
    monkeypatch.setattr("distill.liger.find_spec", lambda name: object())
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="train.liger=true needs a CUDA device"):
        require_liger()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"online": False}, "loss.teacher=cached"),
        ({"weights": {"tv": 1.0}}, r"loss.weights=\{'tv': 1.0\}: they know one of forward_kl"),
        ({"weights": {"forward_kl": 0.5, "jsd": 0.5}}, "loss.weights="),
        ({"has_shortlist": True}, "draft.vocab_shortlist"),
        ({"selects_tokens": True}, "train.token_selection"),
        ({"softcap": 30.0}, "soft cap"),
        ({"wide": True}, "heads of 61 and 70 ids"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(change: dict, message: str, llama: MakeModel) -> None:
    head = LMHead.of(llama())
    head.softcap = change.get("softcap")
    target_head = LMHead.of(llama(vocab_size=70 if change.get("wide") else 61))
    objective = Objective(LossConfig(weights=change.get("weights", {"jsd": 1.0})))
    with pytest.raises(ValueError, match=message):
        require_fusable(
            objective, head, target_head if change.get("online", True) else None,
            has_shortlist=change.get("has_shortlist", False), selects_tokens=change.get("selects_tokens", False),
        )


def test_plain_heads_and_one_divergence_go(llama: MakeModel) -> None:
    for name in ("forward_kl", "reverse_kl", "jsd"):
        objective = Objective(LossConfig(weights={name: 1.0}))
        require_fusable(objective, LMHead.of(llama()), LMHead.of(llama()), has_shortlist=False, selects_tokens=False)


@pytest.mark.gpu
@pytest.mark.skipif(find_spec("liger_kernel") is None or not torch.cuda.is_available(), reason="needs liger-kernel and CUDA")
@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(("name", "weight"), [("forward_kl", 1.0), ("reverse_kl", 0.5), ("jsd", 1.0)])
def test_fused_loss_equals_the_chunked_one(name: str, weight: float, temperature: float, llama: MakeModel) -> None:
    """Value and gradients of hidden states and head, in fp32."""
    target_head, objective = LMHead.of(llama(seed=1).cuda()), Objective(LossConfig({name: weight}, temperature=temperature, jsd_beta=0.3))
    target_SH, tokens = torch.randn(37, 32, device="cuda"), torch.full((37,), -1, device="cuda")
    target_SV = target_head.project(target_SH, torch.float32)
    sides = []
    for fused in (True, False):
        torch.manual_seed(0)
        head = LMHead.of(llama().cuda())
        hidden_SH = torch.randn(37, 32, device="cuda", requires_grad=True)
        if fused:
            total = fused_summed_loss(hidden_SH, head, target_SH, target_head, objective, torch.float32)
        else:
            total = chunked_head_loss(
                hidden_SH, head, lambda logits, start, end: objective.full(target_SV[start:end], logits, tokens[start:end], None),
                chunk_tokens=8, compute_dtype=torch.float32,
            )  # fmt: skip
        (3 * total).backward()
        sides.append((total.detach(), hidden_SH.grad, head.weight_VH.grad))
    for fused, eager in zip(*sides, strict=True):
        torch.testing.assert_close(fused, eager, rtol=1e-3, atol=1e-4)
