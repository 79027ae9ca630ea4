"""A training with a reference and an on-policy phase, through the entry point, and its figures."""

import json
from pathlib import Path

import pytest

from tests.conftest import Entry

pytestmark = pytest.mark.slow

PHASES = (
    "+experiment=tiny", "tracking=off", "stages=[corpus,distill]", "train.max_steps=10", "train.token_selection.keep_fraction=0.5",
    "train.token_selection.reference_steps=5", "train.on_policy.max_steps=4", "train.on_policy.rows_per_step=4",
    "train.on_policy.max_new_tokens=8", "train.on_policy.eval_every_steps=2",
)  # fmt: skip


@pytest.mark.parametrize("more", [(), ("draft.vocab_shortlist=64",)])
def test_the_phases_of_a_training(run_entry: Entry, tmp_path: Path, more: tuple[str, ...]) -> None:
    done = run_entry(*PHASES, *more)
    assert done.returncode == 0, done.stderr
    folder = (tmp_path / "artifacts" / "latest" / "distill").resolve()
    figures = json.loads((folder / "stage.json").read_text())["figures"]
    record = json.loads((folder / "train.json").read_text())
    phase = record["on_policy"]
    assert figures["on_policy_kept"] == phase["kept"] == (phase["on_policy_acceptance"] > phase["offline_acceptance"])
    assert figures["best_acceptance"] == max(phase["on_policy_acceptance"], phase["offline_acceptance"])
    assert phase["offline_acceptance"] == pytest.approx(max(value for _, value in record["curve"]), abs=1e-6)
    assert record["num_supervised_tokens"] > phase["num_supervised_tokens"] > 0
    assert {path.name for path in folder.iterdir() if path.is_dir()} == {"draft", "undistilled"}
