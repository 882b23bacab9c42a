"""Large files by several threads: written and digested in one pass, and digested when read."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

from weight_update.encodings.patch.threads import in_threads, threads_for

__all__ = ["DIGEST", "digest", "write"]

DIGEST = "sha256/4MiB"
"""Name of the digest: SHA-256 of the SHA-256 of each 4 MiB. Processors have instructions for it."""

_PIECE = 4 << 20
_MOST_THREADS = 8  # more do not make a disk faster


def write(fd: int, parts: Sequence[memoryview]) -> tuple[int, str]:
    """Write ``parts``, one after the other, to the begin of a file.

    Args:
        fd: file descriptor, open for writing.
        parts: each 1-D bytes.

    Returns:
        number of bytes and their digest.

    Raises:
        OSError: as ``os.pwrite``.
    """
    nbytes = sum(len(part) for part in parts)

    def put(piece: tuple[int, list[memoryview]]) -> bytes:
        place, views = piece
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        _write_all(fd, data, place)
        return hashlib.sha256(data).digest()

    return nbytes, _joined(in_threads(put, list(_cut(parts)), _threads(nbytes)))


def digest(fd: int, nbytes: int) -> str:
    """The digest of the first ``nbytes`` bytes of a file.

    Raises:
        OSError: it cannot be read. A mapping would end the process instead.
    """

    def get(place: int) -> bytes:
        return hashlib.sha256(os.pread(fd, min(_PIECE, nbytes - place), place)).digest()

    return _joined(in_threads(get, range(0, nbytes, _PIECE), _threads(nbytes)))


def _threads(nbytes: int) -> int:
    return min(threads_for(nbytes), _MOST_THREADS)


def _joined(digests: Sequence[bytes]) -> str:
    return f"{DIGEST}:{hashlib.sha256(b''.join(digests)).hexdigest()}"


def _write_all(fd: int, data: memoryview, place: int) -> None:
    while len(data):
        done = os.pwrite(fd, data, place)
        data, place = data[done:], place + done


def _cut(parts: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Pieces of 4 MiB, only the last one shorter: where each begins in the file, and what it is made of."""
    place, views, room = 0, list[memoryview](), _PIECE
    for part in parts:
        while len(part):
            views.append(part[:room])
            part, room = part[room:], room - len(views[-1])
            if not room:
                yield place, views
                place, views, room = place + _PIECE, [], _PIECE
    if views:
        yield place, views
