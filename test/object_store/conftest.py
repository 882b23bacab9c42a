from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Event

import fsspec
import pytest
from object_store_parts import Before, Ends, Faults, FaultyFileSystem

from weight_update.transports.object_store import publisher, stored_frames


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "store")


@pytest.fixture
def ends(url: str) -> Iterator[Ends]:
    with closing(Ends(url)) as made:
        yield made


@pytest.fixture
def faults(ends: Ends, url: str, monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Return a function that sets the faults of the store, which is tried again soon after one."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    monkeypatch.setattr(publisher, "_FIRST_PAUSE", 0.2)
    ends.url = f"faulty://{url}"

    def set_faults(before: Before = FaultyFileSystem.before) -> None:
        monkeypatch.setattr(FaultyFileSystem, "before", staticmethod(before))

    return set_faults


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> int:
    """Let objects have 64 bytes at most, and return that number."""
    monkeypatch.setattr(stored_frames, "PIECE_BYTES", 64)
    return 64


@pytest.fixture
def awake() -> Iterator[Event]:
    """Yield an event for requests to wait for; it is set at the end of the test."""
    event = Event()
    yield event
    event.set()
