"""Users' mistakes: each is refused before any work, with the field, the value and the way out."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.corpus_schema import CorpusConfig
from pipeline.input_checks import check_disk, check_inputs
from pipeline.schema import Config, TargetConfig
from tests.unit.pipeline.tiny_models import make_model, make_tokenizer, save


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return save(tmp_path / "target", make_model(num_layers=3))


def config_for(tmp_path: Path, target: Path, **changes: Any) -> Config:
    """Fits the tiny target; `changes` are `group__field=value`."""
    config = Config(
        artifacts_dir=str(tmp_path / "artifacts"),
        target=TargetConfig(name="tiny", path=str(target), dtype="float32"),
        corpus=CorpusConfig(max_prompt_tokens=32, max_new_tokens=64),
    )
    config.draft.num_layers, config.bench.max_new_tokens, config.preflight.min_free_disk_gib = 2, 64, 0.0
    for name, value in changes.items():
        group, field = name.split("__")
        setattr(getattr(config, group), field, value)
    return config


def test_good_input_passes(tmp_path: Path, target: Path) -> None:
    for size in (96, "auto"):
        check_inputs(config_for(tmp_path, target, draft__vocab_shortlist=size, draft__keep_layers=[0, 2]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target__path": "/no/such/folder"}, r"target\.path='/no/such/folder': no such folder"),
        ({"target__dtype": "int8"}, r"target\.dtype='int8': choose from"),
        ({"export__dtype": "int8"}, r"export\.dtype='int8': choose from"),
        ({"draft__path": "/no/such/draft"}, r"draft\.path='/no/such/draft': no such folder"),
        ({"draft__num_layers": 4}, r"draft\.num_layers=4: choose from 1 to 3"),
        ({"draft__keep_layers": [0, 3]}, r"draft\.keep_layers=\[0, 3\]: the target has layers 0 to 2"),
        ({"draft__vocab_shortlist": 97}, r"draft\.vocab_shortlist=97: choose from 3 .* to 96"),
        ({"draft__vocab_shortlist": 2}, r"draft\.vocab_shortlist=2: choose from 3"),
        (
            {"corpus__max_new_tokens": 97},
            r"corpus\.max_prompt_tokens=32 \+ corpus\.max_new_tokens=97 is more than the 128",
        ),
        ({"bench__max_new_tokens": 97}, r"bench\.max_new_tokens=97 is more than the 128"),
        ({"preflight__min_free_disk_gib": 1e9}, r"GiB are free, preflight\.min_free_disk_gib=1e\+09"),
        ({"train__liger": True}, r"train\.liger=true does not go with loss\.teacher=cached"),
    ],
)
def test_each_mistake_is_named(tmp_path: Path, target: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_inputs(config_for(tmp_path, target, **changes))


def test_kernels_that_are_not_here_are_said_before_the_corpus(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distill.liger.find_spec", lambda name: None)
    config = config_for(tmp_path, target, train__liger=True, loss__teacher="online")
    with pytest.raises(ValueError, match=r"train\.liger=true needs the package liger-kernel"):
        check_inputs(config)
    config.stages = ["bench"]
    check_inputs(config)


@pytest.mark.parametrize(
    ("name", "content", "column", "message"),
    [
        ("none.jsonl", None, None, r"corpus\.prompts='.*none\.jsonl': no such file"),
        ("empty.jsonl", "", None, r"corpus\.prompts='.*empty\.jsonl' has no rows"),
        (
            "rows.jsonl",
            '{"prompt": "w3"}\n',
            "question",
            r"corpus\.prompts_column='question': .* it has \['prompt'\]",
        ),
        ("rows.jsonl", '{"other": "w3"}\n', None, r"none of the columns .* it has \['other'\]"),
    ],
)
def test_prompts_file_must_exist_have_rows_and_the_column(
    tmp_path: Path, target: Path, name: str, content: str | None, column: str | None, message: str
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        check_inputs(
            config_for(tmp_path, target, corpus__prompts=str(tmp_path / name), corpus__prompts_column=column)
        )


def test_target_without_chat_template_is_refused_only_when_chat_is_asked_for(tmp_path: Path) -> None:
    bare = save(tmp_path / "bare", make_model(num_layers=3), make_tokenizer(template=None))
    with pytest.raises(ValueError, match=r"the target's tokenizer has no chat template.*target\.chat=false"):
        check_inputs(config_for(tmp_path, bare))
    (tmp_path / "x.jsonl").write_text('{"text": "w3 w4"}\n')
    check_inputs(config_for(tmp_path, bare, target__chat=False, corpus__prompts=str(tmp_path / "x.jsonl")))


def test_draft_with_another_tokenizer_is_refused(tmp_path: Path, target: Path) -> None:
    """vllm 42775, sglang 24051: same size, other tokens."""
    draft = save(tmp_path / "draft", make_model(), make_tokenizer(swap=True))
    with pytest.raises(ValueError, match=r"draft\.path: .*'w10' \(target 10, draft 20\)"):
        check_inputs(config_for(tmp_path, target, draft__path=str(draft)))


def test_draft_that_export_can_mend_is_taken(tmp_path: Path, target: Path) -> None:
    """Padding, a penalty and a missing template are no reason to refuse a draft to start from."""
    draft = save(tmp_path / "draft", make_model("qwen2", vocab_size=112), make_tokenizer(template=None))
    settings = json.loads((draft / "generation_config.json").read_text())
    (draft / "generation_config.json").write_text(json.dumps(settings | {"repetition_penalty": 1.1}))
    check_inputs(config_for(tmp_path, target, draft__path=str(draft)))


def test_draft_with_a_context_below_the_corpus_is_refused(tmp_path: Path, target: Path) -> None:
    draft = save(tmp_path / "draft", make_model("gpt2", context=64))
    with pytest.raises(
        ValueError, match=r"corpus\.max_new_tokens=64 is more than the 64 positions that the draft reads"
    ):
        check_inputs(config_for(tmp_path, target, draft__path=str(draft)))


def test_broken_target_shard_is_refused(tmp_path: Path, target: Path) -> None:
    weights = target / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"the target's weight file .*model\.safetensors cannot be read"):
        check_inputs(config_for(tmp_path, target))


def test_draft_with_nan_is_refused(tmp_path: Path, target: Path) -> None:
    model = make_model()
    model.model.norm.weight.data[0] = torch.nan
    with pytest.raises(ValueError, match=r"'model\.norm\.weight'.* 1 NaN"):
        check_inputs(config_for(tmp_path, target, draft__path=str(save(tmp_path / "draft", model))))


def test_unwritable_artifacts_dir_is_refused(tmp_path: Path, target: Path) -> None:
    (tmp_path / "artifacts").write_text("a file stands here")
    with pytest.raises(ValueError, match=r"artifacts_dir=.*cannot be written"):
        check_inputs(config_for(tmp_path, target))


def test_push_needs_a_login(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.input_checks.get_token", lambda: None)
    with pytest.raises(ValueError, match=r"export\.push=true: not logged in"):
        check_inputs(config_for(tmp_path, target, export__push=True))


def test_disk_check_passes_with_room(tmp_path: Path) -> None:
    check_disk(tmp_path, 0.0)
