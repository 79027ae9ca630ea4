"""What becomes of a run when MLflow fails: a warning, and work goes on."""

import functools
import logging
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

log = logging.getLogger(__name__)
P = ParamSpec("P")

#: Error codes by which a server says no to one call; it will answer the next one.
_REFUSALS = (
    "INVALID_PARAMETER_VALUE",
    "RESOURCE_ALREADY_EXISTS",
    "RESOURCE_DOES_NOT_EXIST",
    "BAD_REQUEST",
    "PERMISSION_DENIED",
)


def status_of(error: BaseException) -> str:
    """MLflow's word for a run that this exception ended."""
    return "FAILED" if isinstance(error, Exception) else "KILLED"


def never_fatal(method: Callable[Concatenate[Any, P], None]) -> Callable[Concatenate[Any, P], None]:
    """A method of a tracker whose failure is a warning.

    Tracking ends (`client` becomes None) with the first failure that is no refusal: each further call would cost its timeout
    again.
    """

    @functools.wraps(method)
    def guarded(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.client is None:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:  # any kind: the HTTP, SQL and file stores raise their own
            uri = self.settings.uri
            first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
            if getattr(error, "error_code", None) in _REFUSALS:
                log.warning("MLflow at %s refused %s: %s", uri, method.__name__.lstrip("_"), first_line)
            else:
                self.client = None
                log.warning("MLflow at %s failed (%s); the run goes on without tracking", uri, first_line)

    return guarded
