"""The model card: honest about the gain, complete about where it was measured."""

import re

import pytest
import yaml

from pipeline.card import CardFacts, render_card
from tests.unit.pipeline.report_samples import bench_row, make_report

FACTS = CardFacts(
    title="big-draft",
    base_model="org/big",
    license="apache-2.0",
    gamma=2,
    draft_sample_method="probabilistic",
    prompt_set="held-out part of chat.jsonl",
    vocab_shortlist_size=None,
)


def front_matter(card: str) -> dict:
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert match
    return yaml.safe_load(match.group(1))


def test_header_names_model_and_licence_only_when_they_are_known() -> None:
    known = front_matter(render_card(make_report(), FACTS))
    assert known["base_model"] == "org/big"
    assert known["license"] == "apache-2.0"
    assert known["pipeline_tag"] == "text-generation"
    unknown = front_matter(render_card(make_report(), CardFacts("t", None, None, 2, "greedy", "p", None)))
    assert not {"license", "base_model"} & set(unknown)


def test_every_measured_row_is_there_with_interval_and_circumstances() -> None:
    card = render_card(make_report(), FACTS)
    assert "| distilled | 0 | probabilistic | 0.600 | 0.580 to 0.620 |" in card
    assert "| undistilled | 0 | probabilistic | 0.010 | -0.010 to 0.030 |" in card
    assert "| native | distilled | 0 | 2 | 1 | 52.0 | 1.30 | 1.20 to 1.40 | 1.90 | same |" in card
    assert "| native | none | 0 | - | 1 | 40.0 | 1.00 | 1.00 to 1.00 | 1.00 | same |" in card
    assert "On Some CPU, 2 threads, bfloat16. Prompts: held-out part of chat.jsonl." in card
    assert "12,345,678 parameters, 2 layers" in card


def test_gain_is_claimed_only_above_one() -> None:
    assert (
        "**It pays on the machine below**: 1.30x plain decoding, 95% interval [1.20, 1.40], at gamma 2"
        in render_card(make_report(), FACTS)
    )
    unclear = render_card(make_report([bench_row(speedup=1.05)]), FACTS)
    assert "**No gain is shown" in unclear
    assert "It pays" not in unclear
    alone = render_card(make_report([bench_row(speedup=1.3, half_width=0.0)]), FACTS)
    assert "**No gain is shown" in alone and "one prompt or batch alone gives no interval" in alone
    assert "It pays" not in alone
    assert "**Not benchmarked**" in render_card(make_report([]), FACTS)


def test_a_draft_that_does_not_pay_says_so_and_where_it_would() -> None:
    """Soup 303, 843: an acceptance sold as good that did not break even at its gamma."""
    loses = render_card(
        make_report([bench_row(gamma=4, speedup=0.8, block_efficiency=2.0), bench_row(gamma=6, speedup=0.7)]),
        FACTS,
    )
    assert "**It does not pay" in loses
    assert "it commits 2.00 tokens per target forward and would have to commit 2.50 to break even" in loses
    hopeless = render_card(make_report([bench_row(gamma=1, speedup=0.5, block_efficiency=1.5)]), FACTS)
    assert "more than the 2 that are possible: the draft itself is too slow" in hopeless
    elsewhere = render_card(
        make_report([bench_row(gamma=2, speedup=0.9), bench_row(gamma=3, speedup=1.4, temperature=1.0)]),
        FACTS,
    )
    assert "It pays at gamma 3 at temperature 1, batch 1 (1.40x [1.30, 1.50])." in elsewhere


@pytest.mark.parametrize(("gpu", "said"), [(None, True), ("H100", False)])
def test_limits_say_what_was_not_seen_on_a_gpu(gpu: str | None, said: bool) -> None:
    report = make_report()
    report["machine"]["gpu"] = gpu
    card = render_card(report, FACTS)
    assert ("No figure on this page was seen on a GPU" in card) is said
    assert "Tried with torch 2.13.0, transformers 5.19.0" in card
    assert "vLLM was not started in this run" in card


def test_serving_lines_hold_the_measured_choices() -> None:
    card = render_card(make_report(), FACTS)
    assert '"num_speculative_tokens": 2, "draft_sample_method": "probabilistic"' in card
    assert "vllm serve /models/big --speculative-config" in card
    assert "DecoderConfig(num_speculative_tokens=2)" in card
    assert "shortlist" not in card
    trimmed = render_card(make_report(), CardFacts("t", None, None, 2, "greedy", "p", 8192))
    assert "a head over the 8192 most frequent ids" in trimmed
    assert "Only the native runtime skips" in trimmed


def test_card_names_the_versions_that_were_tried_and_a_head_of_its_own() -> None:
    report = make_report()
    assert "head has weights of its own" not in render_card(report, FACTS)
    report["draft"]["tied_head"] = False
    card = render_card(report, FACTS)
    assert "Its output head has weights of its own" in card
    for version in ("Transformers 5.16.1 and 5.19.0", "vLLM 0.32.0", "torch 2.13", "xllamacpp"):
        assert version in card
