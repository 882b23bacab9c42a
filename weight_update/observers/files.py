"""Files that observers write."""

from __future__ import annotations

import os
from typing import IO, Any

from weight_update.errors import undo_on_error


def open_file(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """Open the file of the argument ``path`` as ``open()`` does, but refuse pipes and terminals at once.

    Raises:
        OSError: the file cannot be opened, or is a pipe or a terminal; the message names the fix.
    """
    where = os.fspath(path)
    try:
        file = open(where, mode, opener=_open_at_once, **options)  # noqa: SIM115 - the observer closes it
        with undo_on_error(file.close):
            file.tell()  # pipes and terminals fail
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write path={where!r} ({error.strerror or error}); give path= a file in a "
            "directory that exists and that this process may write to, not a pipe or a terminal",
        ) from None
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o666)
