import contextlib

import interpreters
import pytest
from collector_parts import OPTIONS
from torch import multiprocessing as torch_multiprocessing

OF_ONE_HOST = ("Collector", "MultiCollector", "MultiSyncCollector", "MultiAsyncCollector")
DEFAULTS = {"frames_per_batch": 8, "total_frames": -1, **OPTIONS}


@pytest.fixture(autouse=True, scope="package")
def quick_workers():
    """Workers are forked from a server that has imported everything: 0.1 s each instead of 5 s."""
    before = torch_multiprocessing.get_start_method(allow_none=True)
    interpreters.use_template_for_forkserver()
    torch_multiprocessing.set_start_method("forkserver", force=True)
    yield
    torch_multiprocessing.set_start_method(before, force=True)


@pytest.fixture
def made():
    """Make collectors by their class, or by a function, and arguments; shut them down when the test ends."""
    with contextlib.ExitStack() as stack:

        def make(cls, *args, **options):
            defaults = DEFAULTS if getattr(cls, "__name__", "") in OF_ONE_HOST else {}
            collector = cls(*args, **{**defaults, **options})
            stack.callback(collector.shutdown)
            return collector

        yield make
