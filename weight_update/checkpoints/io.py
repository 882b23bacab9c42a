"""Files that are there completely or not at all, also after a crash or a power cut.

Large files are written and digested in one pass, by several threads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from weight_update.errors import NotEnoughSpaceError, undo_on_error
from weight_update.progress import Progress
from weight_update.threads import in_threads, threads_for

PART = ".part"
"""Suffix of files that are being written."""

DIGEST = "sha256/4MiB"
"""Name of the digest: SHA-256 of the SHA-256 of each 4 MiB. Processors have instructions for it."""

_PIECE = 4 << 20
_MOST_THREADS = 8  # more do not make a disk faster


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor; OSError for all others, without waiting."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return fd


def read_regular(path: Path) -> bytes:
    """Return the contents of a regular file; see :func:`open_regular`."""
    with open(open_regular(path), "rb") as file:
        return file.read()


def write_beside(part: Path, path: Path, data: Sequence[memoryview]) -> str:
    """Write 1-D bytes to ``part``, wait until the disk has them, and rename it to ``path`` beside it.

    Return their digest. ``part`` is removed if anything fails.
    """
    mode = stat.S_IMODE(path.parent.stat().st_mode) & 0o666  # only for users who may read the directory
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    with undo_on_error(lambda: part.unlink(missing_ok=True)):
        with open(fd, "wb", 0), Progress("writing a checkpoint", sum(map(len, data))) as progress:
            result = _write(fd, data, progress)
            os.fsync(fd)
        os.replace(part, path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
    return result


@contextlib.contextmanager
def naming_free_space(directory: Path, needed: int) -> Iterator[None]:
    """Raise NotEnoughSpaceError, with the bytes ``needed``, if the disk is full or a limit is reached."""
    try:
        yield
    except OSError as error:
        remedy = (
            "free some space, use another directory, or give a CheckpointStore of your own a smaller keep="
        )
        reasons = {
            errno.ENOSPC: ("the disk is full", remedy),
            errno.EDQUOT: ("a quota is used up", remedy),
            errno.EFBIG: ("files may not be that large", "raise ulimit -f, or use another file system"),
        }
        if error.errno not in reasons:
            raise
        reason, remedy = reasons[error.errno]
        stats = os.statvfs(directory)
        free = stats.f_bavail * stats.f_frsize
        message = (
            f"a checkpoint needs {needed / 1e6:.1f} MB ({needed} bytes), and {reason}; "
            f"{free / 1e6:.1f} MB ({free} bytes) are free; {remedy}"
        )
        raise NotEnoughSpaceError(error.errno, message, str(directory)) from None


def _write(fd: int, parts: Sequence[memoryview], progress: Progress) -> str:
    """Write 1-D bytes, part after part, to the beginning of a file; return their digest."""

    def put(piece: tuple[int, list[memoryview]]) -> bytes:
        place, views = piece
        data = views[0] if len(views) == 1 else memoryview(b"".join(views))
        left = data
        while len(left):
            done = os.pwrite(fd, left, place)
            left, place = left[done:], place + done
        found = hashlib.sha256(data).digest()
        progress.advance(len(data))
        return found

    return _digest_of(put, list(_cut(parts)), sum(map(len, parts)))


def digest(fd: int, nbytes: int) -> str:
    """Return the digest of the first ``nbytes`` bytes of a file.

    A file that cannot be read raises OSError. A mapping would end the process instead.
    """

    def get(place: int) -> bytes:
        data = os.pread(fd, min(_PIECE, nbytes - place), place)
        found = hashlib.sha256(data).digest()
        progress.advance(len(data))
        return found

    with Progress("reading a checkpoint", nbytes) as progress:
        return _digest_of(get, range(0, nbytes, _PIECE), nbytes)


def _digest_of(work: Callable[[Any], bytes], pieces: Sequence[Any], nbytes: int) -> str:
    """Return the digest of a file from those of its pieces, which ``work`` returns in several threads."""
    digests = in_threads(work, pieces, min(threads_for(nbytes), _MOST_THREADS))
    return f"{DIGEST}:{hashlib.sha256(b''.join(digests)).hexdigest()}"


def _cut(parts: Sequence[memoryview]) -> Iterator[tuple[int, list[memoryview]]]:
    """Yield pieces of 4 MiB, the last one shorter: the offset in the file, and views of the bytes."""
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
