"""The runtime's settings as a measurement uses them."""

from dataclasses import replace
from typing import Any

from specdec_runtime.config import DecoderConfig


def fixed_chains(runtime: DecoderConfig | None, **settings: Any) -> DecoderConfig:
    """`runtime` (default settings where it is None), but for what is proposed: chains of a draft model, all of one length.

    What is measured is decided by the measurement, which also draws its own conclusions about low acceptance: so no forward
    is padded, and nothing is said about it. `settings` are changed on top, a drafter or a tree among them.
    """
    fixed = {"drafter": "model", "tree": None, "gamma": "fixed", "verify_width": None, "min_conditional_acceptance": 0.0}
    return replace(runtime or DecoderConfig(), **{**fixed, **settings})
