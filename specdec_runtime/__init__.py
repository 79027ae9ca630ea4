"""Speculative decoding for Transformers causal LMs: batched, lossless, token ids in and token ids out.

A name is imported when it is first asked for, so that whoever reads the settings alone (`specdec_runtime.config`) does not
wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec_runtime.config import DecoderConfig
    from specdec_runtime.engine import SpeculativeDecoder
    from specdec_runtime.medusa_heads import MedusaHeads, load_medusa_heads
    from specdec_runtime.request import Logprobs, Output, Request, StreamEvent
    from specdec_runtime.stats import Stats

_MODULE_OF = {
    "DecoderConfig": "config",
    "Logprobs": "request",
    "MedusaHeads": "medusa_heads",
    "Output": "request",
    "Request": "request",
    "SpeculativeDecoder": "engine",
    "Stats": "stats",
    "StreamEvent": "request",
    "load_medusa_heads": "medusa_heads",
}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
