"""What the doctor asks: a file of the user's, questions that the target invents, or a few fixed ones."""

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pipeline.bench_prompts import file_prompts
from pipeline.corpus.chat import Message, prompt_ids, user_turn
from specdec_runtime import DecoderConfig, Request, SpeculativeDecoder

NUM_PROMPTS = 24
MAX_QUESTION_TOKENS = 32
MIN_QUESTION_TOKENS = 4
MAX_PROMPT_TOKENS = 256

QUESTIONS = (
    "Why is the sky blue?",
    "Write a short story about a lighthouse keeper.",
    "Explain how a bicycle stays upright.",
    "Give me a recipe for tomato soup.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that reverses a list.",
    "Summarise the plot of Romeo and Juliet in three sentences.",
    "How do I politely decline an invitation?",
    "Name five uses for an empty jar.",
    "What causes the seasons?",
    "Translate 'good morning' into French, German and Spanish.",
    "How does a refrigerator work?",
)
BEGINNINGS = (
    "The history of the city begins with",
    "In order to bake bread, you first",
    "def fibonacci(n):\n",
    "The most important thing about the experiment was",
    "Once upon a time, in a small village,",
    "The company announced on Monday that",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\n",
)


def given_prompts(path: str, tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> list[list[int]]:
    """The first usable prompts of a file. Raises ValueError when it cannot be read, or none is usable."""
    try:
        return file_prompts(
            path, tokenizer, chat=chat, num_prompts=NUM_PROMPTS, max_tokens=MAX_PROMPT_TOKENS
        ).prompts
    except ValueError as error:
        raise ValueError(str(error).replace("bench.prompts=", "--prompts ")) from error


def fixed_prompts(tokenizer: PreTrainedTokenizerBase, *, chat: bool) -> list[list[int]]:
    """A handful of plain questions, or beginnings of texts for a base model."""
    if not chat:
        return [ids for text in BEGINNINGS if (ids := list(tokenizer.encode(text)))]
    return [prompt_ids(tokenizer, [_user(text)]) for text in QUESTIONS]


def self_asked_prompts(
    target: PreTrainedModel,
    draft: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    draft_vocab_ids: Tensor | None,
    seed: int,
) -> list[list[int]]:
    """Different questions that the target writes in the user's place (Magpie, arXiv 2406.08464); [] when none came out, or the
    chat template does not show where the user's words go."""
    try:
        turn = user_turn(tokenizer, target, None)
    except ValueError:
        return []
    start = tokenizer.encode(turn.prefix, add_special_tokens=False)
    if not start:
        return []
    config = DecoderConfig(num_speculative_tokens=2, min_conditional_acceptance=0.0)
    decoder = SpeculativeDecoder(target, draft, config, draft_vocab_ids=draft_vocab_ids)
    requests = [
        Request(
            start,
            max_new_tokens=MAX_QUESTION_TOKENS,
            temperature=1.0,
            top_p=0.95,
            stop_token_ids=tuple(turn.stop_token_ids),
            seed=seed + row,
        )
        for row in range(NUM_PROMPTS)
    ]
    questions: dict[str, None] = {}
    for output in decoder.generate(requests):
        ids = [token for token in output.token_ids if token not in turn.stop_token_ids]
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if end := turn.suffix.strip():  # a template without special tokens: its end of turn is ordinary text
            text = text.split(end)[0]
        text = text.strip()
        if output.finish_reason == "stop" and len(ids) >= MIN_QUESTION_TOKENS and text:
            questions[text] = None
    return [prompt_ids(tokenizer, [_user(text)]) for text in questions]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
