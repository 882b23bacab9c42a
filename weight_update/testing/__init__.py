"""Contract tests for your own parts: subclass one, implement the method that builds the part, run pytest.

::

    from weight_update.testing import SchemeContract, TransportContract

    class TestMyTransport(TransportContract):
        def make_ends(self):
            return my_link()                    # sender's end, receiver's end

    class TestMyScheme(SchemeContract):
        def make_scheme(self, **options):
            return MyScheme(**options)

This package needs pytest, which the extra ``test`` installs; nothing else of ``weight_update`` imports it.
"""

import pkgutil

try:
    import pytest
except ImportError as _error:
    raise ImportError(
        f'cannot import pytest ({_error}): pip install "weight-update[test]"', name="pytest"
    ) from _error
else:  # a failed assertion then shows its values
    pytest.register_assert_rewrite(
        *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    )

from weight_update.testing.apart import Apart, ApartInTwos
from weight_update.testing.chunks import Ends, greet
from weight_update.testing.compressions import CompressionContract
from weight_update.testing.encodings import EncodingContract
from weight_update.testing.engines import EngineContract
from weight_update.testing.late_joiners import LateJoinerContract
from weight_update.testing.models import Zoo, fingerprint, mlp, random_bits, scramble
from weight_update.testing.schemes import SchemeContract
from weight_update.testing.strategies import StrategyContract
from weight_update.testing.transports import TransportContract
from weight_update.testing.worker_processes import WorkerProcesses
from weight_update.testing.workers import Body, Worker, WorkerDiedError

__all__ = [
    "Apart",
    "ApartInTwos",
    "Body",
    "CompressionContract",
    "EncodingContract",
    "Ends",
    "EngineContract",
    "LateJoinerContract",
    "SchemeContract",
    "StrategyContract",
    "TransportContract",
    "Worker",
    "WorkerDiedError",
    "WorkerProcesses",
    "Zoo",
    "fingerprint",
    "greet",
    "mlp",
    "random_bits",
    "scramble",
]
