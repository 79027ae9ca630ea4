"""What every engine of the corpus must do, written once; each engine's tests run it on an engine of the tiny model."""

from collections.abc import Iterator
from typing import Optional

import torch
from transformers import PreTrainedModel

from pipeline.corpus.backends.base import CorpusBackend, FinishedRow, Options, generate_in_order
from pipeline.corpus.rows import Row
from tests.unit.pipeline.corpus_samples import tiny_model

EOS = 2
STOPS = frozenset([EOS])
# Of different lengths, and with the EOS id, which is the pad id too, inside.
PROMPTS = [
    [1, 50, EOS, 60],
    [1, 70],
    [1, 80, 81, EOS, 82, 83, EOS, 84, 85],
    [1, 90, 91],
    [1, 95, 94, 93, 92, 91],
]


def make_rows(
    prompts: list[list[int]] = PROMPTS,
    *,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int = 0,
    max_new_tokens: int = 40,
) -> list[Row]:
    """One row for each prompt, with seeds from `seed` on."""
    return [
        Row(
            f"p{seed + i}",
            "test",
            "",
            tuple(prompt),
            temperature,
            top_p,
            seed + i,
            i,
            max_new_tokens,
            f"test:{i}",
        )
        for i, prompt in enumerate(prompts)
    ]


def plain_greedy(
    prompt: list[int], max_new_tokens: int, model: Optional[PreTrainedModel] = None
) -> list[int]:
    """Decoding without a cache."""
    ids, model = list(prompt), model or tiny_model()
    for _ in range(max_new_tokens):
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


def tokens(results: list[FinishedRow]) -> list[list[int]]:
    return [result.token_ids for result in results]


def check_contract(
    engine: CorpusBackend, model: Optional[PreTrainedModel] = None, *, atol: float = 3e-3
) -> None:
    """All of it, for an engine of `model`, which is in fp32, knows ids below 96, and has a context below 500."""
    model = model or tiny_model()
    greedy_rows_are_the_models_own(engine, model)
    rows_come_back_once_and_are_read_as_places_come_free(engine)
    finish_reasons_are_true(engine)
    seeds_decide(engine)
    for temperature in (0.0, 1.0):
        candidates_are_a_full_forwards(engine, model, temperature, atol)
    a_row_that_does_not_fit_fails_alone(engine, model)


def greedy_rows_are_the_models_own(engine: CorpusBackend, model: PreTrainedModel) -> None:
    """Also where pad == eos: masks go by length (trl 6357)."""
    rows = make_rows()
    results = generate_in_order(engine, rows, Options(STOPS, shared_prefix=(1,)))
    expected = [plain_greedy(prompt, 40, model) for prompt in PROMPTS]
    assert tokens(results) == expected
    assert len({len(ids) for ids in expected}) > 1, "rows should finish at different steps"


def rows_come_back_once_and_are_read_as_places_come_free(engine: CorpusBackend) -> None:
    rows = make_rows([[1, 10 + i % 80] for i in range(200)], max_new_tokens=4)
    num_read = 0

    def counted() -> Iterator[Row]:
        nonlocal num_read
        for row in rows:
            num_read += 1
            yield row

    reported: list[int] = []
    finished: list[FinishedRow] = []
    for one in engine.generate(counted(), Options(STOPS, topk=2, on_tokens=reported.append)):
        finished.append(one)
        assert num_read <= len(finished) + 64, "the whole stream was read ahead"
    assert sorted(one.row.seed for one in finished) == list(range(200))
    assert sum(reported) == sum(len(one.token_ids) for one in finished)
    assert list(engine.generate(iter([]), Options(STOPS, topk=2))) == []


def finish_reasons_are_true(engine: CorpusBackend) -> None:
    """speculators 835: rows cut by length are said to be, and get no EOS."""
    rows = [row for i in range(4) for row in make_rows(temperature=1.0, seed=10 * i, max_new_tokens=25)]
    results = list(engine.generate(iter(rows), Options(STOPS)))
    assert {result.finish_reason for result in results} == {"stop", "length"}
    for result in results:
        stops = [token == EOS for token in result.token_ids]
        if result.finish_reason == "stop":
            assert stops[-1] and not any(stops[:-1])
        else:
            assert len(result.token_ids) == 25 and not any(stops)


def seeds_decide(engine: CorpusBackend) -> None:
    """vllm 10863: a row is the same alone and in any company."""
    first, again, other = (
        generate_in_order(engine, make_rows(temperature=1.0, top_p=0.9, seed=seed), Options(STOPS))
        for seed in (0, 0, 50)
    )
    assert tokens(first) == tokens(again) != tokens(other)
    alone = [
        next(engine.generate(iter([row]), Options(STOPS))) for row in make_rows(temperature=1.0, top_p=0.9)
    ]
    assert tokens(alone) == tokens(first)


def candidates_are_a_full_forwards(
    engine: CorpusBackend, model: PreTrainedModel, temperature: float, atol: float
) -> None:
    rows = make_rows(temperature=temperature, top_p=0.8 if temperature else 1.0, max_new_tokens=20)
    for row, result in zip(rows, generate_in_order(engine, rows, Options(STOPS, topk=16)), strict=True):
        assert result.topk_ids is not None and result.topk_logprobs is not None
        assert result.topk_ids.dtype == "int32" and result.topk_logprobs.dtype == "float16"
        prompt = list(row.prompt_token_ids)
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + result.token_ids])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        assert result.topk_ids.shape == (len(result.token_ids), 16)
        values, ids = expected.topk(16)
        torch.testing.assert_close(
            torch.from_numpy(result.topk_logprobs).float(), values, atol=atol, rtol=2e-3
        )
        torch.testing.assert_close(
            expected.gather(1, torch.from_numpy(result.topk_ids).long()), values, atol=atol, rtol=1e-4
        )
        if temperature == 0:
            assert result.topk_ids[:, 0].tolist() == ids[:, 0].tolist() == result.token_ids


def a_row_that_does_not_fit_fails_alone(engine: CorpusBackend, model: PreTrainedModel) -> None:
    rows = make_rows([[1, 50], [1] * 500, [1, 70]])
    results = generate_in_order(engine, rows, Options(STOPS))
    assert [result.failure is None for result in results] == [True, False, True]
    assert tokens(results) == [plain_greedy([1, 50], 40, model), [], plain_greedy([1, 70], 40, model)]
