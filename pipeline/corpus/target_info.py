"""What the corpus stage needs to know of the target, without its weights: some engines hold those elsewhere."""

from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from transformers import AutoConfig, GenerationConfig, PreTrainedConfig

from pipeline.schema import Config


@dataclass(frozen=True)
class TargetInfo:
    """The configurations in a target's folder."""

    config: PreTrainedConfig
    generation_config: GenerationConfig

    @property
    def context_tokens(self) -> Optional[int]:
        """The longest text that it can hold, where it says so."""
        length: Optional[int] = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        return length

    @property
    def vocab_size(self) -> int:
        """Number of logits."""
        return int(self.config.get_text_config().vocab_size)


def load_target_info(path: str, trust_remote_code: bool) -> TargetInfo:
    """Read the configurations of a local folder."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    if (Path(path) / "generation_config.json").is_file():
        return TargetInfo(config, GenerationConfig.from_pretrained(path))
    return TargetInfo(config, GenerationConfig.from_model_config(config))


def check_sizes(config: Config, target: TargetInfo) -> None:
    """Refuse lengths beyond the target's context and more stored candidates than it has tokens.

    Raises:
        ValueError: names the fields and the largest sum.
    """
    corpus, context_tokens = config.corpus, target.context_tokens
    if context_tokens is not None and corpus.max_prompt_tokens + corpus.max_new_tokens > context_tokens:
        raise ValueError(
            f"corpus.max_prompt_tokens={corpus.max_prompt_tokens} and corpus.max_new_tokens={corpus.max_new_tokens} exceed the "
            f"target's context of {context_tokens} tokens together: lower one of them"
        )
    if corpus.topk > target.vocab_size:
        raise ValueError(f"corpus.topk={corpus.topk}: the target has only {target.vocab_size} tokens")
