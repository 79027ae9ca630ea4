"""This project's own engine as a backend."""

from collections.abc import Sequence
from typing import Optional

from torch import Tensor
from transformers import PreTrainedModel

from specdec_runtime.config import DecoderConfig
from specdec_runtime.detokenize import Detokenize
from specdec_runtime.engine import SpeculativeDecoder
from specdec_runtime.medusa_heads import MedusaHeads
from specdec_runtime.request import Output, Request


class NativeBackend:
    """`SpeculativeDecoder` behind the common interface; plain decoding without a draft."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | MedusaHeads | None = None,
        config: Optional[DecoderConfig] = None,
        *,
        draft_vocab_ids: Optional[Tensor] = None,
        detokenize: Optional[Detokenize] = None,
        name: str = "native",
    ) -> None:
        self.name = name
        self.decoder = SpeculativeDecoder(
            target, draft, config, draft_vocab_ids=draft_vocab_ids, detokenize=detokenize
        )

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        return self.decoder.generate(requests)
