"""The contract of every transport."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from weight_update.errors import LinkClosedError, SchemaMismatchError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.testing.models import Zoo, fingerprint, mlp, random_bits, scramble
from weight_update.transports import TransportBackend
from weight_update.wire.frames import Kind, WeightChunk

__all__ = ["TransportContract", "greet"]

Ends = tuple[TransportBackend, TransportBackend]
SIZES = (0, 1, 63, 64, 65, (1 << 20) + 3)
MOMENT, LONG = 0.1, 20.0
TEXT = 'naïve 漢字 🤖 "quoted" \\ \n \x00'


class TransportContract:
    """Tests of one transport; subclass it and write :meth:`make_ends`."""

    def make_ends(self) -> Ends:
        """Return the sender's end and the receiver's end of a new link in this process.

        Ends that meet by a HELLO call :func:`greet` here.
        """
        raise NotImplementedError

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        """Yield a link that is closed after the test."""
        sender, receiver = self.make_ends()
        yield sender, receiver
        receiver.close()
        sender.close()

    # -- chunks --------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", SIZES)
    def test_payload_arrives_whole(self, ends: Ends, size: int) -> None:
        """Payloads of awkward sizes arrive bit for bit."""
        sender, receiver = ends
        sent = update_of(sender, size)
        assert_same(exchange(sender, receiver, sent), sent)

    def test_headers_carry_any_text(self, ends: Ends) -> None:
        """Headers arrive as they were, both ways."""
        sender, receiver = ends
        chunk = WeightChunk(Kind.REFUSED, {"reason": TEXT, "problems": [TEXT, {TEXT: [None, True, -1.5]}]})
        assert exchange(sender, receiver, chunk).header == chunk.header
        assert exchange(receiver, sender, chunk).header == chunk.header

    def test_order_is_kept(self, ends: Ends) -> None:
        """Chunks arrive in the order in which they were sent, each once, both ways at the same time."""
        sender, receiver = ends
        threads = [in_background(send_numbers, end) for end in ends]
        for end in (receiver, sender):
            got = [must_receive(end).header["version"] for _ in range(100)]
            assert got == list(range(100))
        for thread in threads:
            thread.join(LONG)
        assert sender.recv_chunk(0) is None
        assert receiver.recv_chunk(0) is None

    def test_payloads_of_consecutive_chunks_are_kept_apart(self, ends: Ends) -> None:
        """A later chunk does not change the payload of an earlier one."""
        sender, receiver = ends
        sent = [update_of(sender, size) for size in (100, 100, 4096)]
        got = [exchange(sender, receiver, chunk) for chunk in sent]
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)

    def test_payload_goes_where_the_receiver_says(self, ends: Ends) -> None:
        """``allocate`` is used, unless the transport shares memory."""
        sender, receiver = ends
        lent: list[torch.Tensor] = []

        def allocate(nbytes: int) -> torch.Tensor:
            lent.append(torch.empty(nbytes, dtype=torch.uint8))
            return lent[-1]

        sent = update_of(sender, 1000)
        sender.send_chunk(sent, LONG)
        got = receiver.recv_chunk(LONG, allocate)
        assert got is not None
        assert got.payload is not None
        assert_same(got, sent)
        if not receiver.shares_memory:
            assert [lend.data_ptr() for lend in lent] == [got.payload.data_ptr()]

    # -- timeouts ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("timeout", [0, MOMENT, 3 * MOMENT])
    def test_nothing_arrives_in_time(self, ends: Ends, timeout: float) -> None:
        """``recv_chunk`` gives None after ``timeout`` seconds; 0 only looks."""
        for end in ends:
            start = time.monotonic()
            assert end.recv_chunk(timeout) is None
            assert 0.9 * timeout <= time.monotonic() - start < timeout + 1.0

    def test_late_chunk_is_not_lost(self, ends: Ends) -> None:
        """A chunk that comes after a timeout is received by the next call."""
        sender, receiver = ends
        assert receiver.recv_chunk(MOMENT) is None
        sent = update_of(sender, 65)
        assert_same(exchange(sender, receiver, sent), sent)

    def test_waiting_end_is_woken_by_a_chunk(self, ends: Ends) -> None:
        """A receiver that waits gets the chunk soon after it was sent, not at its timeout."""
        sender, receiver = ends
        got: list[float] = []

        def wait() -> None:
            must_receive(receiver)
            got.append(time.monotonic())

        thread = in_background(wait)
        time.sleep(MOMENT)
        sent_at = time.monotonic()
        sender.send_chunk(number(1), LONG)
        thread.join(LONG)
        assert got[0] - sent_at < 1.0

    # -- the end -------------------------------------------------------------------------------------

    def test_a_last_word_can_be_read(self, ends: Ends) -> None:
        """Also after something could not be sent any more."""
        sender, receiver = ends
        receiver.send_chunk(number(7), LONG)
        receiver.close()
        with contextlib.suppress(LinkClosedError):  # links through a queue learn of the end when they read
            for _ in range(3):
                sender.send_chunk(number(1), LONG)
        assert must_receive(sender).header == {"version": 7}
        with pytest.raises(LinkClosedError):
            drain(sender)

    @pytest.mark.parametrize("closing", [0, 1], ids=["sender", "receiver"])
    def test_both_ends_learn_of_close(self, ends: Ends, closing: int) -> None:
        """After ``close`` both ends raise LinkClosedError; a second ``close`` does nothing."""
        ends[closing].close()
        ends[closing].close()
        with pytest.raises(LinkClosedError):
            ends[closing].recv_chunk(MOMENT)
        with pytest.raises(LinkClosedError):
            ends[closing].send_chunk(number(0), MOMENT)
        with pytest.raises(LinkClosedError):
            drain(ends[1 - closing])

    @pytest.mark.parametrize("closing", [0, 1], ids=["sender", "receiver"])
    @pytest.mark.parametrize("waiting", [0, 1], ids=["sender waits", "receiver waits"])
    def test_close_wakes_whoever_waits(self, ends: Ends, closing: int, waiting: int) -> None:
        """A thread in ``recv_chunk(None)`` ends with LinkClosedError when either end is closed."""
        errors: list[BaseException] = []
        thread = in_background(drain, ends[waiting], errors)
        time.sleep(MOMENT)
        ends[closing].close()
        thread.join(LONG)
        assert not thread.is_alive()
        assert [type(error) for error in errors] == [LinkClosedError]

    # -- whole sets of weights -----------------------------------------------------------------------

    @pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
    def test_weights_without_a_scheme(self, ends: Ends, extract_as: str) -> None:
        """``send_weights`` and ``receive_weights`` carry everything, extra state too."""
        sender, receiver = ends
        strategy = WeightStrategy(extract_as)  # type: ignore[arg-type]  # a name of the two
        source, destination = Zoo(1), Zoo(2)
        thread = in_background(lambda: sender.send_weights(source, strategy=strategy, timeout=LONG))
        got = receiver.receive_weights(LONG, model=destination, strategy=strategy)
        thread.join(LONG)
        assert fingerprint(destination, strategy) == fingerprint(source, strategy)
        assert fingerprint(got, strategy) == fingerprint(source, strategy)

    def test_weights_wait_for_a_slow_receiver(self, ends: Ends) -> None:
        """Weights passed to ``send_weights`` stay available and do not change with the model."""
        sender, receiver = ends
        source = mlp(1)
        expected = fingerprint(source)
        sender.send_weights(source, timeout=LONG)
        scramble(source, 2)
        assert fingerprint(receiver.receive_weights(LONG)) == expected

    def test_no_weights_in_time(self, ends: Ends) -> None:
        """``receive_weights`` gives None on timeout."""
        assert ends[1].receive_weights(MOMENT) is None

    def test_weights_that_do_not_fit(self, ends: Ends) -> None:
        """All destinations are checked before the first is written."""
        sender, receiver = ends
        good, bad = {"a": torch.zeros(3)}, {"a": torch.zeros(4)}
        sender.send_weights({"a": torch.ones(3)}, timeout=LONG)
        with pytest.raises(SchemaMismatchError, match="a: float32"):
            receiver.receive_weights(LONG, weights=good, model=torch.nn.ParameterDict(bad))
        assert good["a"].tolist() == [0, 0, 0]

    def test_setup_methods(self, ends: Ends) -> None:
        """The pair of set-up methods carries first weights."""
        sender, receiver = ends
        source, destination = mlp(1), mlp(2)
        sender.setup_connection_and_weights_on_sender(weights=source)
        receiver.setup_connection_and_weights_on_receiver(worker_idx=0, model=destination, timeout=LONG)
        assert fingerprint(destination) == fingerprint(source)


def hello(token: str = "token", **header: Any) -> WeightChunk:
    """Return the first chunk of worker 0."""
    who = {"token": token, "worker": 0, "pid": os.getpid()}
    return WeightChunk(Kind.HELLO, {**who, "version": None, "schema": None, "error": None, **header})


def greet(sender: TransportBackend, receiver: TransportBackend, token: str = "token") -> None:
    """Begin as a scheme does: the receiver says hello, and the sender answers."""
    receiver.restart(LONG)
    receiver.send_chunk(hello(token), LONG)
    assert must_receive(sender).header == hello(token).header
    assert exchange(sender, receiver, number(0)).header == {"version": 0}


def update_of(end: TransportBackend, size: int, seed: int = 0) -> WeightChunk:
    """Return an UPDATE chunk with random bytes in memory from ``end``."""
    payload = end.allocate(size)
    payload.tensor.copy_(random_bits((size,), torch.uint8, size + seed))
    header = {
        "version": 3,
        "schema": "0" * 64,
        "encoding": TEXT,
        "index": 0,
        "count": 1,
        "commit": True,
        "group": None,
        "base": None,
        "extra": {TEXT: {"$dict": {}}},
    }
    chunk = WeightChunk(Kind.UPDATE, header, payload.tensor)
    _kept.append(payload)  # the sender of a scheme holds its buffers as long as receivers may read them
    del _kept[:-10]
    return chunk


_kept: list[object] = []


def number(version: int) -> WeightChunk:
    """Return a chunk without a payload."""
    return WeightChunk(Kind.COMMIT, {"version": version})


def send_numbers(end: TransportBackend) -> None:
    """Send a hundred numbered chunks."""
    for version in range(100):
        end.send_chunk(number(version), LONG)


def exchange(source: TransportBackend, target: TransportBackend, chunk: WeightChunk) -> WeightChunk:
    """Send from another thread, so that a transport whose ``send_chunk`` waits for a reader works too."""
    thread = in_background(source.send_chunk, chunk, LONG)
    got = must_receive(target)
    thread.join(LONG)
    return got


def must_receive(end: TransportBackend) -> WeightChunk:
    """Return the next chunk; fail the test if none comes."""
    chunk = end.recv_chunk(LONG)
    assert chunk is not None, "no chunk came"
    return chunk


def drain(end: TransportBackend, errors: list[BaseException] | None = None) -> None:
    """Receive until the link raises."""
    try:
        while end.recv_chunk(None if errors is not None else LONG) is not None:
            pass
    except BaseException as error:
        if errors is None:
            raise
        errors.append(error)


def assert_same(got: WeightChunk, sent: WeightChunk) -> None:
    """Compare two chunks; an empty payload may arrive as None."""
    assert (got.kind, got.header) == (sent.kind, sent.header)
    assert got.payload_bytes == sent.payload_bytes
    if sent.payload is not None and got.payload is not None:
        assert torch.equal(got.payload, sent.payload)


def in_background(action: Callable[..., object], *args: object) -> threading.Thread:
    """Run ``action`` in a thread."""
    thread = threading.Thread(target=action, args=args, daemon=True)
    thread.start()
    return thread
