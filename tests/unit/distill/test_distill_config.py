"""Settings that cannot work are refused with their name, value and way out."""

import pytest

from distill.config import DraftConfig, LossConfig, TrainConfig


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
        (lambda: DraftConfig(vocab_shortlist=0), "draft.vocab_shortlist=0"),
    ],
)
def test_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
