"""Who wrote each token of a response: the draft (accepted), the target's correction, its bonus, or the prefill.

The engine reports its rounds while it decodes (`specdec_runtime.observe`); p and q of what was committed and of what
was rejected are computed afterwards, teacher-forced, so that decoding is not touched.

Shapes: N generated positions, V token ids, K ids that the draft scores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Optional

import torch
from torch import Tensor
from transformers import PreTrainedModel

from eval.acceptance import distribution
from eval.head import Head, evaluating, resolve_num_token_ids
from eval.measured_runtime import fixed_chains
from eval.position_scores import probability_of
from eval.teacher_forcing import Draft, ResponseRow, response_hidden_states
from specdec_runtime import DecoderConfig, Output, Request, SpeculativeDecoder
from specdec_runtime.observe import RoundRecord

PREFILL, ACCEPTED, CORRECTION, BONUS = "prefill", "accepted", "correction", "bonus"
WRITERS = (PREFILL, ACCEPTED, CORRECTION, BONUS)
Detokenize = Callable[[list[int]], str]


@dataclass(frozen=True)
class Probability:
    """A token with p and q at its place, both at the temperature of sampling, or at 1 where that is 0."""

    token_id: int
    text: str
    p: float
    q: float


@dataclass(frozen=True)
class TracedToken:
    """A committed token. `round` counts from 1, 0 is the prefill. `rejected`: the proposal that this one corrects."""

    writer: str
    round: int
    token: Probability
    rejected: Optional[Probability] = None


@dataclass(frozen=True)
class TokenTrace:
    """One response, token by token. `text` is the decoded output, and the texts of the tokens join up to it.

    The counts are the engine's own.
    """

    prompt: str
    draft: str
    temperature: float
    gamma: int
    sampler: str
    text: str
    finish_reason: str
    num_rounds: int
    num_proposed: int
    num_accepted: int
    block_efficiency: float
    tokens: list[TracedToken] = field(repr=False)

    def num_written_by(self, writer: str) -> int:
        """Tokens of one of `WRITERS`."""
        return sum(token.writer == writer for token in self.tokens)


def trace_tokens(
    target: PreTrainedModel,
    drafts: Mapping[str, Draft],
    prompts: Sequence[tuple[str, Sequence[int]]],
    detokenize: Detokenize,
    *,
    temperatures: Sequence[float] = (0.0,),
    gamma: int = 4,
    sampler: str = "probabilistic",
    max_new_tokens: int = 64,
    seed: int = 0,
    runtime: DecoderConfig | None = None,
    num_token_ids: int | None = None,
) -> list[TokenTrace]:
    """Decodes every prompt with every draft at every temperature; by prompt, then temperature, then draft.

    Args:
        prompts: (text to show, token ids). detokenize: ids -> text, special tokens kept.

    Raises:
        ValueError: what the engine refuses.
    """
    num_ids = resolve_num_token_ids(
        [target, *(draft.model for draft in drafts.values())],
        [None, *(draft.vocab_ids for draft in drafts.values())],
        num_token_ids,
    )
    config = fixed_chains(runtime, num_speculative_tokens=gamma, sampler=sampler, max_batch_size=len(prompts))
    traces: dict[tuple[int, float, str], TokenTrace] = {}
    for name, draft in drafts.items():
        records: list[RoundRecord] = []
        decoder = SpeculativeDecoder(
            target, draft.model, config, draft_vocab_ids=draft.vocab_ids, on_round=records.append
        )
        heads = Head(target, num_ids), Head(draft.model, num_ids, draft.vocab_ids)
        for temperature in temperatures:
            records.clear()
            requests = [
                Request(list(ids), max_new_tokens=max_new_tokens, temperature=temperature, seed=seed + i)
                for i, (_, ids) in enumerate(prompts)
            ]
            for index, output in enumerate(decoder.generate(requests)):
                shown, ids = prompts[index]
                own = [record for record in records if record.request_index == index]
                scored = _Scored(target, draft, heads, list(ids), output.token_ids, temperature or 1.0)
                tokens = scored.tokens(_writers(output, own), detokenize)
                text = detokenize(output.token_ids)
                traces[index, temperature, name] = _trace(
                    shown, name, temperature, config, text, output, tokens
                )
    order = [(i, t, name) for i in range(len(prompts)) for t in temperatures for name in drafts]
    return [traces[key] for key in order]


def _trace(
    prompt: str,
    draft: str,
    temperature: float,
    config: DecoderConfig,
    text: str,
    output: Output,
    tokens: list[TracedToken],
) -> TokenTrace:
    return TokenTrace(
        prompt=prompt,
        draft=draft,
        temperature=temperature,
        gamma=config.num_speculative_tokens,
        sampler=config.sampler,
        text=text,
        finish_reason=output.finish_reason,
        num_rounds=output.stats.num_rounds,
        num_proposed=output.stats.num_proposed,
        num_accepted=output.stats.num_accepted,
        block_efficiency=output.stats.block_efficiency,
        tokens=tokens,
    )


@dataclass(frozen=True)
class _Writer:
    """Who wrote a position, in which round, and what was rejected there."""

    name: str
    round: int
    rejected_id: int | None = None


def _writers(output: Output, records: Sequence[RoundRecord]) -> list[_Writer]:
    """One per generated token. A token behind the last accepted one is a correction if a proposal fell there."""
    writers = [_Writer(PREFILL, 0)]
    for number, record in enumerate(records, start=1):
        assert record.start == len(writers)
        num_kept = min(len(record.committed_ids), len(output.token_ids) - record.start)
        num_accepted = min(record.num_accepted, num_kept)
        writers += [_Writer(ACCEPTED, number)] * num_accepted
        if num_kept > num_accepted:
            fell = record.num_accepted < len(record.proposed_ids)
            rejected_id = record.proposed_ids[record.num_accepted] if fell else None
            writers.append(_Writer(CORRECTION if fell else BONUS, number, rejected_id))
    assert len(writers) == len(output.token_ids)
    return writers


class _Scored:
    """p and q over one response."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: Draft,
        heads: tuple[Head, Head],
        prompt_ids: list[int],
        output_ids: list[int],
        temperature: float,
    ) -> None:
        self.output_ids, self.vocab_ids = output_ids, heads[1].vocab_ids
        row = ResponseRow("", "", prompt_ids, output_ids, temperature)
        with evaluating(target), evaluating(draft.model):
            self.p_NV = distribution(heads[0](response_hidden_states(target, [row])), temperature)
            self.q_NK = distribution(heads[1](response_hidden_states(draft.model, [row])), temperature)

    def tokens(self, writers: Sequence[_Writer], detokenize: Detokenize) -> list[TracedToken]:
        """All tokens with p, q and text."""
        pieces = token_texts(self.output_ids, detokenize)
        committed = self._probabilities(self.output_ids)
        fallen = self._probabilities([0 if w.rejected_id is None else w.rejected_id for w in writers])
        result = []
        for i, writer in enumerate(writers):
            rejected = None
            if writer.rejected_id is not None:
                text = detokenize([writer.rejected_id])
                rejected = Probability(writer.rejected_id, text, *fallen[i])
            token = Probability(self.output_ids[i], pieces[i], *committed[i])
            result.append(TracedToken(writer.name, writer.round, token, rejected))
        return result

    def _probabilities(self, token_ids: Sequence[int]) -> list[tuple[float, float]]:
        ids_N = torch.tensor(token_ids, device=self.p_NV.device)
        p_N: Tensor = self.p_NV.gather(-1, ids_N[:, None])[:, 0]
        q_N = probability_of(self.q_NK, ids_N.to(self.q_NK.device), self.vocab_ids)
        return list(zip(p_N.tolist(), q_N.tolist(), strict=True))


def token_texts(token_ids: Sequence[int], detokenize: Detokenize) -> list[str]:
    """A text per token that together are the decoded whole; a character of several tokens is given to its last one."""
    whole = detokenize(list(token_ids))
    pieces, done = [], 0
    for i in range(len(token_ids)):
        text = detokenize(list(token_ids[: i + 1]))
        is_last = i + 1 == len(token_ids)
        end = len(whole) if is_last else len(text) if whole.startswith(text) else done
        end = max(end, done)
        pieces.append(whole[done:end])
        done = end
    return pieces
