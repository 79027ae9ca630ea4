"""Which worker answers which rows: the kernel's record locks on one file, a byte for each block of rows.

The kernel gives a dead process's locks up, so a killed worker leaves nothing that has to be cleaned.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.corpus.shards import write_message

#: The byte that every worker has a shared lock on, behind those of all blocks.
_PRESENCE = 2**40


class Claims:
    """The claims of this process on blocks 0, 1, ... of the corpus's rows."""

    def __init__(self, path: Path) -> None:
        """Open, or make, the file that the locks are on.

        Raises:
            ValueError: it cannot be made.
        """
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH, 1, _PRESENCE)
            os.write(self._descriptor, b".")  # the file is as long as workers have come
        except OSError as error:
            raise ValueError(write_message(path, error)) from error
        self._was_alone, self._num_came = False, 0

    def take(self, block: int) -> bool:
        """Claim a block; False where another process has it."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, block)
        except OSError:
            return False
        return True

    def release(self, block: int) -> None:
        """Give a block up: its rows are on disk."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, block)

    def wait(self, block: int) -> None:
        """Wait until no other process has the block. Only for who holds none: two holders could wait for each other."""
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, 1, block)
        self.release(block)

    def others_may_have_written(self) -> bool:
        """Whether another worker was there at any time since the last call; True in the first call.

        Looking for their shards costs more the more there are, and most corpora have one worker.
        """
        num_came, is_alone = os.fstat(self._descriptor).st_size, self._is_alone()
        nobody = self._was_alone and is_alone and num_came == self._num_came
        self._was_alone, self._num_came = is_alone, num_came
        return not nobody

    def _is_alone(self) -> bool:
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _PRESENCE)
        except OSError:
            return False
        fcntl.lockf(self._descriptor, fcntl.LOCK_SH, 1, _PRESENCE)
        return True

    def close(self) -> None:
        """Give everything up."""
        os.close(self._descriptor)


@contextmanager
def only_one(path: Path) -> Iterator[None]:
    """One process at a time inside the block; others wait.

    Raises:
        ValueError: the file cannot be made.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(write_message(path, error)) from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
