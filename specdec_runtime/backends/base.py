"""What every decoding backend offers, so that they can be compared on the same requests."""

from collections.abc import Sequence
from typing import Protocol

from specdec_runtime.request import Output, Request


class Backend(Protocol):
    """Decodes requests; `name` is what reports show."""

    name: str

    def generate(self, requests: Sequence[Request]) -> list[Output]:
        """Outputs in the order of the requests. A parameter that the backend cannot apply raises ValueError by name."""
        ...
