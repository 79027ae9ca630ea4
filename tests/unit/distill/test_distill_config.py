"""Settings that cannot work are refused with their name, value and way out."""

import pytest

from distill.config import DraftConfig, LossConfig, OnPolicyConfig, TokenSelectionConfig, TrainConfig


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LossConfig(weights={"kl": 1.0}), r"loss.weights names \['kl'\].*forward_kl"),
        (lambda: LossConfig(weights={"tv": 0.0}), "one of them > 0"),
        (lambda: LossConfig(jsd_beta=1.5), "loss.jsd_beta=1.5"),
        (lambda: LossConfig(temperature=0.0), "loss.temperature=0.0"),
        (lambda: LossConfig(teacher="live"), "loss.teacher='live'.*'cached'.*'online'"),
        (lambda: TrainConfig(learning_rate=0.0), "train.learning_rate=0.0: must be > 0"),
        (lambda: TrainConfig(num_epochs=-1.0), "train.num_epochs=-1.0"),
        (lambda: TrainConfig(warmup_fraction=2.0), "train.warmup_fraction=2.0: must be within 0 and 1"),
        (lambda: TrainConfig(max_minutes=0.0), "train.max_minutes=0.0"),
        (lambda: TrainConfig(tokens_per_step=0), "train.tokens_per_step=0: must be at least 1"),
        (lambda: TrainConfig(autocast_dtype="float16"), "train.autocast_dtype='float16'"),
        (lambda: TrainConfig(eval_sampler="argmax"), "train.eval_sampler='argmax': choose from"),
        (lambda: DraftConfig(vocab_shortlist=0), "draft.vocab_shortlist=0"),
        (lambda: DraftConfig(vocab_shortlist="8192"), "draft.vocab_shortlist='8192': must be a positive number, .* or auto"),
        (lambda: DraftConfig(expected_acceptance=0.0), "draft.expected_acceptance=0.0"),
        (lambda: TokenSelectionConfig(keep_fraction=0.0), "train.token_selection.keep_fraction=0.0"),
        (lambda: TokenSelectionConfig(reference_steps=0), "train.token_selection.reference_steps=0"),
        (lambda: OnPolicyConfig(max_steps=0), "train.on_policy.max_steps=0: must be > 0"),
        (lambda: OnPolicyConfig(lmbda_end=1.5), r"train.on_policy.lmbda_end=1.5: must be within 0 \(the target's text\)"),
        (lambda: OnPolicyConfig(rows_per_step=0), "train.on_policy.rows_per_step=0"),
        (lambda: OnPolicyConfig(temperature=0.0), "train.on_policy.temperature=0.0"),
    ],
)
def test_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_phases_are_off_by_default() -> None:
    assert not TrainConfig().on_policy.enabled
    assert not TrainConfig().token_selection.enabled
    assert OnPolicyConfig(max_minutes=0.5).enabled
    assert TokenSelectionConfig(keep_fraction=0.9, reference_minutes=1.0).enabled


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"init": "copy"}, "draft.init='copy': choose from"),
        ({"layer_pattern": "odd"}, "draft.layer_pattern='odd': choose from"),
        ({"init": "pretrained"}, "draft.init=pretrained: set draft.path"),
        ({"init": "width", "path": "some/model", "hidden_size": 8}, "exclude each other"),
        ({"init": "width"}, "draft.init=width: set draft.hidden_size"),
        ({"hidden_size": 8}, "draft.hidden_size: only draft.init=width and draft.init=random"),
        ({"candidates": [[0], [1]]}, "draft.candidates: .*draft.init=chosen"),
        ({"init": "chosen", "candidates": []}, "draft.candidates: .*at least one"),
        ({"init": "chosen", "keep_layers": [0]}, "draft.init=chosen does not read it"),
        ({"init": "random", "keep_layers": [0]}, "draft.init=random does not read it"),
        ({"init": "chosen", "candidate_steps": 0}, "draft.candidate_steps=0"),
    ],
)
def test_drafts_that_contradict_themselves_are_refused(settings: dict[str, object], message: str) -> None:
    """A setting that another kind of draft reads would silently do nothing."""
    with pytest.raises(ValueError, match=message):
        DraftConfig(**settings)
