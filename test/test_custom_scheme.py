"""The transport and the scheme of ``examples/custom_scheme.py`` keep the library's contracts."""

from pathlib import Path
from typing import Any

import pytest

from examples.custom_scheme import FileScheme, FileTransport
from weight_update import WeightSyncScheme
from weight_update.testing import SchemeContract, TransportContract
from weight_update.testing.transports import Ends


class TestFileTransport(TransportContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_ends(self) -> Ends:
        return FileTransport(self.directory, "sender"), FileTransport(self.directory, "receiver")


@pytest.mark.smoke
class TestFileScheme(SchemeContract):
    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.directory = tmp_path

    def make_scheme(self, **options: Any) -> WeightSyncScheme:
        return FileScheme(self.directory, **options)
