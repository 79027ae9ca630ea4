"""What a benchmark compares: backend x draft x gamma x temperature x batch size."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from transformers import PreTrainedModel

from eval.config import PLAIN_BACKENDS, BenchConfig
from eval.teacher_forcing import Draft
from specdec_runtime.backends.base import Backend
from specdec_runtime.backends.hf_assisted import HFAssisted
from specdec_runtime.backends.hf_generate import HFGenerate
from specdec_runtime.backends.native import NativeBackend
from specdec_runtime.backends.vllm import VLLMBackend
from specdec_runtime.config import DecoderConfig
from specdec_runtime.medusa_heads import MedusaHeads

NO_DRAFT = "none"
NGRAM = "ngram"  # proposals that are looked up in the text, without a draft


@dataclass(frozen=True)
class Condition:
    """One way to decode. Plain decoding has draft `none` and gamma 0; `ngram` looks its proposals up in the text.

    `gamma_policy`: "fixed", or "auto", where the engine chooses the proposal length and `gamma`
    is its upper bound.
    """

    backend: str
    draft: str
    gamma: int
    temperature: float
    batch: int
    gamma_policy: str = "fixed"

    @property
    def is_plain(self) -> bool:
        """Whether it is a baseline."""
        return self.draft == NO_DRAFT

    @property
    def has_one_width(self) -> bool:
        """Whether all verifications are gamma + 1 tokens wide, so that plain decoding can be padded to the same width."""
        is_drafted = self.backend == "native" and self.draft not in (NO_DRAFT, NGRAM)
        return is_drafted and self.gamma_policy == "fixed"


def conditions_at(
    config: BenchConfig, draft_names: list[str], *, temperature: float, batch: int
) -> list[Condition]:
    """All conditions of one temperature and batch size: they are compared, and run in alternation."""
    plain = [backend for backend in config.backends if backend in PLAIN_BACKENDS]
    result = [Condition(backend, NO_DRAFT, 0, temperature, batch) for backend in plain]
    for name in draft_names:
        gammas = config.gammas
        if name != "distilled" and config.undistilled_gammas is not None:
            gammas = config.undistilled_gammas
        for gamma in gammas:
            if "native" in config.backends:
                result.append(Condition("native", name, gamma, temperature, batch))
            # Transformers' assisted generation has no batches.
            if "hf_assisted" in config.backends and batch == 1:
                result.append(Condition("hf_assisted", name, gamma, temperature, batch))
            if "vllm" in config.backends:
                result.append(Condition("vllm", name, gamma, temperature, batch))
        if config.auto_gamma and "native" in config.backends:
            result.append(Condition("native", name, max(config.gammas), temperature, batch, "auto"))
    if config.ngram_gammas and "native" in config.backends:
        ngram = [Condition("native", NGRAM, gamma, temperature, batch) for gamma in config.ngram_gammas]
        result.extend(ngram)
        if config.auto_gamma:
            result.append(replace(ngram[0], gamma=max(config.ngram_gammas), gamma_policy="auto"))
    return result


class BackendFactory:
    """Makes backends, one per backend, draft, gamma, policy and batch size; temperatures share them."""

    def __init__(self, target: PreTrainedModel, drafts: Mapping[str, Draft], runtime: DecoderConfig) -> None:
        self.target = target
        self.drafts = drafts
        # The benchmark draws its own conclusions about low acceptance, and sets what is proposed itself.
        self.runtime = replace(
            runtime,
            drafter="model",
            tree=None,
            gamma="fixed",
            verify_width=None,
            min_conditional_acceptance=0.0,
        )
        self._made: dict[Condition, Backend] = {}

    def backend_of(self, condition: Condition) -> Backend:
        """The condition's backend."""
        key = replace(condition, temperature=0.0)
        if condition.backend == "vllm":  # takes a minute to load, and batches whatever it is given
            key = replace(key, batch=1)
        if key not in self._made:
            self._made[key] = self._make(condition)
        return self._made[key]

    def is_synthetic(self, condition: Condition) -> bool:
        """Whether proposals are accepted by chance, so that the tokens mean nothing."""
        is_native = condition.backend == "native" and not condition.is_plain
        return is_native and self.runtime.acceptance == "synthetic"

    def plain_at_width(self, width: int, batch: int) -> Backend:
        """Native plain decoding by forwards as wide as a verification: kernels round by width."""
        return self._plain(batch, verify_width=width)

    def _make(self, condition: Condition) -> Backend:
        if condition.backend.startswith("hf_generate"):
            # With a static cache `generate` compiles its step on CUDA: the strongest that
            # Transformers has there.
            is_static = condition.backend == "hf_generate_static"
            return HFGenerate(self.target, max_batch_size=condition.batch, static_cache=is_static)
        if condition.backend == "vllm":
            return self._vllm(condition)
        if condition.is_plain:
            return self._plain(condition.batch, verify_width=None)
        config = replace(
            self.runtime,
            num_speculative_tokens=condition.gamma,
            gamma=condition.gamma_policy,
            max_batch_size=condition.batch,
        )
        if condition.draft == NGRAM:
            config = replace(config, drafter="ngram", draft_confidence=0.0)
            return NativeBackend(self.target, None, config)
        draft = self.drafts[condition.draft]
        if isinstance(draft.model, MedusaHeads):
            return NativeBackend(self.target, draft.model, replace(config, drafter="medusa"))
        if condition.backend == "hf_assisted":
            return HFAssisted(self.target, draft.model, num_speculative_tokens=condition.gamma)
        return NativeBackend(self.target, draft.model, config, draft_vocab_ids=draft.vocab_ids)

    def _plain(self, batch: int, *, verify_width: int | None) -> Backend:
        config = replace(
            self.runtime,
            num_speculative_tokens=0,
            acceptance="exact",
            max_batch_size=batch,
            verify_width=verify_width,
        )
        return NativeBackend(self.target, config=config)

    def _vllm(self, condition: Condition) -> Backend:
        """vLLM loads the folders that the models came from, in the target's dtype; its draft proposes by its whole head."""
        draft = None if condition.is_plain else self.drafts[condition.draft].model.name_or_path
        return VLLMBackend(
            self.target.name_or_path,
            draft,
            num_speculative_tokens=condition.gamma,
            sampler=self.runtime.sampler,
            dtype=str(self.target.dtype).removeprefix("torch."),
        )
