"""Scheme for workers anywhere: versions travel through an object store."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from typing_extensions import Unpack

from weight_update.arguments import given_token, require_seconds, whole_number
from weight_update.encodings.patch.encoding import sends_all_at_first
from weight_update.errors import FormatError, JoinRefusedError
from weight_update.schemes.base import End, WeightSyncScheme
from weight_update.schemes.options import SchemeOptions, SenderOptions, takes_options_of
from weight_update.schemes.sender_side import SenderSide
from weight_update.sender.handle import SendHandle
from weight_update.strategy.strategy import WeightStrategy
from weight_update.transports.base import TransportBackend
from weight_update.transports.object_store.manifest import MANIFEST_NAME, read_manifest
from weight_update.transports.object_store.publisher import ObjectStorePublisher
from weight_update.transports.object_store.reader import ObjectStoreReader
from weight_update.transports.object_store.store import ObjectStore
from weight_update.transports.socket_stream import deadline_of


class ObjectStoreWeightSyncScheme(WeightSyncScheme):
    """Scheme whose sender publishes versions in an object store, where any number of workers read them.

    Sender and workers never connect to each other: they may be in different clusters, come and go, and need
    only access to the store. ``send()`` returns once the version is in the store; each worker looks for a new
    one every ``poll_seconds``. For the sender, the store is its one worker, with index 0.

    ::

        # trainer
        patches = WeightStrategy(encoding="patch")
        scheme = ObjectStoreWeightSyncScheme("s3://bucket/run", patches, token=secret)
        scheme.init_on_sender(model=policy)
        scheme.connect()                      # publishes the first version
        scheme.send()                         # publishes the next one

        # worker, anywhere
        scheme = ObjectStoreWeightSyncScheme("s3://bucket/run", token=secret)
        scheme.init_on_receiver(model=policy)
        scheme.connect()                      # waits for a version; policy has the newest now

    With the patch encoding, at most ``most_changes`` versions in a row are published as changes, and then one
    with all weights. A worker that joins reads the last one with all weights and all changes since, and then
    only changes. Versions that no worker needs any more are removed.

    A trainer that is restarted goes on counting versions where the last one ended. Workers stay connected
    while no trainer lives: ``receive()`` waits for the next one, and ends when the worker calls
    ``shutdown()``.

    All other arguments are those of :class:`WeightSyncScheme`.

    Args:
        url: URL that fsspec knows, such as ``"s3://bucket/run"`` (install s3fs) or ``"gs://bucket/run"``
            (install gcsfs), or the path of a directory, which is created; for one model. Only one sender may
            publish there.
        strategy: as in :class:`WeightSyncScheme`. Workers with narrower dtypes convert what they read; give
            ``convert=cast(torch.bfloat16)`` to publish narrow weights.
        storage_options: arguments of fsspec's file system, such as ``{"endpoint_url": ...}``.
        token: secret that signs versions, the same for sender and workers; workers accept no others. None
            takes the environment's ``WEIGHT_UPDATE_TOKEN``, or makes one, which only a pickled scheme has.
        most_changes: number of versions in a row that may be published as changes, at least 0.
        poll_seconds: seconds between two looks for a new version.

    Raises:
        ImportError: the package for the protocol of the URL is not installed; the message names it.
        ValueError: the URL is empty, fsspec does not know its protocol, or it chains a cache; or the encoding
            does not send all weights at first.
    """

    @takes_options_of(WeightSyncScheme.__init__)
    def __init__(
        self,
        url: str | os.PathLike[str],
        strategy: str | WeightStrategy = "tensordict",
        sync: bool = True,
        *,
        storage_options: Mapping[str, Any] | None = None,
        token: str | None = None,
        most_changes: int = 20,
        poll_seconds: float = 1.0,
        **options: Unpack[SchemeOptions],
    ) -> None:
        super().__init__(strategy, sync, **options)
        if not isinstance(url, (str, os.PathLike)):
            raise TypeError(f"url is a string, such as 's3://bucket/run', got {url!r:.60}")
        self.url: str = _absolute(os.fspath(url))
        self.storage_options: dict[str, Any] = dict(storage_options or {})
        self.token = given_token(token) or self.token
        self.most_changes: int = whole_number(most_changes, "most_changes", least=0)
        self.poll_seconds: float = require_seconds("poll_seconds", poll_seconds)
        if not sends_all_at_first(self.strategy.encoding):
            raise ValueError("workers read their first weights from the store: leave init_sync as it is")
        self._store()  # raises for a URL that cannot be used

    def _store(self) -> ObjectStore:
        return ObjectStore(self.url, self.storage_options, self.timeout)

    def create_transport(self, *, worker_idx: int, end: End) -> TransportBackend:
        if end == "sender":
            return ObjectStorePublisher(self._store(), self.token, self.most_changes)
        return ObjectStoreReader(self._store(), self.token, self.poll_seconds)

    @takes_options_of(WeightSyncScheme.init_on_sender)
    def init_on_sender(self, **options: Unpack[SenderOptions]) -> None:
        """Initialize the scheme in the trainer, as :meth:`WeightSyncScheme.init_on_sender` does.

        The number of workers, their devices and their multiprocessing context are ignored: the store is the
        only worker.

        Raises:
            ValueError: the arguments contradict each other; or give weights for each worker.
        """
        for name in ("params_map", "device_map_fn"):
            if options.get(name) is not None:
                raise ValueError(f"all workers read the same weights: give no {name}")
        options["num_workers"], options["devices"], options["ctx"] = 1, None, None
        super().init_on_sender(**options)

    @takes_options_of(WeightSyncScheme.init_on_receiver)
    def init_on_receiver(self, **options: Any) -> None:
        """Initialize the scheme in a worker, as :meth:`WeightSyncScheme.init_on_receiver` does.

        The index of the worker is used in messages only; it is 0 by default.
        """
        super().init_on_receiver(**options)
        self.worker_idx = self.worker_idx or 0

    def _connect_sender(self, side: SenderSide, weights: Any, limit: float) -> None:
        continue_counting = functools.partial(self._continue_counting, limit)
        # processes of workers say nothing about the store, which is the sender's worker
        self.last_report = side.connect(weights, limit, None, continue_counting)
        self._process.observers.tell(self.last_report)

    def _continue_counting(self, limit: float) -> None:
        """Number versions after those that the store has."""
        try:
            with closing(self._store()) as store:
                present = read_manifest(store, self.token, deadline_of(limit))
        except (FormatError, JoinRefusedError) as error:
            raise type(error)(
                f"{error}. To start anew, remove {self.url}/{MANIFEST_NAME}, or use another URL"
            ) from error
        if present is not None:
            self.continue_from(present.newest + 1)

    def _publish(self, weights: Any, worker_ids: Any, group_commit: str | None = None) -> SendHandle:
        del worker_ids  # all workers read the same versions
        return super()._publish(weights, None, group_commit)


def _absolute(url: str) -> str:
    """Return a URL that means the same in processes with other working directories."""
    if not url:
        raise ValueError("url is empty; give one such as 's3://bucket/run', or the path of a directory")
    first, *chain = url.split("::")
    begins = "://" in first or "/" not in first
    ends = not chain or "://" in chain[-1] or chain[-1].startswith("/")
    if chain and not (begins and ends):  # fsspec would leave a part of the name out
        raise ValueError(
            f"url={url!r} has '::', by which fsspec chains file systems, as in 'zip://run::s3://bucket/run.zip'"
            "; give such a chain, or a name without '::'"
        )
    return url if "://" in url or chain else os.path.abspath(os.path.expanduser(url))
