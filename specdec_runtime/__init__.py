"""Speculative decoding for Transformers causal LMs: batched, lossless, token ids in and token ids out."""

from specdec_runtime.config import DecoderConfig
from specdec_runtime.engine import SpeculativeDecoder
from specdec_runtime.medusa_heads import MedusaHeads, load_medusa_heads
from specdec_runtime.request import Logprobs, Output, Request, StreamEvent
from specdec_runtime.stats import Stats

__all__ = [
    "DecoderConfig",
    "Logprobs",
    "MedusaHeads",
    "Output",
    "Request",
    "SpeculativeDecoder",
    "Stats",
    "StreamEvent",
    "load_medusa_heads",
]
