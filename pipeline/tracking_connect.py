"""The way to MLflow: a client of a database or a server, or none with a warning. mlflow is imported here, when it is wanted."""

import logging
import os
import socket
import sqlite3
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pipeline.processes import folder_held
from pipeline.schema import TrackingConfig

if TYPE_CHECKING:
    from mlflow import MlflowClient

log = logging.getLogger(__name__)


def prepare_environment(timeout_s: float) -> None:
    """Settings that mlflow reads once; a user's own values win."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(max(1, round(timeout_s))))
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    for name in ("alembic", "mlflow", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)


def one_at_a_time(uri: str) -> AbstractContextManager[None]:
    """For a SQLite file: mlflow makes its tables step by step, and fails when another process does so at the same time."""
    folder = Path(uri.removeprefix("sqlite:///")).absolute().parent
    return folder_held(folder) if uri.startswith("sqlite:///") and folder.is_dir() else nullcontext()


def _try_sqlite(settings: TrackingConfig) -> None:
    """Raise sqlite3.Error for a file that cannot be opened, written or locked: mlflow would try again for minutes."""
    path = Path(settings.uri.removeprefix("sqlite:///"))
    if settings.uri.startswith("sqlite:///") and path.absolute().parent.is_dir():
        with closing(sqlite3.connect(path, timeout=settings.timeout_s)) as database:
            database.execute("BEGIN IMMEDIATE")
            database.rollback()


def connect(settings: TrackingConfig) -> "MlflowClient | None":
    """A client, or None with a warning when the server does not answer, or the database not open, within `timeout_s`."""
    parts = urlsplit(settings.uri)
    try:
        if parts.scheme in ("http", "https"):
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), timeout=settings.timeout_s).close()
        _try_sqlite(settings)
        import mlflow

        mlflow.set_tracking_uri(settings.uri)
        mlflow.set_registry_uri(settings.uri)
        return mlflow.MlflowClient(settings.uri, settings.uri)
    except Exception as error:  # any kind: the address, the database driver and mlflow each raise their own
        log.warning(
            "MLflow at %s cannot be reached (%s); the run goes on without tracking", settings.uri, error
        )
        return None
