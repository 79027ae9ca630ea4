"""What a run will need: memory, disk and minutes, from shapes and a few short measurements. Estimates, and called so.

Shapes: B rows, L positions, V vocabulary.
"""

import time
from dataclasses import dataclass

import psutil
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from pipeline.corpus.mixture import count_rows, sources_of
from pipeline.schema import Config
from specdec_runtime.config import DecoderConfig

GIB = 2**30
PROMPT_TOKENS = 16
NUM_DECODE_STEPS = 4
TOPK_BYTES = 4 + 2  # id int32, log-probability fp16
TOKEN_BYTES = 4
#: fp32 weights, gradient and two Adam moments while training; a checkpoint holds the weights and moments.
TRAINING_BYTES_PER_PARAMETER, CHECKPOINT_BYTES_PER_PARAMETER = 16, 12
NUM_CHECKPOINTS = 2
NUM_SAVED_DRAFTS = 3  # undistilled, best, exported
#: Of a step's forward and backward; the backward costs twice the forward.
FORWARD_SHARE = 1 / 3


@dataclass(frozen=True)
class WorkRates:
    """Measured speeds: corpus tokens per second over a whole batch, and seconds of one step of each phase of training.

    `on_policy_step_s` is 0 where there is no such phase.
    """

    corpus_tokens_per_second: float
    train_step_s: float
    on_policy_step_s: float = 0.0


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of the weights, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def kv_bytes_per_token(config: PreTrainedConfig, element_bytes: int) -> int:
    """Bytes that one position takes in the KV cache: keys and values of every layer."""
    text = config.get_text_config()
    num_heads = int(text.num_attention_heads)
    num_kv_heads = int(getattr(text, "num_key_value_heads", None) or num_heads)
    head_size = int(getattr(text, "head_dim", None) or text.hidden_size // num_heads)
    return 2 * int(text.num_hidden_layers) * num_kv_heads * head_size * element_bytes


def memory_gib(config: Config, target: PreTrainedModel, draft: PreTrainedModel) -> dict[str, float]:
    """GiB for weights, for both KV caches at the longest row and the runtime's batch, for a round's proposals (chain or
    tree) and for training the draft."""
    num_positions = config.runtime.max_batch_size * (
        config.corpus.max_prompt_tokens + config.corpus.max_new_tokens
    )
    sizes = {
        "target_weights": weight_bytes(target),
        "draft_weights": weight_bytes(draft),
        "target_kv_cache": num_positions * kv_bytes_per_token(target.config, target.dtype.itemsize),
        "draft_kv_cache": num_positions * kv_bytes_per_token(draft.config, draft.dtype.itemsize),
        "proposals": _proposal_bytes(config.runtime, target, draft),
        "training": TRAINING_BYTES_PER_PARAMETER * num_parameters(draft) + _target_bytes_in_training(config, target),
    }
    return {name: round(size / GIB, 4) for name, size in sizes.items()} | {
        "available": round(psutil.virtual_memory().available / GIB, 2)
    }


def _proposal_bytes(runtime: DecoderConfig, target: PreTrainedModel, draft: PreTrainedModel) -> int:
    """Of all rows together: a place in both caches, and the fp32 logits of p and q, for each node of the chain or tree."""
    per_node = sum(
        kv_bytes_per_token(model.config, model.dtype.itemsize) + 4 * int(model.config.get_text_config().vocab_size)
        for model in (target, draft)
    )
    return per_node * min(runtime.max_batch_size * runtime.max_proposals, runtime.max_draft_tokens)


def _target_bytes_in_training(config: Config, target: PreTrainedModel) -> int:
    """All of it where a phase asks it; with the cached teacher its head, which held-out acceptance is measured with."""
    if config.loss.teacher == "online" or config.train.on_policy.enabled:
        return weight_bytes(target)
    head = target.get_output_embeddings().weight
    return int(head.numel() * head.element_size())


def num_parameters(model: PreTrainedModel) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def num_rows(config: Config) -> int:
    """Rows of the corpus: samples of `corpus.num_prompts`, or of all rows of its files where that is null."""
    corpus = config.corpus
    num_prompts = corpus.num_prompts if corpus.num_prompts is not None else count_rows(corpus)
    return num_prompts * corpus.samples_per_prompt


def corpus_tokens(config: Config) -> int:
    """Response tokens at most: every answer at its full length."""
    return num_rows(config) * config.corpus.max_new_tokens


def disk_gib(config: Config, draft_parameters: int, draft_weight_bytes: int) -> dict[str, float]:
    """GiB that the corpus and the drafts will take at most."""
    corpus = corpus_tokens(config) * (TOKEN_BYTES + config.corpus.topk * TOPK_BYTES)
    corpus += num_rows(config) * config.corpus.max_prompt_tokens * TOKEN_BYTES
    drafts = (
        draft_parameters * CHECKPOINT_BYTES_PER_PARAMETER * NUM_CHECKPOINTS
        + draft_weight_bytes * NUM_SAVED_DRAFTS
    )
    return {"corpus": round(corpus / GIB, 4), "drafts": round(drafts / GIB, 4)}


def minutes(config: Config, rates: WorkRates) -> dict[str, float]:
    """Minutes for the corpus (questions included where the target invents them) and for all phases of the training, at most."""
    tokens = corpus_tokens(config)
    if any(source.prompts is None for source in sources_of(config.corpus)):
        tokens += num_rows(config) * config.corpus.max_question_tokens
    train = config.train
    offline = _offline_minutes(config, rates, max_steps=train.max_steps, max_minutes=train.max_minutes)
    phases = offline + _selection_minutes(config, rates) + _on_policy_minutes(config, rates)
    return {
        "corpus": round(tokens / rates.corpus_tokens_per_second / 60, 2),
        "distill": round(phases, 2),
    }


def _offline_minutes(
    config: Config, rates: WorkRates, *, max_steps: int | None, max_minutes: float | None
) -> float:
    """Until the first of steps, minutes and `train.num_epochs` is reached."""
    train = config.train
    num_steps = (
        train.num_epochs * corpus_tokens(config) / (train.tokens_per_step * train.gradient_accumulation_steps)
    )
    if max_steps is not None:
        num_steps = min(num_steps, max_steps)
    needed = num_steps * train.gradient_accumulation_steps * rates.train_step_s / 60
    return needed if max_minutes is None else min(needed, max_minutes)


def _selection_minutes(config: Config, rates: WorkRates) -> float:
    """Training the reference, and its losses: one forward over the whole corpus."""
    selection = config.train.token_selection
    if not selection.enabled:
        return 0.0
    reference = _offline_minutes(
        config, rates, max_steps=selection.reference_steps, max_minutes=selection.reference_minutes
    )
    num_forwards = corpus_tokens(config) / config.train.tokens_per_step
    return reference + num_forwards * FORWARD_SHARE * rates.train_step_s / 60


def _on_policy_minutes(config: Config, rates: WorkRates) -> float:
    """Until the first of its budgets is reached."""
    phase = config.train.on_policy
    budgets = [] if phase.max_minutes is None else [phase.max_minutes]
    if phase.max_steps is not None:
        budgets.append(phase.max_steps * rates.on_policy_step_s / 60)
    return min(budgets, default=0.0)


def measure_rates(config: Config, target: PreTrainedModel, draft: PreTrainedModel) -> WorkRates:
    """A few decode steps of the target at the corpus's batch, and one forward and backward of the draft.

    With an on-policy phase also what one of its steps takes.
    """
    train_step_s = _train_step_s(draft, config.train.tokens_per_step)
    return WorkRates(
        _decoded_tokens_per_second(target, config.corpus.batch_size),
        train_step_s,
        _on_policy_step_s(config, target, draft, train_step_s) if config.train.on_policy.enabled else 0.0,
    )


def _on_policy_step_s(
    config: Config, target: PreTrainedModel, draft: PreTrainedModel, train_step_s: float
) -> float:
    """The draft writes, the target reads it, the draft is trained on it: rows of full length, all written by the draft."""
    train, corpus, phase = config.train, config.corpus, config.train.on_policy
    row_tokens = min(train.max_sequence_tokens, corpus.max_prompt_tokens + corpus.max_new_tokens)
    num_written = phase.rows_per_step * phase.max_new_tokens
    writing_s = num_written / _decoded_tokens_per_second(draft, phase.rows_per_step)
    reading_s = _forward_s(target, phase.rows_per_step, row_tokens, num_logits=min(phase.max_new_tokens, row_tokens))
    return writing_s + reading_s + phase.rows_per_step * row_tokens / train.tokens_per_step * train_step_s


@torch.no_grad()
def _forward_s(model: PreTrainedModel, num_rows: int, num_tokens: int, *, num_logits: int) -> float:
    ids_BL = torch.ones((num_rows, num_tokens), dtype=torch.long, device=model.device)
    started = _now(model)
    model(input_ids=ids_BL, use_cache=False, logits_to_keep=num_logits)
    return _now(model) - started


@torch.no_grad()
def _decoded_tokens_per_second(model: PreTrainedModel, batch_size: int) -> float:
    ids_BL = torch.ones((batch_size, PROMPT_TOKENS), dtype=torch.long, device=model.device)
    out = model(input_ids=ids_BL, use_cache=True, logits_to_keep=1)
    seconds = []
    for _ in range(NUM_DECODE_STEPS):
        next_B1 = out.logits[:, -1:].argmax(dim=-1)
        started = _now(model)
        out = model(input_ids=next_B1, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        seconds.append(_now(model) - started)
    return batch_size / min(seconds)


def _train_step_s(draft: PreTrainedModel, tokens_per_step: int) -> float:
    """The second of two steps; the first one warms up. Head over all positions, as in training."""
    length = max(min(tokens_per_step, 256), 1)
    ids_BL = torch.ones((max(tokens_per_step // length, 1), length), dtype=torch.long, device=draft.device)
    seconds = 0.0
    for _ in range(2):
        started = _now(draft)
        loss = draft(input_ids=ids_BL, use_cache=False).logits.float().logsumexp(dim=-1).mean()
        loss.backward()
        seconds = _now(draft) - started
        draft.zero_grad(set_to_none=True)
    return seconds


def _now(model: PreTrainedModel) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
