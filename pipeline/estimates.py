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

GIB = 2**30
PROMPT_TOKENS = 16
NUM_DECODE_STEPS = 4
TOPK_BYTES = 4 + 2  # id int32, log-probability fp16
TOKEN_BYTES = 4
#: fp32 weights, gradient and two Adam moments while training; a checkpoint holds the weights and moments.
TRAINING_BYTES_PER_PARAMETER, CHECKPOINT_BYTES_PER_PARAMETER = 16, 12
NUM_CHECKPOINTS = 2
NUM_SAVED_DRAFTS = 3  # undistilled, best, exported


@dataclass(frozen=True)
class WorkRates:
    """Measured speeds: corpus tokens per second over a whole batch, and seconds of one training step."""

    corpus_tokens_per_second: float
    train_step_s: float


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
    """GiB for weights and for both KV caches at the longest row and the runtime's batch, and for training the draft."""
    num_positions = config.runtime.max_batch_size * (
        config.corpus.max_prompt_tokens + config.corpus.max_new_tokens
    )
    sizes = {
        "target_weights": weight_bytes(target),
        "draft_weights": weight_bytes(draft),
        "target_kv_cache": num_positions * kv_bytes_per_token(target.config, target.dtype.itemsize),
        "draft_kv_cache": num_positions * kv_bytes_per_token(draft.config, draft.dtype.itemsize),
        "training": TRAINING_BYTES_PER_PARAMETER * num_parameters(draft) + weight_bytes(target),
    }
    return {name: round(size / GIB, 4) for name, size in sizes.items()} | {
        "available": round(psutil.virtual_memory().available / GIB, 2)
    }


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
    """Minutes for the corpus (questions included where the target invents them) and for the training, at most."""
    tokens = corpus_tokens(config)
    if any(source.prompts is None for source in sources_of(config.corpus)):
        tokens += num_rows(config) * config.corpus.max_question_tokens
    train = config.train
    num_steps = (
        train.num_epochs * corpus_tokens(config) / (train.tokens_per_step * train.gradient_accumulation_steps)
    )
    if train.max_steps is not None:
        num_steps = min(num_steps, train.max_steps)
    train_minutes = num_steps * train.gradient_accumulation_steps * rates.train_step_s / 60
    if train.max_minutes is not None:
        train_minutes = min(train_minutes, train.max_minutes)
    return {
        "corpus": round(tokens / rates.corpus_tokens_per_second / 60, 2),
        "distill": round(train_minutes, 2),
    }


def measure_rates(config: Config, target: PreTrainedModel, draft: PreTrainedModel) -> WorkRates:
    """A few decode steps of the target at the corpus's batch, and one forward and backward of the draft."""
    return WorkRates(
        _corpus_tokens_per_second(target, config.corpus.batch_size),
        _train_step_s(draft, config.train.tokens_per_step),
    )


@torch.no_grad()
def _corpus_tokens_per_second(target: PreTrainedModel, batch_size: int) -> float:
    ids_BL = torch.ones((batch_size, PROMPT_TOKENS), dtype=torch.long, device=target.device)
    out = target(input_ids=ids_BL, use_cache=True, logits_to_keep=1)
    seconds = []
    for _ in range(NUM_DECODE_STEPS):
        next_B1 = out.logits[:, -1:].argmax(dim=-1)
        started = _now(target)
        out = target(input_ids=next_B1, past_key_values=out.past_key_values, use_cache=True, logits_to_keep=1)
        seconds.append(_now(target) - started)
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
