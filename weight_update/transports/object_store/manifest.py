"""The manifest of an object store: the versions that readers can get, signed with the token.

::

    latest.json                             the manifest
    <run>/<version>-<8 hex digits>.frame    a frame of a version, as docs/wire_format.rst describes it
    <run>/welcome-<8 hex digits>.frame      the frame that describes the weights
    <run>/...frame.1, ...frame.2 and so on  the rest of a frame of more than 16 MiB, 16 MiB each
    <run>/manifest-<8 hex digits>.frame     in directories, the manifest while it is written

A run is one sender, from its ``connect()`` on; its name has 32 hexadecimal digits. Objects are written once,
under new names, and before the manifest that names them. All other objects are left alone.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from weight_update.errors import FormatError, JoinRefusedError
from weight_update.transports.object_store.store import ObjectStore
from weight_update.wire.schema import MAX_PAYLOAD_BYTES

MANIFEST_NAME = "latest.json"
OBJECT_NAME = re.compile(r"([0-9a-f]{32}/(?:\d+|welcome|manifest)-[0-9a-f]{8}\.frame)(\.[1-9]\d*)?")
"""Names of the objects that a publisher may remove: the name of a frame, perhaps the number of a piece."""
_FORMAT = "weight_update.object_store/2"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class StoredFrame:
    """A frame in the store.

    Attributes:
        name: name of its first object.
        nbytes: size of all objects in bytes.
        sha256: SHA-256 digest of the joined SHA-256 digests of the objects, as hexadecimal digits.
    """

    name: str
    nbytes: int
    sha256: str

    def __post_init__(self) -> None:
        found = OBJECT_NAME.fullmatch(self.name)
        if found is None or found[2] or not 0 < self.nbytes <= MAX_PAYLOAD_BYTES:
            raise ValueError(f"no frame has the name {self.name!r:.60} and {self.nbytes} bytes")


@dataclass(frozen=True)
class StoredVersion:
    """The frames of one version: all weights, or the changes since the version before it in the manifest."""

    version: int
    frames: tuple[StoredFrame, ...]

    @classmethod
    def of(cls, version: int, frames: Sequence[Mapping[str, Any]]) -> StoredVersion:
        """Return a version from its fields; raise ValueError or TypeError if they are no version's."""
        if not frames:
            raise ValueError(f"version {version} has no frames")
        return cls(int(version), tuple(StoredFrame(**one) for one in frames))


@dataclass(frozen=True)
class StoreManifest:
    """The versions that readers can get.

    Attributes:
        run: name of the sender's run.
        serial: number of the manifest in its run.
        welcome: the frame that describes the weights.
        chain: a version with all weights, and the versions that change it, in ascending order.
    """

    run: str
    serial: int
    welcome: StoredFrame
    chain: tuple[StoredVersion, ...]

    @property
    def newest(self) -> int:
        """Number of the newest version."""
        return self.chain[-1].version

    def encode(self, token: str) -> bytes:
        """Return the manifest as JSON, signed with ``token``."""
        text = json.dumps(asdict(self))
        return json.dumps({"format": _FORMAT, "hmac": _sign(text, token), "manifest": text}).encode()

    @classmethod
    def decode(cls, raw: bytes, token: str) -> StoreManifest:
        """Read what :meth:`encode` wrote.

        Raises:
            FormatError: the bytes are not a manifest, or only a part of one.
            JoinRefusedError: the manifest was signed with another token.
        """
        try:
            found = json.loads(raw)
            text, shown = found["manifest"], found["hmac"].encode()
            if found["format"] != _FORMAT:
                raise ValueError(f"its format is {found['format']!r:.60}")
            if not hmac.compare_digest(shown, _sign(text, token).encode()):
                raise JoinRefusedError(
                    "the versions were published with another token: give both sides the same token=, or set "
                    "WEIGHT_UPDATE_TOKEN"
                )
            fields = json.loads(text)
            chain = tuple(StoredVersion.of(**one) for one in fields["chain"])
            if not chain:
                raise ValueError("it has no versions")
            return cls(fields["run"], int(fields["serial"]), StoredFrame(**fields["welcome"]), chain)
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise FormatError(f"{MANIFEST_NAME} is not a manifest of weight_update: {error}") from None


def _sign(text: str, token: str) -> str:
    return hmac.new(token.encode(), text.encode(), hashlib.sha256).hexdigest()


def read_manifest(store: ObjectStore, token: str, deadline: float | None) -> StoreManifest | None:
    """Return the manifest, or None if nothing was published yet; raise as ``read`` and ``decode``."""
    try:
        return StoreManifest.decode(store.read(MANIFEST_NAME, _MAX_BYTES, deadline), token)
    except FileNotFoundError:
        return None
