"""Too little shared memory is found at initialization, and the message says what to do."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults_tools import Crew, Stripes, fill, hold, let_go, version_of, wait_version

from weight_update import NotEnoughMemoryError
from weight_update.transports import slots


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[str]:
    """A tmpfs of 1 MiB."""
    where = str(tmp_path / "small")
    Path(where).mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where], capture_output=True, text=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"this machine does not let us mount a tmpfs: {mounted.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", where], check=True)


def one_megabyte() -> Stripes:
    return Stripes(4, 1 << 16)


def half_a_megabyte() -> Stripes:
    return Stripes(4, 25_000)  # two slots fit into 1 MiB, three do not


def test_a_mount_that_is_too_small(kind, crew: Crew, small_mount: str) -> None:
    scheme = crew.scheme(kind, directory=small_mount)
    with pytest.raises(NotEnoughMemoryError, match=r"1\.0 MB") as caught:
        scheme.init_on_sender(model=one_megabyte(), num_workers=1)
    assert small_mount in str(caught.value)
    assert "remount,size=" in str(caught.value)
    assert isinstance(caught.value, MemoryError)
    assert not scheme.initialized_on_sender
    use(crew, scheme)


def use(crew: Crew, scheme) -> None:
    """The scheme works with a model that fits."""
    model = half_a_megabyte()
    (worker,) = crew.launch(scheme, model, half_a_megabyte, 1)
    for version in range(1, 4):
        scheme.send(fill(model, version))
    assert worker.call(version_of) == 3


def test_no_room_for_a_third_slot(kind, crew: Crew, small_mount: str) -> None:
    """Two slots are all that is promised: asynchronous sends wait for one instead of failing."""
    scheme, model = crew.scheme(kind, directory=small_mount, timeout=20.0), half_a_megabyte()
    (worker,) = crew.launch(scheme, model, half_a_megabyte, 1)
    worker.call(hold)
    scheme.send_async(fill(model, 1))
    worker.begin(_let_go_soon)
    scheme.send_async(fill(model, 2))
    worker.result()
    assert worker.call(wait_version, 2, 10.0) == 2


def _let_go_soon(me) -> None:
    import time

    time.sleep(0.5)
    let_go(me)


def test_too_little_anonymous_memory(kind, crew: Crew, monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = crew.scheme(kind)
    with monkeypatch.context() as patch:
        patch.setattr(slots, "available_memory", lambda: 900_000)
        with pytest.raises(NotEnoughMemoryError, match=r"1\.0 MB .* 0\.9 MB"):
            scheme.init_on_sender(model=one_megabyte(), num_workers=1)
        assert not scheme.initialized_on_sender
    use(crew, scheme)


def test_a_directory_that_does_not_exist(kind, crew: Crew) -> None:
    scheme = crew.scheme(kind, directory="/nowhere")
    with pytest.raises(OSError, match="/nowhere"):
        scheme.init_on_sender(model=half_a_megabyte(), num_workers=1)
    scheme.directory = None
    use(crew, scheme)
