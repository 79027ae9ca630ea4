"""The token viewer of a run: which prompts it shows, and how their text is read back."""

from collections.abc import Iterable, Mapping, Sequence

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from eval.teacher_forcing import Draft
from eval.token_trace import Detokenize, trace_tokens
from eval.viewer import render_viewer
from pipeline.eval_rows import fitting
from pipeline.models import ModelRef, load_tokenizer
from pipeline.schema import Config

VIEWER_FILE = "viewer.html"
MAX_PROMPT_CHARS = 400
ROLES = ("system", "user", "assistant", "model", "human")


def viewer_page(
    config: Config,
    reference: ModelRef,
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Iterable[list[int]],
    *,
    num_token_ids: int | None = None,
) -> str:
    """Decode the first `eval.num_viewer_prompts` with every draft and temperature, and draw the page.

    Raises:
        ValueError: no prompt leaves room for `eval.decoded_tokens`.
    """
    settings = config.eval
    models = [target, *(draft.model for draft in drafts.values())]
    fit = fitting(prompts, models, num_new_tokens=settings.decoded_tokens, field="eval.decoded_tokens")
    tokenizer = load_tokenizer(reference.path, reference.trust_remote_code)
    detokenize = detokenizer(tokenizer)
    shown = [(prompt_text(ids, tokenizer), ids) for ids in fit[: settings.num_viewer_prompts]]
    traces = trace_tokens(
        target,
        drafts,
        shown,
        detokenize,
        temperatures=list(dict.fromkeys(settings.temperatures)),
        gamma=settings.viewer_gamma,
        sampler=settings.samplers[0],
        max_new_tokens=settings.decoded_tokens,
        seed=settings.seed,
        num_token_ids=num_token_ids,
    )
    return render_viewer(
        traces, title=f"Who wrote what: {reference.name}", subtitle=f"{', '.join(drafts)} proposing for {reference.name}"
    )


def detokenizer(tokenizer: PreTrainedTokenizerBase) -> Detokenize:
    """ids -> text with special tokens kept and no blank tidied away: what was generated, and nothing else."""

    def detokenize(token_ids: list[int]) -> str:
        text: str = tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    return detokenize


def prompt_text(token_ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    """What the user said last, without the template around it; of a prompt without a template, its end.

    The parts between special tokens are gone through from the end: the first that is more than a role is it.
    """
    parts: list[list[int]] = [[]]
    for token_id in token_ids:
        if token_id in tokenizer.all_special_ids:
            parts.append([])
        else:
            parts[-1].append(int(token_id))
    texts = [str(tokenizer.decode(part)).strip() for part in parts]
    said = next((text for text in reversed(texts) if text and text.lower() not in ROLES), "")
    first, _, rest = said.partition("\n")
    text = rest.strip() if first.strip().lower() in ROLES else said
    return text if len(text) <= MAX_PROMPT_CHARS else "…" + text[-MAX_PROMPT_CHARS:]
