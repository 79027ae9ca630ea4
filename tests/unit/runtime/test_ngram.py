"""Proposals looked up in the text: they are what a search by hand finds, and no output changes."""

import random
import weakref

import pytest
import torch

from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder
from specdec_runtime.ngram_index import NgramIndex
from specdec_runtime.observe import RoundRecord

NUM_NEW = 60


def decoder(target, **config) -> SpeculativeDecoder:
    settings = {"num_speculative_tokens": 8, "max_batch_size": 4, **config}
    return SpeculativeDecoder(target, None, DecoderConfig(drafter="ngram", **settings))


def searched(text: list[int], num_tokens: int, min_tokens: int, max_tokens: int) -> list[int]:
    """By the definition: the longest suffix that ends anywhere earlier, its latest such end, and on from there."""
    for n in range(max_tokens, min_tokens - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                grown = list(text)
                for k in range(num_tokens):
                    grown.append(grown[end + k])
                return grown[len(text) :]
    return []


@pytest.mark.parametrize(("min_tokens", "max_tokens"), [(1, 1), (1, 3), (2, 4), (3, 3)])
def test_proposals_are_those_of_a_search(min_tokens, max_tokens):
    """The index grows with the text, by steps of any size, and is asked at each of them."""
    rng, num_found = random.Random(min_tokens * 10 + max_tokens), 0
    for _ in range(60):
        index, text = NgramIndex(min_tokens, max_tokens), [rng.randrange(4)]
        while len(text) < 60:
            num_tokens = rng.randint(1, 9)
            expected = searched(text, num_tokens, min_tokens, max_tokens)
            assert index.continuation(text, num_tokens) == expected
            num_found += bool(expected)
            text += [rng.randrange(4) for _ in range(rng.randint(0, 7))]
    assert num_found > 200


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2, 3]),
        ([1, 2, 7, 5, 2, 8, 1, 2], [7, 5, 2, 8]),  # the pair is found before the later single 2
        ([5, 6, 5, 6], [5, 6, 5, 6]),  # the copy goes on into itself
        ([4], []),
        ([1, 2, 3, 4], []),
    ],
)
def test_examples(text, expected):
    assert NgramIndex(1, 3).continuation(text, 4) == expected


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("options", [{}, {"gamma": "auto"}, {"width_invariant": True}, {"ngram_min": 3}])
def test_greedy_tokens_are_those_of_transformers(target, prompts, hf_greedy, batch, options):
    lookup = decoder(target, max_batch_size=batch, **options)
    outputs = lookup.generate([Request(prompt, NUM_NEW) for prompt in prompts])
    assert [o.token_ids for o in outputs] == [hf_greedy(target, prompt, NUM_NEW) for prompt in prompts]
    assert 0 < lookup.stats.num_accepted < lookup.stats.num_proposed


@pytest.fixture(scope="module")
def repeating(llama):
    """A target that goes round in circles of several tokens: its own output is the best draft there is."""
    return llama(seed=3, num_layers=1, initializer_range=0.1)


def test_a_text_that_repeats_itself_is_accepted(repeating):
    output = decoder(repeating).generate([Request([5, 6, 7], 200, ignore_eos=True)])[0]
    assert output.stats.block_efficiency > 2
    assert output.stats.num_draft_steps == 0
    assert output.stats.not_speculating is None


def test_rows_without_a_match_take_plain_steps(target, monkeypatch):
    """Nothing occurs twice in the first rounds: the target's forwards are one token wide until something does."""
    from specdec_runtime.forward import ModelRunner

    widths = []
    right = ModelRunner.step

    def recording(self, ids_BL, *args, **kwargs):
        widths.append(ids_BL.shape[1])
        return right(self, ids_BL, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "step", recording)
    output = decoder(target, max_batch_size=1).generate([Request([5, 6, 7], NUM_NEW, ignore_eos=True)])[0]
    text, num_plain = [5, 6, 7, output.token_ids[0]], 0
    while not searched(text, 1, 1, 3):
        text.append(output.token_ids[num_plain + 1])
        num_plain += 1
    assert num_plain >= 2
    assert widths[:num_plain] == [1] * num_plain
    assert 1 < widths[num_plain] <= 9
    assert len(widths) == output.stats.num_rounds


def test_rows_with_and_without_matches_side_by_side(target, repeating, hf_greedy):
    """Each row proposes what its own text says, whoever is in the batch and whichever slot it moves to."""
    prompts = [[9] * 12, [11, 12, 13], [3, 4] * 8, list(range(20, 60)), [7, 7]]
    lengths = [6, 40, 17, 33, 25]
    for model in (target, repeating):
        requests = [Request(p, n, ignore_eos=True) for p, n in zip(prompts, lengths, strict=True)]
        alone = [decoder(model, max_batch_size=1).generate([r])[0] for r in requests]
        together = decoder(model, max_batch_size=3).generate(requests)
        for request, one, other in zip(requests, alone, together, strict=True):
            expected = hf_greedy(model, request.prompt_token_ids, request.max_new_tokens, eos_token_id=None)
            assert one.token_ids == other.token_ids == expected
            assert one.stats.num_proposed == other.stats.num_proposed
            assert one.stats.accepted_per_position == other.stats.accepted_per_position


def test_a_stop_inside_a_looked_up_block_ends_the_output(repeating):
    """Tokens behind the end are neither put out nor counted, and there are never more than asked for."""
    rounds: list[RoundRecord] = []
    config = DecoderConfig(drafter="ngram", num_speculative_tokens=8)
    lookup = SpeculativeDecoder(repeating, None, config, on_round=rounds.append)
    plain = lookup.generate([Request([5, 6, 7], 200, ignore_eos=True)])[0].token_ids
    # A prompt whose second token is followed by a block of at least five right ones.
    start = next(
        r.start for r in rounds if r.num_accepted >= 6 and len(set(plain[r.start : r.start + 3])) == 3
    )
    prompt, rest = [5, 6, 7, *plain[:start]], plain[start:]
    output = lookup.generate([Request(prompt, 20, stop_token_ids=[rest[2]])])[0]
    assert (output.token_ids, output.finish_reason) == (rest[:3], "stop")
    assert (output.stats.num_rounds, output.stats.num_proposed, output.stats.num_accepted) == (1, 2, 2)
    cut = lookup.generate([Request(prompt, 5, ignore_eos=True)])[0]
    assert (cut.token_ids, cut.stats.num_rounds, cut.stats.num_proposed) == (rest[:5], 1, 3)


def test_a_seeded_row_gives_the_same_alone_and_in_any_batch(target):
    requests = [Request([5, 6, 5, 6, n], 25, temperature=0.9, top_k=4, seed=n) for n in range(3, 9)]
    alone = [decoder(target, max_batch_size=1).generate([r])[0].token_ids for r in requests]
    together = decoder(target, max_batch_size=4).generate(list(reversed(requests)))
    assert [o.token_ids for o in reversed(together)] == alone


def test_the_index_of_a_finished_row_is_let_go(target, monkeypatch):
    """A call with many requests kept the n-grams of every one of them until its end."""
    made = []

    def recorded(*args) -> NgramIndex:
        index = NgramIndex(*args)
        made.append(weakref.ref(index))
        return index

    monkeypatch.setattr("specdec_runtime.ngram.NgramIndex", recorded)
    requests = [Request([5, 6, 5, 6, n], 12, ignore_eos=True) for n in range(3, 11)]
    for event in decoder(target, max_batch_size=2).stream(requests):
        assert sum(index() is not None for index in made) <= 2 - (event.output is not None)
    assert len(made) == 8


def test_limits_hold_for_it_too(target):
    lookup = decoder(target, max_draft_tokens=8, max_prompt_tokens_to_speculate=20)
    outputs = lookup.generate([Request([5, 6] * n, 24, ignore_eos=True) for n in (4, 5, 9, 12)])
    assert all(len(o.stats.proposed_per_position) <= 8 for o in outputs)
    assert outputs[3].stats.num_proposed == 0
    assert "max_prompt_tokens_to_speculate=20" in outputs[3].stats.not_speculating


def test_what_does_not_go_together_is_refused(target, random_draft):
    config = DecoderConfig(drafter="ngram")
    with pytest.raises(ValueError, match="drafter='ngram'"):
        SpeculativeDecoder(target, random_draft, config)
    with pytest.raises(ValueError, match="draft_vocab_ids"):
        SpeculativeDecoder(target, None, config, draft_vocab_ids=torch.tensor([1, 2]))
    for settings in ({"drafter": "trigram"}, {"ngram_min": 0}, {"ngram_min": 3, "ngram_max": 2}):
        with pytest.raises(ValueError, match=next(reversed(settings))):
            DecoderConfig(**settings)
    with pytest.raises(ValueError, match="draft_confidence"):
        DecoderConfig(drafter="ngram", draft_confidence=0.5)
