"""The entry point as a user meets it: exit codes and messages."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline import __main__ as entry
from pipeline.errors import GateFailure, describe, is_user_mistake
from pipeline.random_target import obtain_random_target
from pipeline.schema import RandomModelConfig
from tests.conftest import Entry

TINY = "+experiment=tiny"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, `other` with another tokenizer, `no_template` without a chat template."""
    root = tmp_path_factory.mktemp("models")
    obtain_random_target(RandomModelConfig(), root / "a").rename(root / "target")
    obtain_random_target(RandomModelConfig(vocab_size=300), root / "b").rename(root / "other")
    shutil.copytree(root / "target", root / "no_template")
    (root / "no_template" / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((root / "no_template" / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (root / "no_template" / "tokenizer_config.json").write_text(json.dumps(settings))
    (root / "empty.jsonl").write_text("")
    (root / "questions.jsonl").write_text('{"question": "Why?"}\n')
    return root


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("corpus.num_promts=3", "num_promts"),
        ("+corpus.num_promts=3", "corpus.num_promts: no such setting"),
        ("corpus.num_prompts=many", "corpus.num_prompts"),
        ("loss=nothing", "forward_kl"),
        ("target.random.seed", "target.random.seed"),
        ("stages=[train]", "preflight"),
        ("train.max_steps=0", "train.max_steps=0"),
        ("artifacts_dir=/dev/null/artifacts", "artifacts_dir=/dev/null/artifacts: cannot be written"),
        ("-m loss=tv,nla artifacts_dir=/dev/null/artifacts", "artifacts_dir cannot be written"),
        ("target=hf target.path={models}/absent", "absent"),
        ("target=hf target.path=nobody/has-this-model", "nobody/has-this-model"),
        ("draft=pretrained draft.path={models}/absent", "absent"),
        ("draft=pretrained draft.path={models}/other", "tokenizer"),
        ("target=hf target.path={models}/no_template", "chat template"),
        ("corpus=prompts corpus.prompts={models}/absent.jsonl", "absent.jsonl"),
        ("corpus=prompts corpus.prompts={models}/empty.jsonl", "empty.jsonl"),
        ("corpus=prompts corpus.prompts={models}/questions.jsonl corpus.prompts_column=text", "question"),
        ("stages=[export]", "not finished for this configuration"),
    ],
)
def test_a_users_mistake_ends_with_one_message_and_2(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    models: Path,
    tmp_path: Path,
    arguments: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "sys.argv", ["draftsmith", TINY, "tracking=off", *arguments.format(models=models).split()]
    )
    with pytest.raises(SystemExit) as left:
        entry.main()
    shown = capfd.readouterr().err
    assert left.value.code == 2, shown
    assert message in shown
    assert shown.count("error: ") == 1
    assert "Traceback" not in shown
    assert not list(tmp_path.glob("artifacts/*/*.incomplete")), "it began to work"


def test_the_process_ends_with_the_code(run_entry: Entry) -> None:
    """The folder was missing, every write failed, and the exit code was 0 (speculators 743)."""
    done = run_entry(TINY, "artifacts_dir=/dev/null/artifacts")
    assert done.returncode == 2
    assert done.stderr.startswith("error: artifacts_dir=/dev/null/artifacts: cannot be written")


def test_help_and_a_dry_look_leave_nothing_behind(run_entry: Entry, tmp_path: Path) -> None:
    shown = run_entry("--help")
    assert shown.returncode == 0
    assert "loss: cross_entropy, forward_kl" in shown.stdout
    assert run_entry(TINY, "--cfg", "job").returncode == 0
    assert not list(tmp_path.iterdir())


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def test_a_librarys_value_error_is_not_the_users() -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        json.loads("{}", object_hook=lambda values: int("x"))
    assert not is_user_mistake(caught.value)
    with pytest.raises(ValueError, match=r"draft\.num_layers") as own:
        __import__("distill.config").config.DraftConfig(num_layers=0)
    assert is_user_mistake(own.value)
    assert not is_user_mistake(raised(KeyError("x")))


def test_a_message_says_each_cause_once() -> None:
    error = ValueError("outer: inner")
    error.__cause__ = ValueError("inner")
    error.__cause__.__cause__ = OSError("root")
    assert describe(error) == "outer: inner\nroot"


@pytest.mark.parametrize(
    ("error", "code"),
    [(GateFailure("too slow"), 3), (RuntimeError("broken"), 1), (KeyboardInterrupt(), 130), (None, 0)],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    code: int,
) -> None:
    def run_stages(config: object) -> None:
        if error is not None:
            raise error

    monkeypatch.setattr("pipeline.runner.run_stages", run_stages)
    monkeypatch.setattr("sys.argv", ["draftsmith", TINY])
    if code == 0:
        entry.main()
        return
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == code
    assert ("Traceback" in capsys.readouterr().err) == (code == 1)


def failed_save() -> Exception:
    """What `torch.save` raises on a full disk: the cause stands in the words of the error that it was handling."""
    error = RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")
    error.__context__ = RuntimeError("[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/3")
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(28, "No space left on device", "checkpoint-10"), "'checkpoint-10'"),
        (Exception("Error while serializing: I/O error: No space left on device (os error 28)"), "No space left"),
        (failed_save(), "PytorchStreamWriter failed writing"),
    ],
)
def test_a_full_disk_is_named_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    """speculators 743: writing failed. Wherever that is, the message names it and the way out."""

    def run_stages(config: object) -> None:
        raise error

    monkeypatch.setattr("pipeline.runner.run_stages", run_stages)
    monkeypatch.setattr("sys.argv", ["draftsmith", TINY])
    with pytest.raises(SystemExit) as left:
        entry.main()
    shown = capsys.readouterr().err
    assert left.value.code == 2 and said in shown and "Free some space" in shown
    assert "Traceback" not in shown


def test_a_multirun_runs_every_value_and_reports_a_missed_gate_at_the_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen = []

    def run_stages(config: object) -> None:
        seen.append(config.loss.weights)  # type: ignore[attr-defined]
        raise GateFailure("too slow")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.runner.run_stages", run_stages)
    monkeypatch.setattr("sys.argv", ["draftsmith", TINY, "-m", "loss=forward_kl,tv"])
    with pytest.raises(SystemExit) as left:
        entry.main()
    assert left.value.code == 3
    assert seen == [{"forward_kl": 1.0}, {"tv": 1.0}]
    assert [path.name for path in tmp_path.iterdir()] == ["artifacts"]
