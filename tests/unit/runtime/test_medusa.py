"""Medusa's heads in the engine: chains and trees from the target's hidden state, and no output changes."""

import json

import pytest
import torch

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder, load_medusa_heads
from specdec_runtime import engine as engine_module
from specdec_runtime.forward import ModelRunner, StepOptions
from specdec_runtime.medusa_heads import MedusaHeads, heads_of_target
from tests.unit.runtime.test_losslessness_sampled import ALPHA, CASES, p_value

NUM_NEW = 40
UNEVEN = [-1, -1, -1, 0, 0, 1, 3, 3, 5]
TREES = [None, "binary3", "3x2", "chain3", "dynamic9d3", UNEVEN]


def decoder(target, heads, **config) -> SpeculativeDecoder:
    settings = {"drafter": "medusa", "num_speculative_tokens": 3, "max_batch_size": 4, **config}
    return SpeculativeDecoder(target, heads, DecoderConfig(**settings))


def fitted_heads(target, prompts, vocab_ids=None) -> MedusaHeads:
    """Heads that know some of the target's greedy outputs by heart, and are wrong elsewhere."""
    heads = heads_of_target(target, num_heads=3, num_layers=1, vocab_ids=vocab_ids)
    outputs = SpeculativeDecoder(target, config=DecoderConfig(max_batch_size=10)).generate(
        [Request(prompt, NUM_NEW) for prompt in prompts[::2]]
    )
    optimizer = torch.optim.Adam(heads.parameters(), lr=0.02)
    pairs = []
    for prompt, output in zip(prompts[::2], outputs, strict=True):
        ids = torch.tensor([*prompt, *output.token_ids])
        with torch.no_grad():
            hidden = target.base_model(ids[None]).last_hidden_state[0]
        pairs += [(hidden[t], ids[t + 2 : t + 5]) for t in range(len(prompt) - 1, len(ids) - 4)]
    hidden_BH, next_BK = (torch.stack(column) for column in zip(*pairs, strict=True))
    columns_BK = next_BK if vocab_ids is None else torch.searchsorted(heads.vocab_ids_N, next_BK)
    columns_BK = columns_BK.clamp(max=heads.shape.num_ids - 1)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(heads(hidden_BH).flatten(0, 1), columns_BK.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return heads.eval()


@pytest.fixture(scope="module")
def heads(target, prompts) -> MedusaHeads:
    return fitted_heads(target, prompts)


@pytest.fixture(scope="module")
def expected(target, prompts, hf_greedy):
    return [hf_greedy(target, prompt, NUM_NEW) for prompt in prompts]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("tree", TREES)
def test_greedy_tokens_are_those_of_transformers(target, heads, prompts, expected, tree, batch):
    speculative = decoder(target, heads, tree=tree, max_batch_size=batch)
    outputs = speculative.generate([Request(prompt, NUM_NEW) for prompt in prompts])
    assert [o.token_ids for o in outputs] == expected
    assert 0 < speculative.stats.num_accepted < speculative.stats.num_proposed
    assert speculative.stats.block_efficiency > 1.3


@pytest.mark.parametrize(
    "options",
    [
        {"width_invariant": True},
        {"verify_width": 20},
        {"max_draft_tokens": 20, "tree": "3x2"},
        {"sampler": "greedy"},
        {"pack_weights": False},
        {"prefill_chunk_tokens": 7},
        {"num_speculative_tokens": 1},
        {"num_speculative_tokens": 0},
    ],
)
def test_options_do_not_change_the_output(target, heads, prompts, expected, options):
    outputs = decoder(target, heads, **options).generate([Request(prompt, NUM_NEW) for prompt in prompts])
    assert [o.token_ids for o in outputs] == expected


def test_penalties_follow_the_path(target, heads, prompts):
    penalties = {"repetition_penalty": 1.4, "presence_penalty": 0.5, "min_new_tokens": 12, "logit_bias": {5: 2.0}}
    requests = [Request(prompt, 30, **penalties) for prompt in prompts]
    plain = SpeculativeDecoder(target).generate(requests)
    for tree in (None, "binary3"):
        outputs = decoder(target, heads, tree=tree).generate(requests)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in plain]


def test_a_shortlist_and_rows_that_do_not_speculate(target, prompts, expected):
    heads = fitted_heads(target, prompts, vocab_ids=[0, *range(5, 97, 2)])
    requests = [Request(prompt, NUM_NEW, speculate=i != 3) for i, prompt in enumerate(prompts)]
    for tree in (None, "3x2"):
        outputs = decoder(target, heads, tree=tree).generate(requests)
        assert [o.token_ids for o in outputs] == expected
        assert outputs[3].stats.num_proposed == 0 < outputs[0].stats.num_proposed


def test_a_tree_has_more_accepted_than_its_chain(target, heads, prompts):
    requests = [Request(p, NUM_NEW, temperature=t, seed=1, ignore_eos=True) for p in prompts for t in (0.0, 1.0)]
    chain, wide = (decoder(target, heads, tree=tree) for tree in (None, "3x2x1"))
    for each in (chain, wide):
        each.generate(requests)
    assert chain.stats.block_efficiency < wide.stats.block_efficiency


def test_a_tree_without_branches_decodes_as_a_chain(target, heads, prompts):
    requests = [Request(p, NUM_NEW, temperature=0.9, top_k=20, seed=i) for i, p in enumerate(prompts)]
    outputs = [[o.token_ids for o in decoder(target, heads, tree=t).generate(requests)] for t in (None, "chain3")]
    assert outputs[0] == outputs[1]


def test_a_seeded_row_gives_the_same_alone_and_batched(target, heads, prompts):
    seeded = [Request(p, 25, temperature=0.9, top_p=0.95, seed=10 + i) for i, p in enumerate(prompts)]
    alone = [decoder(target, heads, max_batch_size=1).generate([r])[0].token_ids for r in seeded]
    outputs = decoder(target, heads).generate([Request([4, 5, 6], 9), *reversed(seeded)])
    assert [o.token_ids for o in reversed(outputs[1:])] == alone


@pytest.mark.parametrize("tree", [None, "binary3"])
def test_each_round_proposes_from_the_last_accepted_position(target, heads, prompts, tree, monkeypatch):
    """The hidden state that is kept is the one of an ordinary forward over the committed tokens but the last."""
    seen = []
    right = engine_module.make_drafter

    def watched(*args, **kwargs):
        drafter = right(*args, **kwargs)
        propose = drafter.propose

        def recorded(batch, wanted, *rest, **options):
            seen.extend((list(row.token_ids), row.hidden_H) for row in batch.rows)
            return propose(batch, wanted, *rest, **options)

        drafter.propose = recorded
        return drafter

    monkeypatch.setattr(engine_module, "make_drafter", watched)
    decoder(target, heads, tree=tree, prefill_chunk_tokens=16).generate([Request(p, 15) for p in prompts])
    assert len(seen) > 20
    for ids, hidden_H in seen:
        with torch.no_grad():
            expected = target.base_model(torch.tensor([ids[:-1]])).last_hidden_state[0, -1]
        torch.testing.assert_close(hidden_H, expected, rtol=1e-4, atol=1e-4)


def test_hidden_states_are_those_of_the_logits(target):
    runner = ModelRunner(target, "target", StepOptions(pack_weights=True))
    runner.allocate(1, 64)
    ids, at_0 = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([0])
    with torch.inference_mode():
        runner.step(ids, at_0, num_cached=5)
        assert runner.hidden_BLH is None
        runner.keeps_hidden = True
        for num in (None, 2, 1):
            logits = runner.step(ids, at_0, num_cached=5, num_logits=num)
            assert runner.hidden_BLH.shape == (1, num or 5, 32)
            torch.testing.assert_close(target.lm_head(runner.hidden_BLH), logits, rtol=1e-4, atol=1e-4)
    assert not target.base_model._forward_hooks


@pytest.fixture(scope="module")
def small(llama):
    """A target of four ids and heads that are far from it."""
    target = llama(seed=3, vocab_size=4, hidden_size=16, intermediate_size=16, num_layers=1)
    heads = heads_of_target(target, num_heads=2, num_layers=1)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return target, heads


@pytest.mark.parametrize("tree", [None, "3x2", "dynamic5d2"])
@pytest.mark.parametrize("name", ["temperature", "top_k", "all"])
def test_outputs_follow_the_target(small, name, tree):
    config = {"drafter": "medusa", "num_speculative_tokens": 2, "tree": tree}
    assert p_value(small, CASES[name], **config) > ALPHA


@pytest.mark.parametrize("tree", [None, "3x2"])
def test_a_wrong_q_is_found(small, monkeypatch, tree):
    """The rule is told another q than the one that was sampled."""
    from specdec_runtime import medusa

    right = medusa.MedusaDrafter.propose

    def faulty(self, *args, **kwargs):
        proposal = right(self, *args, **kwargs)
        q = proposal.probs_BGN
        return proposal._replace(probs_BGN=None if q is None else q**3 / (q**3).sum(dim=2, keepdim=True))

    monkeypatch.setattr(medusa.MedusaDrafter, "propose", faulty)
    config = {"drafter": "medusa", "num_speculative_tokens": 2, "tree": tree}
    assert p_value(small, CASES["temperature"], **config) < ALPHA


@pytest.mark.parametrize("tree", [None, "3x2"])
def test_typical_acceptance_accepts_more_and_says_so(target, heads, prompts, tree):
    """Medusa's rule with a small eta; at temperature 0 too it may leave the target's own text."""
    for temperature in (0.0, 1.0):
        requests = [Request(p, 20, temperature=temperature, seed=3, ignore_eos=True) for p in prompts]
        typical = decoder(target, heads, acceptance="typical", eta=0.01, tree=tree)
        exact = decoder(target, heads, tree=tree)
        assert not any(o.lossless for o in typical.generate(requests))
        assert all(o.lossless for o in exact.generate(requests))
        assert typical.stats.draft_acceptance_rate > exact.stats.draft_acceptance_rate


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_typical_acceptance_of_a_tree_without_branches_is_that_of_a_chain(target, heads, prompts, temperature):
    requests = [Request(p, NUM_NEW, temperature=temperature, seed=i) for i, p in enumerate(prompts)]
    chain, tree = (decoder(target, heads, acceptance="typical", eta=0.2, tree=t) for t in (None, "chain3"))
    assert [o.token_ids for o in chain.generate(requests)] == [o.token_ids for o in tree.generate(requests)]
    assert chain.stats.accepted_per_position == tree.stats.accepted_per_position


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_typical_acceptance_lets_stand_passes_its_test(target, heads, prompts, temperature, monkeypatch):
    """p(d) > min(eta^2, eta * exp(-H(p))), with p after an ordinary forward over the text before; at temperature 0 p is the one at 1."""
    eta, accepted = 0.3, []
    right = engine_module.SpeculativeDecoder._commit

    def watched(self, batch, judgement, now_s):
        for row, block, num in zip(batch.rows, judgement.blocks, judgement.num_accepted, strict=True):
            accepted.extend(([*row.token_ids, *block[:i]], block[i]) for i in range(num))
        return right(self, batch, judgement, now_s)

    monkeypatch.setattr(engine_module.SpeculativeDecoder, "_commit", watched)
    speculative = decoder(target, heads, acceptance="typical", eta=eta, tree="3x2")
    speculative.generate([Request(p, 20, temperature=temperature, seed=1) for p in prompts])
    assert len(accepted) > 20
    for before, token in accepted:
        with torch.no_grad():
            logits = target(torch.tensor([before])).logits[0, -1]
        p = torch.softmax(logits / (temperature or 1.0), dim=0)
        entropy = -(p * p.log()).sum()
        assert float(p[token]) > min(eta**2, eta * float(torch.exp(-entropy))) - 1e-4


def test_saved_heads_are_the_same(target, heads, tmp_path, prompts):
    heads.save(tmp_path / "heads")
    loaded = load_medusa_heads(tmp_path / "heads", "float32")
    assert loaded.shape == heads.shape
    for name, tensor in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    requests = [Request(p, 20, temperature=0.8, seed=2) for p in prompts]
    first, second = (decoder(target, h).generate(requests) for h in (heads, loaded))
    assert [o.token_ids for o in first] == [o.token_ids for o in second]
    config = tmp_path / "heads" / "medusa_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_heads": 2}))
    with pytest.raises(ValueError, match="do not fit"):
        load_medusa_heads(tmp_path / "heads")
    with pytest.raises(ValueError, match="no Medusa heads"):
        load_medusa_heads(tmp_path)


def test_wrong_pairs_are_refused(target, heads, random_draft, llama):
    with pytest.raises(ValueError, match="not the target that they were trained on"):
        decoder(llama(seed=1, num_layers=3), heads)
    with pytest.raises(ValueError, match="hidden_size=32, this one has 64"):
        decoder(llama(seed=1, hidden_size=64), heads)
    with pytest.raises(ValueError, match="vocab_size=97, this one has 90"):
        decoder(llama(seed=1, vocab_size=90), heads)
    with pytest.raises(ValueError, match="num_speculative_tokens=4: there are 3 Medusa heads"):
        decoder(target, heads, num_speculative_tokens=4)
    with pytest.raises(ValueError, match="do not go together"):
        decoder(target, random_draft)
    with pytest.raises(ValueError, match="do not go together"):
        SpeculativeDecoder(target, heads)
    with pytest.raises(ValueError, match="bring their own"):
        SpeculativeDecoder(
            target, heads, DecoderConfig(drafter="medusa"), draft_vocab_ids=torch.tensor([3, 4])
        )
    with pytest.raises(ValueError, match="gamma='auto'"):
        DecoderConfig(drafter="medusa", gamma="auto")


def test_heads_in_bfloat16_know_their_target(target, heads):
    heads_16 = MedusaHeads(heads.shape, vocab_ids_N=heads.vocab_ids_N, probe_PH=heads.probe_PH)
    heads_16.load_state_dict(heads.state_dict())
    output = decoder(target, heads_16.bfloat16()).generate([Request([5, 6, 7], 10)])[0]
    assert len(output.token_ids) > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("tree", [None, "3x2", "dynamic9d3"])
def test_cuda_graphs_keep_the_hidden_states(llama, prompts, tree):
    target = llama(seed=0, num_layers=3).cuda()
    heads = heads_of_target(target, num_heads=3, num_layers=1)
    requests = [Request(p, 24, temperature=t, seed=1) for p in prompts for t in (0.0, 0.8)]
    eager, graphed = (decoder(target, heads, tree=tree, cuda_graphs=on) for on in (False, True))
    assert [o.token_ids for o in eager.generate(requests)] == [o.token_ids for o in graphed.generate(requests)]
    assert eager.stats.accepted_per_position == graphed.stats.accepted_per_position
