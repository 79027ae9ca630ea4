"""The exported folder: fits the target, loads back to the bit, holds no surprises, and serves."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from pipeline.draft_folder import export_draft
from pipeline.models import ModelRef
from pipeline.pair import check_pair
from pipeline.serving_files import write_serving_files
from tests.unit.pipeline.tiny_models import FAMILIES, NUM_TOKENS, TEMPLATE, make_model, save

IDS_BT = torch.tensor([[1, 5, 9, 30, 7, 50, 4]])


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def ref(folder: Path) -> ModelRef:
    return ModelRef(str(folder), "tiny", "revision")


def export(tmp_path: Path, draft: Path, target: Path, *, dtype: str = "float32", gamma: int = 3) -> Path:
    export_draft(
        draft, tmp_path / "out" / "draft", target=ref(target), dtype=dtype, gamma=gamma, copied_layers=False
    )
    return tmp_path / "out" / "draft"


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_exports_and_gives_the_same_logits(tmp_path: Path, family: str) -> None:
    target = save(tmp_path / "target", make_model(family, num_layers=3))
    model = make_model(family, seed=1)
    model.save_pretrained(tmp_path / "draft")  # no tokenizer there: export brings the target's
    folder = export(tmp_path, tmp_path / "draft", target)
    with torch.no_grad():
        expected = model(input_ids=IDS_BT).logits
        torch.testing.assert_close(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(input_ids=IDS_BT).logits,
            expected,
            rtol=0,
            atol=0,
        )
    assert check_pair(target, folder) == []
    assert AutoTokenizer.from_pretrained(folder).chat_template == TEMPLATE


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("width", [100, 112])
def test_vocabulary_becomes_as_wide_as_the_targets_and_padding_cannot_win(
    tmp_path: Path, tied: bool, width: int
) -> None:
    """trl 3028, vllm 7252, ModelOpt 2489: one tokenizer, two widths. Narrowed and widened, tied and untied."""
    target = save(tmp_path / "target", make_model(vocab_size=104, num_layers=3))
    model = make_model(vocab_size=width, tied=tied, seed=1)
    model.save_pretrained(tmp_path / "draft")
    folder = export(tmp_path, tmp_path / "draft", target)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert exported.config.vocab_size == 104
    assert exported.config.tie_word_embeddings is tied
    assert (exported.lm_head.weight.data_ptr() == exported.model.embed_tokens.weight.data_ptr()) is tied
    with torch.no_grad():
        before, after = model(input_ids=IDS_BT).logits, exported(input_ids=IDS_BT).logits
    torch.testing.assert_close(after[..., :NUM_TOKENS], before[..., :NUM_TOKENS], rtol=0, atol=0)
    assert check_pair(target, folder) == []


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_from_shards_to_a_wider_target(tmp_path: Path, family: str, tied: bool) -> None:
    """Tied and untied, from several files, with rows added that nothing can make win."""
    target = save(tmp_path / "target", make_model(family, vocab_size=112, num_layers=3))
    model = make_model(family, vocab_size=100, tied=tied, seed=1)
    model.save_pretrained(tmp_path / "draft", max_shard_size="20KB")
    assert len(list((tmp_path / "draft").glob("*.safetensors"))) > 1
    folder = export(tmp_path, tmp_path / "draft", target)
    exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert exported.config.get_text_config().vocab_size == 112
    head, embeddings = exported.get_output_embeddings(), exported.get_input_embeddings()
    assert (head.weight is embeddings.weight) is tied
    ids_BT = torch.randint(0, NUM_TOKENS, (8, 12))
    with torch.no_grad():
        before, after = model(input_ids=ids_BT).logits, exported(input_ids=ids_BT).logits
    torch.testing.assert_close(after[..., :NUM_TOKENS], before[..., :NUM_TOKENS], rtol=1e-5, atol=1e-5)
    assert bool((after[..., 100:].amax(dim=-1) <= after[..., :NUM_TOKENS].amax(dim=-1)).all())
    assert check_pair(target, folder) == []


ROPES = {
    "llama": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "qwen2": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    },
    "mistral": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("family", list(ROPES))
def test_scaled_rotary_settings_reach_the_exported_folder(tmp_path: Path, family: str) -> None:
    """SpecForge 271: copied layers with other rotary settings see other positions. The same: no word; another: a warning."""
    rope = ROPES[family]
    target = save(tmp_path / "target", make_model(family, num_layers=3, rope=rope))
    ids_BT = torch.randint(0, NUM_TOKENS, (1, 100))  # past the original context
    for name, own, expected in (("scaled", rope, []), ("plain", None, ["rope"])):
        model = make_model(family, seed=1, rope=own)
        model.save_pretrained(tmp_path / name)
        folder = tmp_path / name / "out"
        _, findings = export_draft(
            tmp_path / name, folder, target=ref(target), dtype="float32", gamma=1, copied_layers=True
        )
        assert [finding.code for finding in findings] == expected
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            after, before = exported(input_ids=ids_BT).logits, model(input_ids=ids_BT).logits
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    written = json.loads((tmp_path / "scaled" / "out" / "config.json").read_text())["rope_parameters"]
    assert written.items() >= rope.items()


def test_sharded_draft_and_dtype(tmp_path: Path) -> None:
    target = save(tmp_path / "target", make_model())
    model = make_model(tied=False, seed=1)
    model.save_pretrained(tmp_path / "draft", max_shard_size="20KB")
    assert len(list((tmp_path / "draft").glob("*.safetensors"))) > 1
    folder = export(tmp_path, tmp_path / "draft", target, dtype="bfloat16")
    exported = AutoModelForCausalLM.from_pretrained(folder)
    assert exported.dtype == torch.bfloat16
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "draft", dtype=torch.bfloat16)(
            input_ids=IDS_BT
        ).logits
        torch.testing.assert_close(exported(input_ids=IDS_BT).logits, expected, rtol=0, atol=0)


def test_generation_config_is_clean_and_holds_gamma(tmp_path: Path) -> None:
    """Soup 345: penalties of the target's defaults must not reach the draft; its several EOS ids must."""
    model = make_model(num_layers=3)
    model.generation_config = GenerationConfig(
        bos_token_id=1,
        eos_token_id=[2, 5],
        pad_token_id=2,
        do_sample=True,
        temperature=0.6,
        repetition_penalty=1.1,
    )
    target = save(tmp_path / "target", model)
    make_model(seed=1).save_pretrained(tmp_path / "draft")
    settings = json.loads(
        (export(tmp_path, tmp_path / "draft", target, gamma=2) / "generation_config.json").read_text()
    )
    settings.pop("transformers_version")
    assert settings == {
        "bos_token_id": 1,
        "eos_token_id": [2, 5],
        "pad_token_id": 2,
        "num_assistant_tokens": 2,
        "num_assistant_tokens_schedule": "constant",
        "assistant_confidence_threshold": 0.0,
    }


def test_nothing_pickled_and_stale_files_are_gone(tmp_path: Path) -> None:
    target = save(tmp_path / "target", make_model())
    make_model(seed=1).save_pretrained(tmp_path / "draft")
    (tmp_path / "out" / "draft").mkdir(parents=True)
    (tmp_path / "out" / "draft" / "pytorch_model.bin").write_bytes(b"left by an earlier attempt")
    folder = export(tmp_path, tmp_path / "draft", target)
    assert {path.name for path in folder.iterdir()} == {
        "model.safetensors",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }


def test_non_finite_draft_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    target = save(tmp_path / "target", make_model())
    make_model(seed=1).save_pretrained(tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    weights["model.norm.weight"][0] = torch.inf
    save_file(weights, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"model\.norm\.weight.* NaN or infinite"):
        export(tmp_path, tmp_path / "draft", target)
    assert not (tmp_path / "out").exists()


def test_weights_beyond_fp16_are_refused(tmp_path: Path) -> None:
    target = save(tmp_path / "target", make_model())
    model = make_model(seed=1)
    model.model.norm.weight.data[0] = 1e5
    model.save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match=r"export\.dtype=float16.*model\.norm\.weight"):
        export(tmp_path, tmp_path / "draft", target, dtype="float16")


def test_shorter_context_is_a_warning_with_the_crossing_point(tmp_path: Path) -> None:
    """SpecForge 271: export checks the draft's context length."""
    target = save(tmp_path / "target", make_model())
    make_model(seed=1, context=64).save_pretrained(tmp_path / "draft")
    _, findings = export_draft(
        tmp_path / "draft", tmp_path / "out", target=ref(target), dtype="float32", gamma=1, copied_layers=True
    )
    assert [(finding.code, finding.severity) for finding in findings] == [("context_length", "warning")]
    assert "from position 64 on" in findings[0].message


def test_assisted_generation_from_the_folder_alone_equals_plain_greedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The script that export writes, run as a user runs it; the draft proposes `gamma` tokens, and no text changes."""
    target = save(tmp_path / "target", make_model(num_layers=3))
    make_model(seed=1).save_pretrained(tmp_path / "draft")
    export(tmp_path, tmp_path / "draft", target, gamma=2)
    write_serving_files(
        tmp_path / "out",
        target=str(target),
        gamma=2,
        draft_sample_method="greedy",
        dtype="float32",
        prompt="w5 w9 w30",
    )
    texts = {}
    for flag in ("--plain", "--max-new-tokens=24"):
        monkeypatch.setattr(sys, "argv", ["assisted_generation.py", "--max-new-tokens=24", flag])
        runpy.run_path(str(tmp_path / "out" / "assisted_generation.py"), run_name="__main__")
        texts[flag] = capsys.readouterr().out
    assert texts["--plain"] == texts["--max-new-tokens=24"]
    assert len(texts["--plain"].split()) > 5


def test_assisted_generation_reads_gamma_from_the_folder(tmp_path: Path) -> None:
    """Of every round, the target sees gamma + 1 tokens."""
    target_dir = save(tmp_path / "target", make_model(num_layers=3))
    make_model(seed=1).save_pretrained(tmp_path / "draft")
    draft = AutoModelForCausalLM.from_pretrained(
        export(tmp_path, tmp_path / "draft", target_dir, gamma=2), dtype=torch.float32
    )
    target = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    plain = target.generate(IDS_BT, max_new_tokens=20, do_sample=False)
    widths = []
    target.model.embed_tokens.register_forward_hook(
        lambda module, inputs, output: widths.append(inputs[0].shape[1])
    )
    assisted = target.generate(IDS_BT, max_new_tokens=20, do_sample=False, assistant_model=draft)
    assert torch.equal(plain, assisted)
    assert max(widths[1:]) == 3


def test_serve_line_starts_vllm_with_the_settings_file(tmp_path: Path) -> None:
    """A stand-in `vllm` records its words: the target, and the JSON with the draft's path that holds from there."""
    folder = tmp_path / "a folder with 'quotes'"
    (folder / "draft").mkdir(parents=True)
    write_serving_files(
        folder, target="org/it's", gamma=3, draft_sample_method="probabilistic", dtype="float32"
    )
    (tmp_path / "vllm").write_text('#!/bin/sh\npwd\nfor word in "$@"; do printf "%s\\0" "$word"; done\n')
    (tmp_path / "vllm").chmod(0o755)
    for given, expected in ((None, "org/it's"), (str(folder), str(folder))):
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | ({"TARGET": given} if given else {})
        done = subprocess.run(
            [str(folder / "serve.sh"), "--port", "1"],
            capture_output=True,
            text=True,
            check=True,
            env=env,
            cwd="/",
        )
        where, words = done.stdout.split("\n", 1)
        verb, target, flag, settings, *rest = words.split("\0")
        assert (verb, target, flag, rest) == ("serve", expected, "--speculative-config", ["--port", "1", ""])
        config = json.loads(settings)
        assert config == {
            "method": "draft_model",
            "model": "./draft",
            "num_speculative_tokens": 3,
            "draft_sample_method": "probabilistic",
        }
        assert (Path(where) / config["model"]).is_dir()


def test_other_engines_start_lines_name_target_draft_and_gamma(tmp_path: Path) -> None:
    """Stand-ins record their words: SGLang verifies one token more than it drafts; TensorRT-LLM reads the settings file."""
    folder = tmp_path / "a folder"
    (folder / "draft").mkdir(parents=True)
    write_serving_files(folder, target="org/it's", gamma=3, draft_sample_method="greedy", dtype="float32")
    for name in ("python", "trtllm-serve"):
        (tmp_path / name).write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
        (tmp_path / name).chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = {
        script: subprocess.run(
            [str(folder / script), "--port", "1"], capture_output=True, text=True, check=True, env=env, cwd="/"
        ).stdout.split()
        for script in ("sglang.sh", "tensorrt_llm.sh")
    }
    assert said["sglang.sh"] == [
        *("-m", "sglang.launch_server", "--model-path", "org/it's", "--speculative-algorithm", "STANDALONE"),
        *("--speculative-draft-model-path", "./draft", "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4", "--port", "1"),
    ]
    assert said["tensorrt_llm.sh"] == ["org/it's", "--extra_llm_api_options", "tensorrt_llm.yaml", "--port", "1"]
    settings = yaml.safe_load((folder / "tensorrt_llm.yaml").read_text())
    assert settings["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 3,
        "speculative_model": "./draft",
    }


def test_shortlisted_head_proposes_only_trained_ids_in_any_engine(tmp_path: Path) -> None:
    """FR-Spec heads leave rows untrained; Transformers and vLLM would propose from them."""
    target = save(tmp_path / "target", make_model(vocab_size=104, num_layers=3))
    model = make_model(vocab_size=100, tied=True, seed=1)
    model.save_pretrained(tmp_path / "draft")
    vocab_ids = list(range(0, NUM_TOKENS, 3))
    export_draft(
        tmp_path / "draft",
        tmp_path / "out",
        target=ref(target),
        dtype="float32",
        gamma=1,
        copied_layers=False,
        vocab_ids=vocab_ids,
    )
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    with torch.no_grad():
        before, after = model(input_ids=IDS_BT).logits, exported(input_ids=IDS_BT).logits
    torch.testing.assert_close(after[..., vocab_ids], before[..., vocab_ids], rtol=0, atol=0)
    assert set(after.argmax(dim=-1).flatten().tolist()) <= set(vocab_ids)
    assert not set(before.argmax(dim=-1).flatten().tolist()) <= set(vocab_ids)
    assert check_pair(target, tmp_path / "out") == []


def export_with_shortlist(folder: Path, target: Path):
    return export_draft(
        folder / "draft",
        folder / "out",
        target=ref(target),
        dtype="float32",
        gamma=1,
        copied_layers=False,
        vocab_ids=[0, 1, 2, 5],
    )


def test_a_head_with_values_of_its_own_is_exported_as_untied(tmp_path: Path) -> None:
    """Its config says tied, as after a fine-tune that trained the head: vLLM would read the embeddings in its place."""
    target = save(tmp_path / "target", make_model(tied=True, num_layers=3))
    make_model(tied=True, seed=1).save_pretrained(tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].flip(0)
    save_file(weights, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    folder = export(tmp_path, tmp_path / "draft", target)
    assert json.loads((folder / "config.json").read_text())["tie_word_embeddings"] is False
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], weights["lm_head.weight"])


def test_gemma_keeps_its_tied_head_and_says_so(tmp_path: Path) -> None:
    target = save(tmp_path / "target", make_model("gemma", num_layers=3))
    make_model("gemma", seed=1).save_pretrained(tmp_path / "draft")
    model, findings = export_with_shortlist(tmp_path, target)
    assert [finding.code for finding in findings] == ["full_head"]
    assert model.config.tie_word_embeddings


def test_gemma_with_a_head_of_its_own_says_that_vllm_would_not_read_it(tmp_path: Path) -> None:
    target = save(tmp_path / "target", make_model("gemma", num_layers=3))
    make_model("gemma", tied=False, seed=1).save_pretrained(tmp_path / "draft")
    model, findings = export_with_shortlist(tmp_path, target)
    assert [finding.code for finding in findings] == ["own_head"]
    with torch.no_grad():
        assert set(model(input_ids=IDS_BT).logits.argmax(dim=-1).flatten().tolist()) <= {0, 1, 2, 5}
