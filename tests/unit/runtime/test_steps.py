"""Other ways of running a decode step give the same tokens: compiled code, CUDA graphs, padded rows."""

import pytest
import torch

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder


def requests(prompts):
    return [Request(prompt, 24, ignore_eos=True) for prompt in prompts]


def tokens(target, draft, prompts, **config):
    decoder = SpeculativeDecoder(
        target, draft, DecoderConfig(num_speculative_tokens=3, max_batch_size=4, **config)
    )
    return [o.token_ids for o in decoder.generate(requests(prompts))]


@pytest.mark.slow
@pytest.mark.timeout(900)  # compiling takes 100 s on an idle core
def test_compiled_steps(target, near_draft, prompts):
    assert tokens(target, near_draft, prompts, compile=True) == tokens(target, None, prompts)


def test_width_invariant_shapes_are_all_the_same(target, near_draft, prompts, monkeypatch):
    """Every decode forward of the target, speculative or plain, has max_batch_size rows and one width."""
    from specdec_runtime.forward import ModelRunner

    shapes = set()
    right = ModelRunner._compute

    def recording(self, model, ids_BL, starts_B, sits_out_B, *args):
        if self.role == "target" and sits_out_B is not None:
            shapes.add(tuple(ids_BL.shape))
        return right(self, model, ids_BL, starts_B, sits_out_B, *args)

    monkeypatch.setattr(ModelRunner, "_compute", recording)
    speculative = tokens(target, near_draft, prompts, width_invariant=True)
    assert speculative == tokens(target, None, prompts, width_invariant=True)
    assert shapes == {(4, 8)}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_graphs(llama, prompts):
    target, draft = llama(seed=0, num_layers=3).cuda(), llama(seed=5, num_layers=1).cuda()
    assert tokens(target, draft, prompts, cuda_graphs=True) == tokens(
        target, None, prompts, cuda_graphs=False
    )
