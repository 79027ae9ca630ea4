"""The verdict: from step times by hand, and from the stage on a tiny target."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from distill.config import OnPolicyConfig, TokenSelectionConfig
from eval.theory import StepTimes
from pipeline import estimates
from pipeline.context import StageContext
from pipeline.corpus_schema import CorpusConfig
from pipeline.models import ModelRef
from pipeline.preflight import run_preflight, timing_findings
from pipeline.schema import Config, TargetConfig
from pipeline.tracker import Tracker
from pipeline.verdict import HIGHEST_PLAUSIBLE_ACCEPTANCE, make_verdict, verdict_table
from specdec_runtime.config import DecoderConfig
from tests.unit.pipeline.tiny_models import make_model, save

FLAT = (10.0, 10.0, 10.0, 10.0, 10.0)  # a GPU: several tokens cost what one costs
STEEP = (10.0, 16.0, 22.0, 28.0, 34.0)  # a CPU: each further token costs more than half a step


def test_cheap_draft_on_a_flat_target_pays_at_every_gamma() -> None:
    """Leviathan: gamma=1 breaks even at alpha = c; at alpha .6, c .1 the best gamma and speedup by the formula."""
    verdict = make_verdict(StepTimes(draft_ms=1.0, target_ms=FLAT))
    assert verdict["pays"]
    assert verdict["paying_gammas"] == [1, 2, 3, 4]
    assert verdict["break_even_acceptance"]["1"] == pytest.approx(0.1)
    assert verdict["cost_ratio"] == pytest.approx(0.1)
    by_formula = {gamma: (1 - 0.6 ** (gamma + 1)) / 0.4 / (1 + 0.1 * gamma) for gamma in (1, 2, 3, 4)}
    assert verdict["best_gamma"] == max(by_formula, key=by_formula.__getitem__)
    assert verdict["speedup_by_acceptance"]["0.6"]["2"] == pytest.approx(by_formula[2])
    assert verdict["T_target_ms"] == {"1": 10.0, "2": 10.0, "3": 10.0, "4": 10.0, "5": 10.0}


def test_three_drafts_are_told_apart() -> None:
    """One that pays, one that pays only at low gamma, one that does not pay at all."""
    pays = make_verdict(StepTimes(draft_ms=0.5, target_ms=STEEP))
    only_low = make_verdict(StepTimes(draft_ms=6.0, target_ms=(10.0, 12.0, 14.0, 40.0, 60.0)))
    never = make_verdict(StepTimes(draft_ms=9.0, target_ms=STEEP))
    assert (pays["pays"], only_low["pays"], never["pays"]) == (True, True, False)
    assert only_low["paying_gammas"] == [1, 2]
    assert "only at gamma 1, 2" in only_low["meaning"]
    assert never["paying_gammas"] == []
    assert never["best_gamma"] == 0
    assert "does not pay" in never["meaning"]


def test_break_even_beyond_what_can_be_hoped_for_does_not_pay() -> None:
    """Soup 843: an acceptance of .813 where the break-even is .832 is no gain; .95 is the highest to hope for."""
    times = StepTimes(draft_ms=9.6, target_ms=(10.0, 10.0))
    verdict = make_verdict(times)
    assert verdict["break_even_acceptance"]["1"] == pytest.approx(0.96)
    assert HIGHEST_PLAUSIBLE_ACCEPTANCE == 0.95
    assert not verdict["pays"]


def test_outlook_says_not_to_speculate_below_break_even() -> None:
    outlook = {
        row["acceptance_rate"]: row
        for row in make_verdict(StepTimes(draft_ms=5.0, target_ms=FLAT))["outlook"]
    }
    assert (outlook[0.4]["best_gamma"], outlook[0.4]["speedup"]) == (0, 1.0)
    assert outlook[0.9]["speedup"] > 1


def test_largest_paying_draft_is_where_the_line_of_costs_meets_the_budget() -> None:
    """2 ms fixed + 1 ms per layer; at alpha .6, gamma 1, T(2) = T(1) = 10 the budget is .6 * 10 = 6 ms, so 4 layers."""
    verdict = make_verdict(
        StepTimes(draft_ms=4.0, target_ms=(10.0, 10.0)), times_by_layers=[(2, 4.0), (1, 3.0)]
    )
    assert verdict["largest_paying_draft_ms"] == pytest.approx(6.0)
    assert verdict["largest_paying_num_layers"] == 4
    alone = make_verdict(StepTimes(draft_ms=4.0, target_ms=(10.0, 10.0)))
    assert alone["largest_paying_num_layers"] is None
    assert "at an acceptance of 0.6: a step of 6.0 ms, 4 of the target's layers" in str(verdict_table(verdict).caption)
    assert str(verdict_table(alone).caption).endswith("a step of 6.0 ms")


def test_table_shows_break_even_and_says_that_acceptance_is_unknown() -> None:
    console = Console(width=160, record=True)
    console.print(verdict_table(make_verdict(StepTimes(draft_ms=1.0, target_ms=FLAT))))
    text = console.export_text()
    assert "break-even" in text
    assert "0.10" in text
    assert "not known before training" in " ".join(text.split())


def test_memory_and_disk_by_hand() -> None:
    model = make_model(num_layers=3)
    assert estimates.weight_bytes(model) == 4 * sum(parameter.numel() for parameter in model.parameters())
    # keys and values, 3 layers, 2 key-value heads of size 8, 2 bytes
    assert estimates.kv_bytes_per_token(model.config, 2) == 2 * 3 * 2 * 8 * 2
    assert estimates.kv_bytes_per_token(make_model("gpt2").config, 4) == 2 * 2 * 4 * 8 * 4
    config = Config(corpus=CorpusConfig(num_prompts=1000, max_new_tokens=100, max_prompt_tokens=50, topk=64))
    draft = make_model()
    # 16,000 rows with 6 nodes each, of which 90,000 are allowed; keys and values in 3 and 2 layers, and two rows of logits
    config.runtime = DecoderConfig(num_speculative_tokens=3, tree="2x1x1", max_batch_size=16_000, max_draft_tokens=90_000)
    vocab_size = model.config.vocab_size
    per_node = 2 * (3 + 2) * 2 * 8 * 4 + 2 * 4 * vocab_size
    expected = min(16_000 * 6, 90_000) * per_node / 2**30
    assert estimates.memory_gib(config, model, draft)["proposals"] == pytest.approx(expected, abs=1e-4)
    corpus_gib = (1000 * 100 * (4 + 64 * 6) + 1000 * 50 * 4) / 2**30
    assert estimates.disk_gib(config, 0, 0)["corpus"] == pytest.approx(corpus_gib, abs=1e-4)


def test_minutes_follow_the_budgets() -> None:
    config = Config(corpus=CorpusConfig(num_prompts=600, max_new_tokens=100, prompts="x.jsonl"))
    config.train.num_epochs, config.train.tokens_per_step = 2.0, 500
    rates = estimates.WorkRates(corpus_tokens_per_second=1000.0, train_step_s=0.5)
    assert estimates.minutes(config, rates) == {"corpus": 1.0, "distill": 2.0}
    config.train.max_minutes = 1.5
    assert estimates.minutes(config, rates)["distill"] == 1.5
    config.train.max_steps = 60
    assert estimates.minutes(config, rates)["distill"] == 0.5
    config.corpus.prompts, config.corpus.max_question_tokens = None, 50
    assert estimates.minutes(config, rates)["corpus"] == 1.5


def test_minutes_of_the_phases_add_up() -> None:
    """120 offline steps of half a second; the reference's budget and a third of a step's time per 500 tokens; on-policy."""
    config = Config(corpus=CorpusConfig(num_prompts=600, max_new_tokens=100, prompts="x.jsonl"))
    config.train.num_epochs, config.train.tokens_per_step = 1.0, 500
    rates = estimates.WorkRates(corpus_tokens_per_second=1000.0, train_step_s=0.5, on_policy_step_s=3.0)
    assert estimates.minutes(config, rates)["distill"] == 1.0
    config.train.token_selection = TokenSelectionConfig(keep_fraction=0.5, reference_steps=60)
    assert estimates.minutes(config, rates)["distill"] == pytest.approx(1.0 + 0.5 + 1 / 3, abs=0.006)
    config.train.token_selection = TokenSelectionConfig(keep_fraction=0.5, reference_minutes=0.25)
    assert estimates.minutes(config, rates)["distill"] == pytest.approx(1.0 + 0.25 + 1 / 3, abs=0.006)
    config.train.token_selection = TokenSelectionConfig()
    config.train.on_policy = OnPolicyConfig(max_steps=40)
    assert estimates.minutes(config, rates)["distill"] == 1.0 + 2.0
    config.train.on_policy = OnPolicyConfig(max_steps=40, max_minutes=1.5)
    assert estimates.minutes(config, rates)["distill"] == 1.0 + 1.5
    config.train.on_policy = OnPolicyConfig(max_minutes=4.0)
    assert estimates.minutes(config, rates)["distill"] == 1.0 + 4.0


def test_an_on_policy_step_is_writing_reading_and_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 rows of 10 new tokens at 20 a second; a forward of 4 x 48 tokens; 192 / 64 training steps of 0.5 s."""
    target, draft = make_model(num_layers=3), make_model()
    config = Config(corpus=CorpusConfig(max_prompt_tokens=32, max_new_tokens=16, batch_size=2))
    config.train.tokens_per_step = 64
    monkeypatch.setattr(estimates, "_train_step_s", lambda model, num_tokens: 0.5)
    monkeypatch.setattr(estimates, "_decoded_tokens_per_second", lambda model, batch: {target: 100.0, draft: 5.0 * batch}[model])
    seen = []

    def forward_s(model: Any, *shape: int, num_logits: int) -> float:
        seen.append((model, *shape, num_logits))
        return 0.25

    monkeypatch.setattr(estimates, "_forward_s", forward_s)
    assert estimates.measure_rates(config, target, draft) == estimates.WorkRates(100.0, 0.5, 0.0)
    config.train.on_policy = OnPolicyConfig(max_steps=1, rows_per_step=4, max_new_tokens=10)
    assert estimates.measure_rates(config, target, draft).on_policy_step_s == pytest.approx(40 / 20 + 0.25 + 3 * 0.5)
    assert seen == [(target, 4, 48, 10)]


def test_every_rate_is_measured() -> None:
    config = Config(corpus=CorpusConfig(max_prompt_tokens=8, max_new_tokens=8, batch_size=2))
    config.train.on_policy = OnPolicyConfig(max_steps=1, rows_per_step=2, max_new_tokens=3)
    rates = estimates.measure_rates(config, make_model(num_layers=3), make_model())
    assert min(rates.corpus_tokens_per_second, rates.train_step_s, rates.on_policy_step_s) > 0


def test_the_target_counts_for_training_only_where_it_is_asked() -> None:
    target, draft, config = make_model(num_layers=3), make_model(), Config()
    parts = {"cached": 96 * 32 * 4, "online": estimates.weight_bytes(target)}  # the head alone, or all of it
    for teacher, target_bytes in parts.items():
        config.loss.teacher = teacher
        expected = (16 * estimates.num_parameters(draft) + target_bytes) / 2**30
        assert estimates.memory_gib(config, target, draft)["training"] == pytest.approx(expected, abs=1e-4)
    config.loss.teacher, config.train.on_policy = "cached", OnPolicyConfig(max_steps=1)
    assert estimates._target_bytes_in_training(config, target) == parts["online"]


@pytest.fixture
def context(tmp_path: Path) -> StageContext:
    torch.set_num_threads(1)
    target = save(tmp_path / "target", make_model(num_layers=3))
    config = Config(
        target=TargetConfig(name="tiny", path=str(target), dtype="float32"),
        corpus=CorpusConfig(num_prompts=10, max_prompt_tokens=32, max_new_tokens=64, batch_size=4),
    )
    (
        config.draft.num_layers,
        config.preflight.max_gamma,
        config.preflight.context_tokens,
        config.preflight.num_repeats,
    ) = 2, 2, 16, 3
    (tmp_path / "work").mkdir()
    return StageContext(config, tmp_path / "work", {}, Tracker(), ModelRef(str(target), "tiny", "rev"))


def run(context: StageContext) -> dict[str, Any]:
    run_preflight(context)
    return json.loads((context.work_dir / "verdict.json").read_text())


def test_stage_writes_the_agreed_keys_from_real_times(context: StageContext) -> None:
    verdict = run(context)
    agreed = {
        "pays",
        "best_gamma",
        "break_even_acceptance",
        "cost_ratio",
        "findings",
        "T_target_ms",
        "T_draft_ms",
        "speedup_by_acceptance",
    }
    assert agreed <= set(verdict)
    assert set(verdict["break_even_acceptance"]) == {"1", "2"}
    assert set(verdict["T_target_ms"]) == {"1", "2", "3"}
    assert verdict["cost_ratio"] == pytest.approx(verdict["T_draft_ms"] / verdict["T_target_ms"]["1"])
    assert verdict["draft"]["num_layers"] == 2
    assert set(verdict["estimated_minutes"]) == {"corpus", "distill"}
    assert [finding for finding in verdict["findings"] if finding["code"] != "noisy_timing"] == []


def test_times_that_cannot_be_right_are_said_to_be() -> None:
    assert timing_findings(StepTimes(draft_ms=1.0, target_ms=STEEP)) == []
    assert timing_findings(StepTimes(draft_ms=1.0, target_ms=(12.0, 10.0, 11.0))) == []  # within noise
    (finding,) = timing_findings(StepTimes(draft_ms=1.0, target_ms=(58.0, 90.0, 20.0)))
    assert finding.code == "noisy_timing"
    assert "over 1 tokens took 58.0 ms and one over more tokens 20.0 ms" in finding.message


@pytest.fixture
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step times of a quiet machine."""
    times = StepTimes(draft_ms=1.0, target_ms=FLAT)
    monkeypatch.setattr("pipeline.preflight.measure_step_times", lambda *args, **kwargs: times)


def test_stage_times_the_head_that_is_trimmed(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    context.config.draft.vocab_shortlist = 40
    seen = []

    def fake(target: Any, draft: Any, **kwargs: Any) -> StepTimes:
        seen.append((draft.config.num_hidden_layers, kwargs["draft_vocab_ids"].tolist()))
        return StepTimes(draft_ms=1.0 * draft.config.num_hidden_layers, target_ms=FLAT)

    monkeypatch.setattr("pipeline.preflight.measure_step_times", fake)
    verdict = run(context)
    assert seen == [(2, list(range(40))), (1, list(range(40)))]
    # 1 ms per layer, none fixed; the dearest paying draft at alpha .6 is gamma 1's: 6 ms
    assert verdict["largest_paying_num_layers"] == 6


@pytest.mark.usefixtures("steady")
def test_a_head_that_is_chosen_later_is_timed_whole_and_said_to_be(
    context: StageContext, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    context.config.draft.vocab_shortlist = "auto"
    heads = []

    def fake(*args: Any, **kwargs: Any) -> StepTimes:
        heads.append(kwargs["draft_vocab_ids"])
        return StepTimes(draft_ms=1.0, target_ms=FLAT)

    monkeypatch.setattr("pipeline.preflight.measure_step_times", fake)
    assert run(context)["draft"]["vocab_shortlist"] == "auto"
    assert heads == [None, None]
    assert "the draft was timed with its whole head" in capsys.readouterr().out


@pytest.mark.usefixtures("steady")
def test_findings_name_a_penalty_of_the_target(context: StageContext) -> None:
    """Soup 345: warpers are stated."""
    path = Path(context.target.path) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.05}))
    assert [(finding["code"], finding["severity"]) for finding in run(context)["findings"]] == [
        ("penalty", "warning")
    ]


@pytest.mark.usefixtures("steady")
def test_draft_path_is_timed_and_its_mendable_faults_are_warnings(
    context: StageContext, tmp_path: Path
) -> None:
    context.config.draft.path = str(save(tmp_path / "draft", make_model("qwen2", vocab_size=104)))
    verdict = run(context)
    assert [(finding["code"], finding["severity"]) for finding in verdict["findings"]] == [
        ("vocab_padding", "warning")
    ]
    assert verdict["largest_paying_num_layers"] is None


@pytest.mark.usefixtures("steady")
def test_too_little_memory_is_a_finding(context: StageContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "pipeline.estimates.psutil.virtual_memory", lambda: type("Memory", (), {"available": 0})()
    )
    assert [finding["code"] for finding in run(context)["findings"]] == ["memory"]


def test_prompts_file_without_a_limit_is_counted(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "w3"}\n' * 7)
    config = Config(
        corpus=CorpusConfig(num_prompts=None, prompts=str(tmp_path / "x.jsonl"), max_new_tokens=10)
    )
    assert estimates.corpus_tokens(config) == 70
