"""Files that observers write."""

from __future__ import annotations

import os
from typing import IO, Any


def open_file(path: str | os.PathLike[str], mode: str, **options: Any) -> IO[Any]:
    """Open the file of the argument ``path`` as ``open()`` does.

    Raises:
        OSError: the file cannot be opened; the message names the fix.
    """
    try:
        return open(path, mode, **options)
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write path={os.fspath(path)!r} ({error.strerror}); give path= a file in a directory "
            "that exists and that this process may write to",
        ) from None
