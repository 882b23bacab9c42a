"""Join requests: what a worker puts into the store, and what the sender's listener takes out of it.

A join request is signed like every message, and consists of the number of bytes of a JSON object
(``<I``), that object, and the frame of a HELLO without its token.
"""

from __future__ import annotations

import json
import re
import struct

from weight_update.errors import FormatError
from weight_update.wire.frames import Kind, WeightChunk

JOIN_QUEUE = "door"
"""Name of the queue that takes join requests."""
_LINK = re.compile("[0-9a-f]{32}")
_LARGEST_INFO = 4096  # bytes of a join request beside its HELLO


def join_request(link: str, host: str, hello: WeightChunk) -> bytes:
    """Return a join request for the connection named ``link``, of a worker on ``host``."""
    info = json.dumps({"link": link, "host": host}).encode()
    return struct.pack("<I", len(info)) + info + hello.with_token("").encode()


def read_join_request(message: bytes, token: str) -> tuple[str, str, WeightChunk]:
    """Return a connection's name, the worker's host, and its HELLO with the token that signed the message.

    Raises:
        FormatError: the message is not a join request.
    """
    (size,) = struct.unpack_from("<I", message) if len(message) >= 4 else (0,)
    if not 0 < size <= min(_LARGEST_INFO, len(message) - 4):
        raise FormatError(f"a join request does not begin with {size} bytes of {len(message)}")
    try:
        info = json.loads(message[4 : 4 + size])
        link, host = info["link"], info["host"]
        hello = WeightChunk.decode(message[4 + size :])
        worker, pid = hello.header["worker"], hello.header["pid"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"not a join request ({type(error).__name__})") from None
    kinds = [(link, str), (host, str), (worker, int), (pid, int)]
    if hello.kind is not Kind.HELLO or not all(isinstance(value, kind) for value, kind in kinds):
        raise FormatError("not a join request")
    if not _LINK.fullmatch(link):
        raise FormatError("a join request names its connection by 32 hexadecimal digits")
    return link, host, hello.with_token(token)
