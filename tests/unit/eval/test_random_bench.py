"""Timing with random weights: published shapes, and the acceptance that was asked for."""

import pytest
import torch

from eval.config import BenchConfig
from eval.random_bench import build_model, num_parameters, random_prompts, run_random_bench
from eval.shapes import SHAPES, shape_of


@pytest.mark.parametrize(
    ("name", "num"),
    [
        ("llama3_70b", 70_553_706_496),
        ("llama3_8b", 8_030_261_248),
        ("llama3_2_1b", 1_235_814_400),
        ("qwen2_5_7b", 7_615_616_512),
        ("smollm2_135m", 134_515_008),
    ],
)
def test_shapes_have_the_published_number_of_weights(name: str, num: int) -> None:
    assert num_parameters(SHAPES[name]) == num


def test_weights_are_seeded_and_the_global_generator_is_left_alone() -> None:
    settings = {"dtype": torch.float32, "device": "cpu", "max_tokens": 16}
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, second = (build_model(SHAPES["tiny"], **settings) for _ in range(2))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = build_model(SHAPES["tiny"], seed=1, vocab_size=50, **settings)  # type: ignore[arg-type]
    assert other.get_input_embeddings().weight.shape[0] == 50


def test_the_clock_runs_with_the_acceptance_that_was_asked_for() -> None:
    config = BenchConfig(
        target="random:tiny", draft="random:draft_30m", acceptance=1.0, num_prompts=2, prompt_tokens=5,
        max_new_tokens=13, gammas=[3], undistilled_gammas=[1], temperatures=[0.0], num_bootstrap=10,
        dtype="float32", backends=["native"], num_warmup_prompts=0,
    )  # fmt: skip
    plain, drafted = run_random_bench(config, device="cpu").rows
    assert (plain["lossless"], plain["num_tokens"]) == (True, 26)
    assert (drafted["draft"], drafted["gamma"], drafted["lossless"]) == ("draft_30m", 3, False)
    # 13 tokens: one of the prefill, then three rounds of four.
    assert drafted["synthetic_acceptance"] == drafted["draft_acceptance_rate"] == 1.0
    assert drafted["block_efficiency"] == 13 / 4


def test_prompts_are_random_ids_of_one_length() -> None:
    config = BenchConfig(num_prompts=3, prompt_tokens=7)
    prompts = random_prompts(config, 50)
    assert [len(prompt) for prompt in prompts] == [7] * 3
    assert prompts == random_prompts(config, 50)
    assert max(max(prompt) for prompt in prompts) < 50


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "llama3_8b"}, r"bench\.target='llama3_8b': write random:<shape>"),
        ({"target": "random:gpt9"}, r"bench\.target='random:gpt9'.*llama3_8b"),
        ({"target": "random:tiny", "draft": "random:x"}, r"bench\.draft='random:x'"),
        ({"target": "random:tiny", "acceptance": 1.2}, r"bench\.acceptance=1\.2"),
        ({"acceptance": 0.7}, r"bench\.acceptance=0\.7.*bench\.target"),
        ({"target": "random:tiny", "prompts": "a.jsonl"}, r"bench\.prompts='a\.jsonl'"),
        ({"prompt_tokens": 0}, r"bench\.prompt_tokens=0"),
        ({"dtype": "int8"}, r"bench\.dtype='int8'"),
    ],
)
def test_bad_settings_are_refused_by_name(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BenchConfig(**changes)  # type: ignore[arg-type]


def test_a_bench_without_a_target_shape_is_refused() -> None:
    with pytest.raises(ValueError, match=r"bench\.target=null"):
        run_random_bench(BenchConfig(), device="cpu")
    assert shape_of("random:tiny", field="bench.target") is SHAPES["tiny"]


def test_weights_that_do_not_fit_are_refused_with_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eval.random_bench.free_memory_bytes", lambda device: 2**34)
    with pytest.raises(
        ValueError, match=r"bench\.target='random:llama3_70b'.*13[0-9]\.\d GiB, 16\.0 GiB are free"
    ):
        run_random_bench(BenchConfig(target="random:llama3_70b"), device="cpu")
