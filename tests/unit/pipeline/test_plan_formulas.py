"""The plan's formulas against hand-made sums, and against what PyTorch counts and holds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from eval.random_bench import num_parameters
from eval.shapes import SHAPES
from pipeline.plan import formulas
from pipeline.plan.check import disk_check, family_checks, logits_check, training_checks
from pipeline.plan.gpus import GPUS
from pipeline.plan.measure import saved_bytes, tiny_model
from pipeline.plan.settings import PlanSettings
from pipeline.plan.shapes import FAMILIES, draft_shape, shape_of_config, target_shape
from pipeline.plan.stages import corpus_bytes_per_token, disk_gb
from pipeline.plan.training import (
    CACHED,
    DDP,
    DEEPSPEED,
    FSDP,
    ONE_PROCESS,
    ONLINE,
    memory_bytes,
    training_flops,
)

H100 = GPUS["h100"]


@pytest.mark.parametrize("name", sorted(SHAPES))
def test_parameters_are_those_of_the_real_architecture(name: str) -> None:
    assert target_shape(name).num_parameters == num_parameters(SHAPES[name])


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_weights_and_cache_are_what_torch_holds(family: str) -> None:
    checks = family_checks(family)
    assert {check.what: check.measured for check in checks} == {check.what: check.formula for check in checks}
    assert len(checks) == 5


def test_biases_of_the_config_are_counted() -> None:
    model = tiny_model("llama", is_tied=False, attention_bias=True, mlp_bias=True)
    shape = shape_of_config(model.config, name="biased")
    assert shape.num_parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.layer_parameters - shape.layer_matrix_parameters == 2 * 48 + (48 + 2 * 16) + 48 + (2 * 80 + 48)


def test_cache_of_a_position_by_hand() -> None:
    large = target_shape("llama-3.1-70b")
    assert formulas.kv_bytes_per_position(target_shape("llama-3.1-8b"), 2) == 2 * 32 * 8 * 128 * 2 == 131_072
    assert formulas.kv_bytes_per_position(large, 2, num_shards=8) == 2 * 80 * 1 * 128 * 2
    # Eight key heads over sixteen GPUs: each head lies on two of them.
    assert formulas.kv_bytes_per_position(large, 2, num_shards=16) == 2 * 80 * 1 * 128 * 2


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_flops_are_those_that_torch_counts(family: str) -> None:
    """Eager attention multiplies the whole square, so every token attends to all of them; backward takes twice as much."""
    config = AutoConfig.for_model(
        family, vocab_size=211, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with FlopCounterMode(display=False) as forward:
        loss = model(input_ids=torch.ones((1, 20), dtype=torch.long), use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    shape = shape_of_config(config, name=family)
    expected = 20 * (formulas.layer_flops(shape, context=20) + formulas.head_flops(shape))
    assert forward.get_total_flops() == expected
    assert backward.get_total_flops() == 2 * expected


def test_gradients_moments_and_activations_are_what_torch_holds() -> None:
    checks = training_checks()
    assert [check.ratio for check in checks[:2]] == [1.0, 1.0]
    assert checks[2].ratio == pytest.approx(1, abs=0.02), checks[2]


@pytest.mark.parametrize("sizes", [{}, {"hidden_size": 96, "intermediate_size": 120}, {"num_hidden_layers": 6}])
def test_activations_grow_with_every_size_as_the_formula_says(sizes: dict[str, int]) -> None:
    model = tiny_model("llama", **sizes)
    model.get_input_embeddings().weight.requires_grad_(False)
    shape = shape_of_config(model.config, name="llama")
    few, many = (sum(saved_bytes(model, num_tokens).values()) for num_tokens in (64, 128))
    assert (many - few) / 64 == pytest.approx(formulas.saved_bytes_per_token(shape, attention_bytes=4), rel=0.02)


@pytest.mark.parametrize("is_live", [False, True])
def test_logits_of_a_chunk_peak_as_the_formula_says(is_live: bool) -> None:
    assert logits_check(is_live=is_live).ratio == pytest.approx(1, abs=0.1)


def test_a_decoding_step_by_hand() -> None:
    """Llama-3.1-8B on an H100: all weights but the embedding table at 3350 GB/s, 2 FLOPs each at 989 TFLOPs."""
    shape = target_shape("llama-3.1-8b")
    read = 8_030_261_248 - 128_256 * 4096
    one = formulas.decode_step(shape, H100, batch=1, context=0)
    assert one.memory_s == pytest.approx(2 * read / 3.35e12)
    matrices = 32 * (2 * 4096 * (4096 + 1024) + 3 * 4096 * 14336) + 128_256 * 4096
    assert one.compute_s == pytest.approx(2 * matrices / 989e12)
    assert (one.bound, one.seconds) == ("memory bandwidth", one.memory_s)
    full = formulas.decode_step(shape, H100, batch=64, context=1000, utilisation=0.5)
    assert full.memory_s == pytest.approx((2 * read + 64 * 1000 * 131_072) / 3.35e12 / 0.5)


def test_compute_bounds_a_step_above_the_ridge_and_memory_below() -> None:
    shape = target_shape("qwen2.5-7b")
    ridge = formulas.ridge_batch(shape, H100)
    assert ridge == pytest.approx(989e12 / 3.35e12, rel=0.001)  # two bytes and two FLOPs a weight; norms are only read
    bounds = [formulas.decode_step(shape, H100, batch=round(ridge * f), context=0).bound for f in (0.9, 1.1)]
    assert bounds == ["memory bandwidth", "compute"]


def test_tensor_parallel_steps_share_weights_and_send_hidden_states() -> None:
    shape = target_shape("llama-3.1-70b")
    alone, four = (formulas.decode_step(shape, H100, batch=8, context=100, num_shards=n) for n in (1, 4))
    assert four.memory_s == pytest.approx(alone.memory_s / 4)
    assert four.compute_s == pytest.approx(alone.compute_s / 4)
    assert (alone.link_s, four.link_s) == (0, pytest.approx(80 * 2 * (8 * 8192 * 2) * 2 * 3 / 4 / 450e9))


def test_training_memory_by_hand() -> None:
    target = target_shape("llama-3.1-8b")
    draft = draft_shape("draft-0.5b", target)
    settings = PlanSettings(keep_target=False, prompt_tokens=256, response_tokens=512)
    trained = draft.num_parameters - draft.head_parameters  # tied, frozen

    def memory(launch: str, teacher: str = CACHED, num_gpus: int = 4) -> dict[str, float]:
        return memory_bytes(
            target, draft, settings, launch=launch, teacher=teacher, num_gpus=num_gpus, micro_batch_tokens=1024
        )

    one, ddp, fsdp, deepspeed = (memory(name) for name in (ONE_PROCESS, DDP, FSDP, DEEPSPEED))
    assert (one["draft weights"], one["gradients"], one["optimiser"]) == (4 * draft.num_parameters, 4 * trained, 8 * trained)
    assert one["buffers"] == 0
    assert ddp["buffers"] == 4 * trained
    for name in ("draft weights", "gradients", "optimiser"):
        assert ddp[name] == one[name] == 4 * fsdp[name]
    assert deepspeed["optimiser"] == 0
    assert fsdp["buffers"] == 4 * (2 * draft.layer_parameters + draft.head_parameters)
    # 1024 supervised tokens come with 512 of prompts.
    saved = formulas.saved_bytes_per_token(draft)
    assert one["activations"] == 1536 * saved + 1024 * 4 * draft.hidden_size
    live = memory(FSDP, ONLINE)
    assert "target" not in fsdp
    assert live["target"] == 2 * target.num_parameters / 4
    assert memory(DDP, ONLINE)["target"] == 2 * target.num_parameters
    assert live["logits"] == 2.5 * fsdp["logits"] == 30 * 1024 * 128_256


def test_training_flops_by_hand() -> None:
    target = target_shape("llama-3.1-8b")
    draft = draft_shape("draft-0.5b", target)
    settings = PlanSettings(tokens="1000", prompt_tokens=100, response_tokens=200, epochs=2)
    per_token = formulas.layer_flops(draft, context=150)
    cached = training_flops(target, draft, settings, teacher=CACHED)
    assert cached == pytest.approx(2 * 3 * (1500 * per_token + 1000 * 2 * draft.head_parameters))
    live = training_flops(target, draft, settings, teacher=ONLINE)
    teacher = 1500 * formulas.layer_flops(target, context=150) + 1000 * 2 * target.head_parameters
    assert live - cached == pytest.approx(2 * teacher)


def test_disk_by_hand() -> None:
    """214 bytes a token were measured for the top 64 (docs/training.md); the token's id is 4 more."""
    assert corpus_bytes_per_token(64) == {"stored": pytest.approx(218), "uncompressed": 388}
    assert corpus_bytes_per_token(0) == {"stored": 4, "uncompressed": 4}
    target = target_shape("llama-3.1-8b")
    draft = draft_shape("layers:2", target)
    disk = disk_gb(target, draft, PlanSettings(tokens="100M", prompt_tokens=256, response_tokens=512))
    assert disk["corpus"] == pytest.approx((100e6 * 218 + 50e6 * 4) / 1e9)
    trained = 2 * draft.layer_parameters + draft.hidden_size
    assert disk["checkpoints"] == pytest.approx(2 * (4 * draft.num_parameters + 8 * trained) / 1e9)
    assert disk["drafts"] == pytest.approx(3 * 2 * draft.num_parameters / 1e9)


def test_a_folder_without_shards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"corpus=.*holds no shards"):
        disk_check(tmp_path)


def test_an_untied_draft_freezes_both_tables() -> None:
    shape = replace(target_shape("llama-3.2-1b"), is_tied=False)
    layers = 16 * shape.layer_parameters + 2048
    assert formulas.trainable_parameters(shape, train_embeddings=False) == layers
    assert formulas.trainable_parameters(shape, train_embeddings=True) == layers + 2 * 128_256 * 2048
