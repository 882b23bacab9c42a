"""Updates as rows of a CSV file."""

from __future__ import annotations

import csv
import os

from weight_update.errors import Closing, undo_on_error
from weight_update.observers.files import open_file
from weight_update.report import STAGES, Event, SyncReport

COLUMNS = (
    *("began", "version", "encoding", "compression", "dense_bytes", "wire_bytes", "changed_fraction"),
    *STAGES,
    *("slowest_apply", "longest_stall", "workers", "failures"),
)
_LONGEST_HEADER = 1000  # characters of a first line that are read


class CsvObserver(Closing):
    """Observer that appends a row to a CSV file for each update.

    The columns of the stages (``extract``, ``convert``, ``encode``, ``send`` and ``ack``), ``slowest_apply``
    and ``longest_stall`` are in seconds. They are empty where an update has no such time. ``workers`` is the
    number of workers that applied the update, and ``failures`` the number of workers that failed. Every row
    is flushed. Events of workers and the policy lag are not written.

    Args:
        path: the file. Rows are appended to a file that exists.

    Raises:
        OSError: the file cannot be opened; the message names the fix.
        ValueError: the file has other columns.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._file = open_file(path, "a+", newline="", encoding="utf-8", errors="replace")
        self._rows = csv.writer(self._file)
        with undo_on_error(self._file.close):
            if size := os.fstat(self._file.fileno()).st_size:
                self._check_header()
                if os.pread(self._file.fileno(), 1, size - 1) != b"\n":  # a full disk cut the last row off
                    self._rows.writerow(())
            else:
                self._write(*COLUMNS)

    def _check_header(self) -> None:
        self._file.seek(0)
        line = self._file.readline(_LONGEST_HEADER).replace("\0", "?")  # an error of csv in Python 3.10
        header = next(csv.reader([line]))
        if header != list(COLUMNS):
            raise ValueError(
                f"{self._file.name} has other columns: {header}; remove the file, or choose another path"
            )

    def __call__(self, news: Event) -> None:
        """Append a row for an update, unless the file is closed."""
        if self._file.closed or not isinstance(news, SyncReport):
            return
        self._write(
            *(news.began, news.version, news.encoding, news.compression),
            *(news.dense_bytes, news.wire_bytes, news.changed_fraction),
            *(news.seconds.get(stage) for stage in STAGES),
            max(news.apply_seconds.values(), default=None),
            max(news.stall_seconds.values(), default=None),
            *(len(news.apply_seconds), len(news.failures)),
        )

    def _write(self, *row: object) -> None:
        self._rows.writerow(row)
        self._file.flush()

    def close(self) -> None:
        """Close the file. Updates that come later are ignored."""
        self._file.close()
