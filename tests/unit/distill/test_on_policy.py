"""The on-policy phase: token ids in, the mixture, what is supervised, and that measurement decides."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from distill.config import LossConfig, OnPolicyConfig, TrainConfig
from distill.draft_init import draft_from_layers
from distill.mixed_text import MixedTextTrainer, corpus_prompts
from distill.objective import Objective
from distill.on_policy import OnPolicyResult, train_on_policy
from distill.on_policy_trainer import OnPolicyTrainer, pack_completions
from distill.schedule import BudgetClock
from tests.unit.distill.conftest import VOCAB
from tests.unit.distill.training_call import Killed, MakeModel, MakeRows, assert_same, weights

SHORTLIST = sorted({2, *range(0, VOCAB, 3)})


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    vocab = {str(index): index for index in range(VOCAB)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(vocab, unk_token="0")), eos_token="2")


def settings(**phase: object) -> TrainConfig:
    values = {"max_steps": 4, "rows_per_step": 3, "max_new_tokens": 5, "eval_every_steps": 2, **phase}
    return TrainConfig(autocast_dtype="float32", max_sequence_tokens=16, on_policy=OnPolicyConfig(**values))


def phase(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, rows, folder: Path, tokenizer: PreTrainedTokenizerFast, *,
    curve: list[float] | None = None, acceptance_of: Callable | None = None, vocab_ids: list[int] | None = None,
    train_head: bool = False, **options: object,
) -> OnPolicyResult:
    values = list(curve or [0.0])
    return train_on_policy(
        draft, rows, target=target, tokenizer=tokenizer, loss=LossConfig(), train=settings(**options), output_dir=folder,
        acceptance_of=acceptance_of or (lambda model: values.pop(0) if len(values) > 1 else values[0]), vocab_ids=vocab_ids,
        train_head=train_head,
    )


def trainer_of(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, rows, folder: Path, tokenizer: PreTrainedTokenizerFast, *,
    vocab_ids: list[int] | None = None, loss: str = "forward_kl", **options: object,
) -> OnPolicyTrainer:
    return OnPolicyTrainer(
        draft, rows, target=target, tokenizer=tokenizer, loss=LossConfig(weights={loss: 1.0}), train=settings(**options),
        scratch_dir=folder, clock=BudgetClock(None), vocab_ids=vocab_ids, own_head=None, callbacks=[],
    )


@pytest.mark.parametrize(
    ("curve", "kept", "step"), [([0.3, 0.5, 0.4], True, 2), ([0.3, 0.3, 0.29], False, None), ([0.3, 0.2, 0.31], True, 4)]
)
def test_kept_only_if_held_out_acceptance_rises(
    curve: list[float], kept: bool, step: int | None, llama: MakeModel, rows: MakeRows, tmp_path: Path,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """DeepSpec 84: the phase is judged by acceptance; an equal figure keeps the offline draft."""
    draft = draft_from_layers(llama(), [0, 3])
    before = weights(draft)
    result = phase(draft, llama(), rows(), tmp_path, tokenizer, curve=curve)
    assert (result.kept, result.offline_acceptance, result.on_policy_acceptance) == (kept, 0.3, max(curve[1:]))
    assert result.curve == list(zip([0, 2, 4], curve, strict=True))
    assert result.num_steps == 4 and result.num_supervised_tokens > 0
    assert "forward" not in vars(draft)
    if not kept:
        assert result.best_dir is None and not list(tmp_path.glob("best-*"))
        return
    assert result.best_dir == tmp_path / f"best-{step}"
    saved = AutoModelForCausalLM.from_pretrained(result.best_dir)
    assert saved.config.pad_token_id == 2
    with pytest.raises(AssertionError):
        assert_same(weights(saved), before)
    # A complete phase is returned without training.
    again = draft_from_layers(llama(), [0, 3])
    assert phase(again, llama(), rows(), tmp_path, tokenizer, curve=[0.9]) == result
    assert_same(weights(again), before)


def test_killed_phase_starts_again_from_the_offline_draft(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    def killed_at(step: int, curve: list[float]) -> Callable[[object], float]:
        values = list(curve)

        def acceptance_of(model: object) -> float:
            if len(values) == len(curve) - step:
                raise Killed
            return values.pop(0)

        return acceptance_of

    whole = draft_from_layers(llama(), [0, 3])
    expected = phase(whole, llama(), rows(), tmp_path / "whole", tokenizer, curve=[0.1, 0.2, 0.3])
    with pytest.raises(Killed):
        phase(
            draft_from_layers(llama(), [0, 3]), llama(), rows(), tmp_path / "killed", tokenizer,
            acceptance_of=killed_at(2, [0.1, 0.2, 0.3]),
        )
    draft = draft_from_layers(llama(), [0, 3])
    result = phase(draft, llama(), rows(), tmp_path / "killed", tokenizer, curve=[0.1, 0.2, 0.3])
    assert_same(weights(draft), weights(whole))
    assert result.curve == expected.curve
    with pytest.raises(ValueError, match="other draft, train: delete"):
        phase(llama(num_layers=2), llama(), rows(), tmp_path / "killed", tokenizer, max_steps=2)


def test_every_completion_token_is_supervised_and_nothing_else(llama: MakeModel) -> None:
    """trl 6357, SpecForge 885: pad == eos, and the final EOS and the first token are trained on all the same."""
    inputs = {
        "prompt_ids": torch.tensor([[2, 2, 5, 2], [7, 8, 9, 10]]),  # left-padded; the row's own last token is id 2
        "prompt_mask": torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]),
        "completion_ids": torch.tensor([[11, 12, 2], [13, 2, 2]]),
        "completion_mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }
    batch = pack_completions(inputs)
    assert batch["input_ids"].tolist() == [[5, 2, 11, 12, 7, 8, 9, 10, 13]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert batch["supervised_S"].tolist() == [1, 2, 3, 7, 8]
    assert "token_rows_S" not in batch, "what the draft wrote is no label"


def test_prompts_are_the_corpus_token_ids(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """No tokenizer touches them: with lmbda 0 prompt and answer come back, cut to `max_sequence_tokens` inputs."""
    corpus = rows(num_rows=8)
    trainer = trainer_of(draft_from_layers(llama(), [0, 3]), llama(), corpus, tmp_path, tokenizer, lmbda_start=0.0, lmbda_end=0.0)
    batch = [corpus_prompts(corpus, 16)[index] for index in range(8)]
    prompts, completions, *_ = trainer._generate([row["prompt"] for row in batch])
    assert prompts == corpus["prompt_token_ids"][:]
    for prompt, completion, row in zip(prompts, completions, corpus, strict=True):
        assert completion == row["response_token_ids"][: 16 - len(prompt) + 1]
    assert any(len(prompt) + len(completion) == 17 for prompt, completion in zip(prompts, completions, strict=True))


@pytest.mark.parametrize("continue_answers", [True, False])
def test_the_draft_writes_after_the_prompt_or_inside_the_answer(
    continue_answers: bool, llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    corpus = rows(num_rows=12)
    trainer = trainer_of(
        draft_from_layers(llama(), [0, 3]), llama(), corpus, tmp_path, tokenizer, lmbda_start=1.0,
        continue_answers=continue_answers, vocab_ids=SHORTLIST,
    )
    prompts, completions, *_ = trainer._generate([row["prompt"] for row in corpus_prompts(corpus, 16)])
    for prompt, completion, row in zip(prompts, completions, corpus, strict=True):
        whole = row["prompt_token_ids"] + row["response_token_ids"]
        assert prompt == whole[: len(prompt)] and len(prompt) < len(whole)
        assert 1 <= len(completion) <= 5
        # q has no mass outside the shortlist, so the draft never writes such a token.
        assert set(completion) <= set(SHORTLIST)
    longer = sum(len(prompt) > len(row["prompt_token_ids"]) for prompt, row in zip(prompts, corpus, strict=True))
    assert longer > 4 if continue_answers else longer == 0


def test_share_of_written_rows_follows_the_schedule(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    draft, corpus = draft_from_layers(llama(), [0, 3]), rows(num_rows=3)
    trainer = trainer_of(draft, llama(), corpus, tmp_path, tokenizer, lmbda_start=0.2, lmbda_end=0.8)
    shares = []
    for step in (0, 2, 4):
        trainer.state.global_step = step
        trainer._tokenize_prompts([corpus_prompts(corpus, 16)[index % 3]["prompt"] for index in range(600)])
        assert trainer.lmbda() == pytest.approx(0.2 + 0.6 * step / 4)
        shares.append(sum(answer is None for answer in trainer.answers) / 600)
    assert shares == pytest.approx([0.2, 0.5, 0.8], abs=0.06)


def test_sampled_tokens_follow_the_drafts_distribution(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The first written token of a left-padded prompt is distributed as q over the shortlist."""
    draft = draft_from_layers(llama(), [0, 3])
    trainer = trainer_of(draft, llama(), rows(), tmp_path, tokenizer, max_new_tokens=1, vocab_ids=SHORTLIST)
    prompts = [[5, 6, 7], [9, 4, 3, 8, 21, 30]]
    torch.manual_seed(0)
    first = [[row[0] for row in trainer.write(prompts * 1000)][index::2] for index in range(2)]
    for prompt, tokens in zip(prompts, first, strict=True):
        with torch.no_grad():
            q = torch.softmax(draft(torch.tensor([prompt])).logits[0, -1, SHORTLIST], -1)
        seen = torch.bincount(torch.tensor(tokens), minlength=VOCAB)[SHORTLIST] / len(tokens)
        assert float((seen - q).abs().sum() / 2) < 0.08


@pytest.mark.parametrize("name", ["forward_kl", "cross_entropy"])
def test_loss_equals_the_eager_one(
    name: str, llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """The step's loss is the mean over completion tokens of forward KL between whole forwards of target and draft.

    Cross entropy is what the target expects of it: against the draft's own tokens it would teach the draft to agree with itself.
    """
    draft, target = draft_from_layers(llama(), [0, 3]), llama()
    trainer = trainer_of(draft, target, rows(), tmp_path, tokenizer, loss=name, lmbda_start=0.5, lmbda_end=0.5)
    inputs = trainer._generate_and_score_completions([corpus_prompts(rows(), 16)[index] for index in range(6)])
    loss = trainer.compute_loss(trainer.model, inputs)
    expected, num_tokens = 0.0, 0
    for row in range(6):
        prompt = inputs["prompt_ids"][row][inputs["prompt_mask"][row].bool()]
        completion = inputs["completion_ids"][row][inputs["completion_mask"][row].bool()]
        trainer.loss_forward.uninstall()
        with torch.no_grad():
            p, q = (
                torch.log_softmax(model(torch.cat([prompt, completion])[None]).logits[0, len(prompt) - 1 : -1].double(), -1)
                for model in (target, draft)
            )
        expected += float((p.exp() * ((p if name == "forward_kl" else 0) - q)).sum())
        num_tokens += len(completion)
    assert float(loss.detach()) == pytest.approx(expected / num_tokens, rel=1e-4)


@pytest.mark.parametrize("train_head", [False, True])
def test_trains_towards_the_target_on_a_shortlist(
    train_head: bool, llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    target, corpus = llama(), rows(llama())
    draft = draft_from_layers(target, [0, 3])
    embeddings = draft.get_input_embeddings().weight.detach().clone()
    objective = Objective(LossConfig())

    def closeness(model: LlamaForCausalLM) -> float:
        total = 0.0
        for row in corpus:
            ids = torch.tensor([row["prompt_token_ids"] + row["response_token_ids"]])
            rows_V = torch.as_tensor(SHORTLIST)
            draft_logits = model(ids).logits[0][:, rows_V]
            tokens = torch.full((len(draft_logits),), -1)
            total -= float(objective.full(target(ids).logits[0], draft_logits, tokens, rows_V).sum())
        return total

    before = closeness(draft)
    result = phase(
        draft, target, corpus, tmp_path, tokenizer, acceptance_of=closeness, vocab_ids=SHORTLIST, train_head=train_head,
        max_steps=20, eval_every_steps=10, learning_rate=3e-3,
    )
    assert result.kept and result.offline_acceptance == pytest.approx(before)
    saved = AutoModelForCausalLM.from_pretrained(result.best_dir)
    assert saved.lm_head.weight.shape[0] == VOCAB
    assert torch.equal(saved.get_input_embeddings().weight, embeddings)
    assert torch.equal(saved.lm_head.weight, embeddings) is not train_head


def test_rows_without_room_are_refused(rows: MakeRows) -> None:
    with pytest.raises(ValueError, match=r"train.max_sequence_tokens=0: no training row of 12"):
        corpus_prompts(rows(), 0)


def test_the_compared_trainer_is_trls_own(llama: MakeModel, rows: MakeRows) -> None:
    """scripts/compare_trl.py measures MixedTextTrainer: its loss and its step must be trl's, not this project's."""
    for name in ("compute_loss", "_compute_loss", "training_step", "_prepare_inputs", "_generate_and_score_completions"):
        assert name not in vars(MixedTextTrainer)


def test_fewer_rows_than_a_step_has_are_trained_on_all_the_same(
    llama: MakeModel, rows: MakeRows, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """trl's sampler drops what does not fill a batch: the phase ended at step 0, with nothing measured, after the offline one."""
    few = rows().select(range(2))
    result = phase(draft_from_layers(llama(), [0, 3]), llama(), few, tmp_path, tokenizer, max_steps=2, rows_per_step=8)
    assert result.num_steps == 2 and result.num_supervised_tokens > 0
    assert [step for step, _ in result.curve] == [0, 2]
