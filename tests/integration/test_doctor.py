"""`python -m pipeline.doctor`, as a user runs it: the right finding for each bad pair, and an answer for a good one."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eval.theory import StepTimes
from pipeline.doctor import main
from pipeline.doctor_probe import time_steps
from tests.conftest import ROOT
from tests.unit.pipeline.tiny_models import make_model, make_tokenizer, save

Spoil = Callable[[Path], object]
Doctor = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save(tmp_path / "target", make_model(num_layers=3))


@pytest.fixture
def doctor(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """`doctor(target, draft, *words)` gives the exit code, what `--json` wrote ({}: nothing), and all that was printed."""
    monkeypatch.setenv("COLUMNS", "200")
    torch.set_num_threads(1)

    def run(target: Path, draft: Path, *words: str) -> tuple[int, dict[str, Any], str]:
        found = tmp_path / "found.json"
        with pytest.raises(SystemExit) as left:
            main([str(target), str(draft), "--json", str(found), *words])
        content = json.loads(found.read_text()) if found.is_file() else {}
        assert isinstance(left.value.code, int)
        return left.value.code, content, "".join(capfd.readouterr())

    return run


def other_tokenizer(folder: Path) -> None:
    save(folder, make_model(), make_tokenizer(swap=True))


def swapped_special_tokens(folder: Path) -> None:
    save(folder, make_model(), make_tokenizer(eos="<s>"))


def swapped_special_ids(folder: Path) -> None:
    model = make_model()
    model.config.eos_token_id = model.generation_config.eos_token_id = 1
    model.config.bos_token_id = model.generation_config.bos_token_id = 2
    save(folder, model)


def shorter_context(folder: Path) -> None:
    save(folder, make_model(context=64))


def missing_template(folder: Path) -> None:
    save(folder, make_model(), make_tokenizer(template=None))


def penalty(folder: Path) -> None:
    path = save(folder, make_model()) / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.05}))


def nan_weights(folder: Path) -> None:
    path = save(folder, make_model()) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    save_file(weights, path, metadata={"format": "pt"})


def padded_differently(folder: Path) -> None:
    save(folder, make_model(vocab_size=104))


def broken_shard(folder: Path) -> None:
    save(folder, make_model(), max_shard_size="20KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-64])


@pytest.mark.parametrize(
    ("spoil", "code", "check", "said"),
    [
        (other_tokenizer, "tokenizer", "token-to-id maps", "'w10' (target 10, draft 20)"),
        (
            swapped_special_tokens,
            "special_tokens",
            "special tokens",
            "eos_token (target '</s>', draft '<s>')",
        ),
        (swapped_special_ids, "special_ids", "special tokens", "eos_token_id is [2] for the target and [1]"),
        (shorter_context, "context_length", "context length", "from position 64 on"),
        (missing_template, "chat_template", "chat template", "copy the target's chat_template.jinja"),
        (penalty, "penalty", "no penalties by default", "{'repetition_penalty': 1.05}"),
        (nan_weights, "non_finite_weights", "weights finite", "model.layers.1.mlp.up_proj.weight"),
        (padded_differently, "vocab_padding", "vocabulary width", "96 in the target and 104 in the draft"),
        (broken_shard, "broken_shard", "weight files whole", "model-00002-of"),
    ],
)
def test_bad_pairs(
    tmp_path: Path, target: Path, doctor: Doctor, spoil: Spoil, code: str, check: str, said: str
) -> None:
    """vllm 7252, 42775; sglang 24051; SpecForge 271; vllm 58080; Soup 345; trl 3028: found before anything runs."""
    spoil(tmp_path / "draft")
    exit_code, content, printed = doctor(target, tmp_path / "draft")
    assert exit_code == 2, printed
    assert [finding["code"] for finding in content["findings"]] == [code]
    assert content["answer"]["word"] == "bad pair" and content["probe"] is None
    assert [line["name"] for line in content["checks"] if line["status"] == "error"] == [check]
    assert said in content["findings"][0]["message"]
    assert "bad pair: 1 of the findings above forbid it: " + code in printed


@pytest.mark.parametrize(("draft_ms", "word", "code"), [(20.0, "no", 3), (1.0, "yes", 0)])
def test_pair_that_fits_is_probed_and_answered(
    target: Path, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, draft_ms: float, word: str, code: int
) -> None:
    """A draft that is its own target is accepted always: it pays where its step is cheap. Steps are timed, then given times count."""

    def timed(*models: Any, **settings: Any) -> StepTimes:
        assert len(time_steps(*models, **settings).target_ms) == 3
        return StepTimes(draft_ms, (10.0, 10.0, 10.0))

    monkeypatch.setattr("pipeline.doctor.time_steps", timed)
    exit_code, content, printed = doctor(
        target, target, "--seconds", "2", "--max-gamma", "2", "--dtype", "float32"
    )
    assert exit_code == code, printed
    assert content["answer"]["word"] == word
    assert {line["status"] for line in content["checks"]} == {"ok"}
    probe = content["probe"]
    assert [one["temperature"] for one in probe["by_temperature"]] == [0.0, 1.0]
    assert all(one["acceptance"]["value"] == 1.0 for one in probe["by_temperature"])
    assert [outlook["tau"]["value"] for outlook in probe["by_temperature"][0]["outlooks"]] == [2.0, 3.0]
    assert ("does not pay" if word == "no" else "pays, predicted") in printed and "break-even" in printed


def test_a_model_that_cannot_be_loaded_here_is_not_measured(tmp_path: Path, target: Path, doctor: Doctor) -> None:
    """A quantised target whose kernels are not installed: nothing is wrong with the pair, and nothing was measured."""
    save(tmp_path / "draft", make_model())
    path = target / "config.json"
    quantised = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantised}))
    exit_code, content, printed = doctor(target, tmp_path / "draft")
    assert exit_code == 3, printed
    assert content["answer"]["word"] == "not measured" and "gptqmodel" in content["answer"]["why"]


def test_numbers_that_the_dtype_does_not_hold_are_no_verdict(tmp_path: Path, target: Path, doctor: Doctor) -> None:
    """Finite in its file, infinite in half precision: every logit would be NaN, and so the acceptance measured from them."""
    model = make_model()
    model.model.norm.weight.data[0] = 1e5
    save(tmp_path / "draft", model)
    exit_code, content, printed = doctor(target, tmp_path / "draft", "--dtype", "float16")
    assert exit_code == 2, printed
    assert [finding["code"] for finding in content["findings"]] == ["non_finite_weights"]
    assert "--dtype" in content["findings"][0]["message"]


def test_a_template_that_changes_the_words_is_asked_the_fixed_questions(
    tmp_path: Path, target: Path, doctor: Doctor
) -> None:
    tokenizer = make_tokenizer(template="{% for message in messages %}<s>{{ message['content'] | upper }}</s>{% endfor %}")
    for folder in (target, tmp_path / "draft"):
        save(folder, make_model(), tokenizer)
    exit_code, content, printed = doctor(target, tmp_path / "draft", "--seconds", "4", "--max-gamma", "1", "--dtype", "float32")
    assert exit_code in (0, 3), printed
    assert content["probe"] is not None


def test_a_warning_alone_does_not_refuse(tmp_path: Path, target: Path, doctor: Doctor) -> None:
    """Penalties of the target's own defaults, and head sizes that one engine dislikes, are said and forbid nothing."""
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.1}))
    save(tmp_path / "draft", make_model())
    exit_code, content, printed = doctor(target, tmp_path / "draft", "--no-probe")
    assert exit_code == 0, printed
    assert [(f["code"], f["severity"]) for f in content["findings"]] == [("penalty", "warning")]
    assert content["answer"]["word"] == "not measured"
    assert "they forbid nothing" in printed


def test_users_mistakes_end_with_2_and_say_what_to_do(
    tmp_path: Path, target: Path, doctor: Doctor, capfd: pytest.CaptureFixture[str]
) -> None:
    exit_code, _, printed = doctor(target, tmp_path / "nowhere" / "draft")
    assert exit_code == 2 and "no such folder" in printed and "Traceback" not in printed
    exit_code, _, printed = doctor(
        target, target, "--prompts", str(tmp_path / "none.jsonl"), "--seconds", "1"
    )
    assert exit_code == 2 and "--prompts" in printed and "no such file" in printed
    assert doctor(target, target, "--seconds", "0")[0] == 2
    with pytest.raises(SystemExit) as left:
        main([str(target)])
    assert left.value.code == 2 and 'PAIR="target draft"' in capfd.readouterr().err


def test_the_command_itself(tmp_path: Path, target: Path) -> None:
    """In a process of its own, as `make doctor` starts it."""
    shorter_context(tmp_path / "draft")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline.doctor", str(target), str(tmp_path / "draft")],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "bad pair: 1 of the findings above forbid it: context_length" in done.stdout
