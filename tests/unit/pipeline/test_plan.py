"""`python -m pipeline.plan`: its words, what it decides, what it prints and refuses."""

import json
from pathlib import Path

import pytest

from pipeline.plan.__main__ import main, plan_of
from pipeline.plan.engine import corpus_plan
from pipeline.plan.gpus import GPUS, gpu_of
from pipeline.plan.settings import PlanSettings, read_settings
from pipeline.plan.shapes import draft_shape, target_shape
from pipeline.plan.stages import Plan
from pipeline.plan.table import COLUMNS, commands, memory_table
from pipeline.plan.training import CACHED, DDP, DEEPSPEED, FSDP, ONE_PROCESS, ONLINE
from tests.conftest import run_module


def plan(*words: str) -> Plan:
    return plan_of(read_settings(words))


def fitting(found: Plan) -> set[tuple[str, str]]:
    return {(training.launch, training.teacher) for training in found.distill if training.fits}


@pytest.mark.parametrize(
    ("word", "number"), [("100M", 10**8), ("1e8", 10**8), ("2.5k", 2500), ("1b", 10**9), ("1_000", 1000), ("7", 7)]
)
def test_numbers_of_tokens(word: str, number: int) -> None:
    assert read_settings([f"tokens={word}"]).num_tokens == number


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tokens=many"], r"tokens='many': write a number such as"),
        (["tokens=1.2.3M"], r"tokens='1\.2\.3M'"),
        (["tokens=0"], r"tokens='0': must be at least 1"),
        (["tokens="], r"tokens=: give a value"),
        (["100M"], r"\['100M'\]: only settings such as tokens=100M"),
        (["gpus=4"], r"gpus"),
        (["num_gpus=four"], r"num_gpus"),
        (["num_gpus=0"], r"num_gpus=0: must be at least 1"),
        (["response_tokens=0"], r"response_tokens=0: must be a number above 0"),
        (["tokens=1e400"], r"tokens='1e400': write a number such as"),
        (["epochs=nan"], r"epochs=nan"),
        (["train_utilisation=1.5"], r"train_utilisation=1\.5: must lie in \(0, 1\]"),
        (["topk=-1"], r"topk=-1"),
    ],
)
def test_wrong_words_are_named_with_the_way_out(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_settings(words)


@pytest.mark.parametrize(
    "word", ["llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "llama3_8b", "Llama-3.1-8B"]
)
def test_a_target_goes_by_several_names(word: str) -> None:
    assert target_shape(word).num_parameters == 8_030_261_248


def test_a_folder_with_its_config_alone_is_enough(tmp_path: Path) -> None:
    sizes = {"model_type": "qwen3", "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    shape = target_shape(str(tmp_path))
    assert (shape.name, shape.head_size) == (tmp_path.name, 128)  # the family's own, not 64 / 4
    layer = 2 * 64 * (4 * 128 + 2 * 128) + 3 * 64 * 96 + 2 * 64 + 2 * 128
    assert shape.num_parameters == 2 * layer + 64 + 1000 * 64


def test_models_that_cannot_be_planned_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"target='nowhere/model-9b': no folder and no known shape.*llama-3\.1-8b"):
        target_shape("nowhere/model-9b")
    with pytest.raises(ValueError, match=r"target=.*no readable config\.json"):
        target_shape(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(ValueError, match=r"model_type='mixtral' has other parts.*known are \['gemma'"):
        target_shape(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"no readable config\.json"):
        target_shape(str(tmp_path))


def test_a_draft_has_its_targets_vocabulary(tmp_path: Path) -> None:
    target = target_shape("qwen2.5-7b")
    assert draft_shape("draft-0.5b", target).vocab_size == 152_064
    layers = draft_shape("layers:3", target)
    assert target.num_parameters - layers.num_parameters == 25 * target.layer_parameters
    for word in ("layers:0", "layers:29", "layers:two"):
        with pytest.raises(ValueError, match=rf"draft='{word}': write layers:N with N from 1 to 28"):
            draft_shape(word, target)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 32000}')
    with pytest.raises(ValueError, match=r"its vocabulary of 32000 is not the target's of 152064"):
        draft_shape(str(tmp_path), target)


def test_gpus_by_name_and_by_figures() -> None:
    assert gpu_of("H100") is not None
    assert gpu_of("RTX 4090") == gpu_of("rtx-4090") == GPUS["rtx4090"]
    assert gpu_of("l4", memory_gb=48).memory_gb == 48
    mine = gpu_of("mine", memory_gb=32, bandwidth_gb_s=1000, bf16_tflops=100, link_gb_s=25)
    assert (mine.name, mine.usable_bytes) == ("mine", pytest.approx(32e9 * 0.9))
    with pytest.raises(ValueError, match=r"gpu='b9000': known are \['a100-80g'.*give all of"):
        gpu_of("b9000", memory_gb=32)
    with pytest.raises(ValueError, match=r"memory_gb=-1: must be a number above 0"):
        gpu_of("h100", memory_gb=-1)


def test_an_8b_target_takes_one_gpu_and_ddp_on_eight() -> None:
    alone = plan("target=llama-3.1-8b")
    assert (alone.num_gpus, alone.chosen.launch, alone.corpus.tensor_parallel) == (1, ONE_PROCESS, 1)
    assert alone.native.fits
    eight = plan("target=llama-3.1-8b", "num_gpus=8")
    assert (eight.chosen.launch, eight.corpus.num_replicas * eight.corpus.tensor_parallel) == (DDP, 8)
    assert fitting(eight) >= {(DDP, CACHED), (DDP, ONLINE), (FSDP, ONLINE)}


def test_a_70b_target_is_sharded_for_generation_and_for_training() -> None:
    found = plan("target=llama-3.1-70b")
    assert found.num_gpus > 1
    assert found.corpus.tensor_parallel > 1
    assert found.chosen.launch == FSDP  # the stage keeps the target, 141 GB
    assert not found.native.fits
    without = plan("target=llama-3.1-70b", "keep_target=false")
    assert without.chosen.launch == DDP
    assert not {launch for launch, teacher in fitting(without) if teacher == ONLINE} & {DDP, ONE_PROCESS}


def test_deepspeed_is_for_moments_that_fit_nowhere_else() -> None:
    words = ("target=llama-3.1-70b", "draft=llama-3.1-8b", "gpu=a100-80g", "num_gpus=4", "memory_gb=56")
    found = plan(*words, "keep_target=false", "max_micro_batch_tokens=512", "step_tokens=512", "head_chunk_tokens=512")
    assert (found.chosen.launch, {launch for launch, teacher in fitting(found) if teacher == CACHED}) == (DEEPSPEED, {DEEPSPEED})
    assert found.chosen.host_gb == pytest.approx(12 * (8_030_261_248 - 2 * 128_256 * 4096) / 1e9)


def test_what_does_not_fit_says_what_would() -> None:
    with pytest.raises(ValueError, match=r"num_gpus=1: llama3_70b has 141\.1 GB of bf16 weights.*num_gpus=4 would do"):
        plan("target=llama-3.1-70b", "num_gpus=1")
    with pytest.raises(ValueError, match=r"gpu='l4'.*no number of them; choose a larger GPU"):
        plan("target=llama-3.1-70b", "gpu=l4", "memory_gb=8")


def test_the_batch_fills_the_memory_that_the_weights_leave() -> None:
    target = target_shape("llama-3.1-8b")
    settings = PlanSettings(max_batch_size=100_000, prompt_tokens=1000, response_tokens=1000)
    found = corpus_plan(target, GPUS["h100"], settings, num_gpus=1)
    assert found is not None
    used = sum(found.memory_gb.values())
    a_row = (2000 * 131_072 + 8 * 128_256) / 1e9
    assert 72 - a_row < used <= 72
    assert found.tokens_per_second == pytest.approx(found.batch / found.step.seconds)
    assert found.gpu_hours["decoding"] == pytest.approx(1e8 / found.tokens_per_second / 3600)


def test_smaller_gpus_take_smaller_micro_batches() -> None:
    large, small = plan("target=smollm2-135m", "gpu=h200"), plan("target=smollm2-135m", "gpu=l4")
    assert large.chosen.micro_batch_tokens > small.chosen.micro_batch_tokens >= 512
    for found in (large, small):
        assert found.chosen.micro_batch_tokens * found.chosen.accumulation_steps >= 65536
        assert sum(found.chosen.memory_gb.values()) <= found.gpu.usable_bytes / 1e9


def test_hours_go_with_tokens() -> None:
    one, ten = plan("tokens=100M"), plan("tokens=1B")
    assert ten.corpus.total_gpu_hours == pytest.approx(10 * one.corpus.total_gpu_hours, rel=0.01)
    assert ten.chosen.gpu_hours == pytest.approx(10 * one.chosen.gpu_hours)
    assert ten.disk_gb["corpus"] == pytest.approx(10 * one.disk_gb["corpus"])


@pytest.mark.parametrize("words", [[], ["target=llama-3.1-70b"], ["num_gpus=4", "gpu=a100-80g"]])
def test_every_part_of_the_memory_has_a_column(words: list[str]) -> None:
    found = plan(*words)
    assert memory_table(found).row_count == 2 + len(found.distill)
    listed = {part for parts in COLUMNS.values() for part in parts}
    for memory in (found.corpus.memory_gb, found.native.memory_gb, *(t.memory_gb for t in found.distill)):
        assert set(memory) <= listed


def test_it_prints_and_writes_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plans" / "plan.json"
    main(["target=llama-3.1-70b", "tokens=100M", f"json={path}"])
    printed = capsys.readouterr().out
    for text in ("100,000,000 response tokens", "distill: cached, fsdp", "LAUNCH=fsdp", "do not fit on one GPU", "218 bytes a token"):
        assert text in printed
    written = json.loads(path.read_text())
    assert written["settings"]["target"] == "llama-3.1-70b"
    assert written["chosen"]["launch"] == FSDP
    assert written["target"]["num_layers"] == 80
    with pytest.raises(ValueError, match=r"json=.*cannot be written"):
        main([f"json={path / 'below.json'}"])


def test_one_process_needs_no_launch() -> None:
    assert "LAUNCH" not in " ".join(commands(plan()))


def test_a_mistake_is_exit_code_2(tmp_path: Path) -> None:
    done = run_module("pipeline.plan", "tokens=many", folder=tmp_path, timeout_s=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: tokens='many': write a number such as" in done.stderr
