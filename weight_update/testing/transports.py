"""Contract tests of a transport."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from weight_update.errors import LinkClosedError, SchemaMismatchError, SyncTimeoutError
from weight_update.strategy.strategy import WeightStrategy
from weight_update.testing.chunks import (
    TEXT,
    Ends,
    assert_same,
    drain,
    exchange,
    in_background,
    must_be_closed,
    must_end,
    must_raise_closed,
    must_receive,
    number,
    send_all,
    update_of,
)
from weight_update.testing.models import Zoo, fingerprint, mlp, scramble
from weight_update.testing.transport_failures import TransportFailureTests
from weight_update.transports import TransportBackend
from weight_update.wire.frames import Kind, WeightChunk

SIZES = (0, 1, 63, 64, 65, (1 << 20) + 3, (5 << 20) + 1)


class TransportContract(TransportFailureTests):
    """Tests of one transport; subclass it and write :meth:`make_ends`.

    The limits of time suit a medium that carries a small chunk within milliseconds. Raise them for a slower
    one, such as a network file system or an object store.

    Attributes:
        moment: seconds that a test waits to see that nothing happens, and the timeout of calls that are to
            time out.
        slack: seconds that a call may take beyond its timeout, and that a small chunk may take to arrive.
        limit: seconds after which a missing event counts as a failure.
        unread: number of chunks that are sent while the other end does not read.
        token: token that workers show in their HELLO.
    """

    def make_ends(self) -> Ends:
        """Return a new link with both ends in this process: the sender's end and the receiver's.

        Ends that meet by a HELLO call :func:`greet` here.
        """
        raise NotImplementedError(
            f"write {type(self).__name__}.make_ends(self): it returns the sender's and the receiver's end of "
            "a new link"
        )

    @pytest.fixture
    def ends(self) -> Iterator[Ends]:
        """Return a link that is closed after the test."""
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
        assert_same(exchange(sender, receiver, sent, self.limit), sent)

    def test_headers_carry_any_text(self, ends: Ends) -> None:
        """Headers arrive as they were, both ways."""
        chunk = WeightChunk(Kind.REFUSED, {"reason": TEXT, "problems": [TEXT, {TEXT: [None, True, -1.5]}]})
        for source, target in (ends, reversed(ends)):
            got = exchange(source, target, chunk, self.limit)
            assert got.header == chunk.header, "a header with any text in it changed on the way"

    def test_order_is_kept(self, ends: Ends) -> None:
        """Chunks arrive in the order in which they were sent, each once, both ways at the same time."""
        sender, receiver = ends
        numbers = [number(version) for version in range(100)]
        threads = [in_background(send_all, end, numbers, self.limit) for end in ends]
        for end in (receiver, sender):
            got = [must_receive(end, self.limit).header["version"] for _ in range(100)]
            assert got == list(range(100)), "chunks arrived in another order, twice or not at all"
        for thread in threads:
            must_end(thread, self.limit, "all chunks have arrived, but send_chunk() has not returned")
        for end in ends:
            assert end.recv_chunk(0) is None, "a chunk arrived that was not sent, or was received before"

    def test_order_of_large_and_small_chunks(self, ends: Ends) -> None:
        """Small chunks do not overtake large ones; a call that does not wait loses no part of a chunk."""
        sender, receiver = ends
        sent: list[WeightChunk] = []
        for version, size in enumerate((SIZES[-1], 1 << 20, 100_000)):
            sent += [update_of(sender, size, version), number(version)]
        thread = in_background(send_all, sender, sent, self.limit)
        end, got = time.monotonic() + self.limit, list[WeightChunk]()
        while len(got) < len(sent):
            assert time.monotonic() < end, (
                "a chunk that was sent did not come; recv_chunk() keeps the part of a chunk that arrived "
                "before its timeout"
            )
            if (chunk := receiver.recv_chunk(0)) is not None:
                got.append(chunk)
        must_end(thread, self.limit, "all chunks have arrived, but send_chunk() has not returned")
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)

    def test_payloads_of_consecutive_chunks_are_kept_apart(self, ends: Ends) -> None:
        """A later chunk does not change the payload of an earlier one."""
        sender, receiver = ends
        sent = [update_of(sender, size, seed) for seed, size in enumerate((100, 100, 4096) * 3)]
        got = [exchange(sender, receiver, chunk, self.limit) for chunk in sent]
        for one, other in zip(got, sent, strict=True):
            assert_same(one, other)

    @pytest.mark.parametrize("size", [1000, SIZES[-1]])
    def test_payload_may_be_reused_after_sending(self, ends: Ends, size: int) -> None:
        """Once ``send_chunk`` has returned, the sender may write into a payload that is not shared."""
        sender, receiver = ends
        if receiver.capabilities.shares_memory:
            pytest.skip("receivers read the sender's memory")
        chunk = update_of(sender, size)
        assert chunk.payload is not None
        sent = replace(chunk, payload=chunk.payload.clone())

        def send_and_reuse(payload: torch.Tensor) -> None:
            sender.send_chunk(chunk, self.limit)
            payload.zero_()

        thread = in_background(send_and_reuse, chunk.payload)
        thread.join(self.moment)  # a transport whose send_chunk() waits for a reader returns later
        assert_same(must_receive(receiver, self.limit), sent)
        must_end(thread, self.limit, "the chunk has arrived, but send_chunk() has not returned")

    @pytest.mark.parametrize("size", [1000, SIZES[-1]])
    def test_payload_goes_where_the_receiver_says(self, ends: Ends, size: int) -> None:
        """``allocate`` is used, unless the transport shares memory."""
        sender, receiver = ends
        lent: list[torch.Tensor] = []

        def allocate(nbytes: int) -> torch.Tensor:
            lent.append(torch.empty(nbytes, dtype=torch.uint8))
            return lent[-1]

        sent = update_of(sender, size)
        thread = in_background(sender.send_chunk, sent, self.limit)
        got = receiver.recv_chunk(self.limit, allocate)
        must_end(thread, self.limit, "the chunk has arrived, but send_chunk() has not returned")
        assert got is not None, "recv_chunk() with allocate= returned None: the chunk did not come"
        assert got.payload is not None, "recv_chunk() with allocate= lost the payload"
        assert_same(got, sent)
        if not receiver.capabilities.shares_memory:
            assert [lend.data_ptr() for lend in lent] == [got.payload.data_ptr()], (
                "recv_chunk() called allocate() not once, or returned a payload in other memory"
            )

    # -- timeouts ------------------------------------------------------------------------------------

    @pytest.mark.parametrize("moments", [0, 1, 3])
    def test_nothing_arrives_in_time(self, ends: Ends, moments: int) -> None:
        """``recv_chunk`` returns None after ``timeout`` seconds; 0 does not wait."""
        timeout = moments * self.moment
        for end in ends:
            start = time.monotonic()
            assert end.recv_chunk(timeout) is None, "a chunk arrived that was not sent"
            seconds = time.monotonic() - start
            assert 0.9 * timeout <= seconds < timeout + self.slack, (
                f"recv_chunk({timeout:g}) returned None after {seconds:.3f} s, not at its timeout"
            )

    def test_late_chunk_is_not_lost(self, ends: Ends) -> None:
        """A chunk that comes after a timeout is received by the next call."""
        sender, receiver = ends
        assert receiver.recv_chunk(self.moment) is None, "a chunk arrived that was not sent"
        sent = update_of(sender, 65)
        assert_same(exchange(sender, receiver, sent, self.limit), sent)

    def test_waiting_end_is_woken_by_a_chunk(self, ends: Ends) -> None:
        """A receiver that waits gets the chunk soon after it was sent, not at its timeout."""
        sender, receiver = ends
        got: list[float] = []

        def wait() -> None:
            must_receive(receiver, self.limit)
            got.append(time.monotonic())

        thread = in_background(wait)
        time.sleep(self.moment)
        sent_at = time.monotonic()
        sender.send_chunk(number(1), self.limit)
        must_end(thread, self.limit, "recv_chunk() still waits, though a chunk was sent to it")
        assert got[0] - sent_at < self.slack, (
            "recv_chunk() that waited returned long after the chunk was sent"
        )

    @pytest.mark.parametrize("waiting", [0, 1], ids=["sender", "receiver"])
    def test_waiting_end_can_send(self, ends: Ends, waiting: int) -> None:
        """An end sends while another thread waits in its ``recv_chunk``."""
        end, other = ends[waiting], ends[1 - waiting]
        receiving = in_background(drain, end, None, [])
        time.sleep(self.moment)
        sending = in_background(end.send_chunk, number(5), self.limit)
        assert other.recv_chunk(self.limit) is not None, (
            "a chunk did not come: send_chunk() waited for a recv_chunk() of the same end; it may not"
        )
        must_end(sending, self.limit, "the chunk has arrived, but send_chunk() has not returned")
        end.close()
        must_end(receiving, self.limit, "recv_chunk(None) still waits after close() of this end")

    # -- the end -------------------------------------------------------------------------------------

    def test_a_last_word_can_be_read(self, ends: Ends) -> None:
        """Chunks sent before the end can be read, even after ``send_chunk`` has failed."""
        self.read_last_word(ends[0], ends[1], "the receiver's close()")

    def test_a_last_word_to_the_receiver_can_be_read(self, ends: Ends) -> None:
        """The same at the other end: a busy worker gets the update that was sent before the sender ended."""
        self.read_last_word(ends[1], ends[0], "the sender's close()")

    def read_last_word(self, end: TransportBackend, leaving: TransportBackend, event: str) -> None:
        """Read what ``leaving`` sent before ``event``, its close."""
        leaving.send_chunk(number(7), self.limit)
        leaving.close()
        with contextlib.suppress(LinkClosedError):  # links through a queue learn of the end when they read
            for _ in range(3):
                end.send_chunk(number(1), self.limit)
        last = must_receive(end, self.limit).header
        assert last == {"version": 7}, "another chunk came than the one that was sent before close()"
        must_be_closed(end, self.limit, event)

    @pytest.mark.parametrize("closing", [0, 1], ids=["sender", "receiver"])
    def test_both_ends_learn_of_close(self, ends: Ends, closing: int) -> None:
        """After ``close`` both ends raise LinkClosedError; a second ``close`` does nothing."""
        ends[closing].close()
        ends[closing].close()
        closed, other = ends[closing], ends[1 - closing]
        must_raise_closed("recv_chunk() returned after close() of its end", closed.recv_chunk, self.moment)
        problem = "send_chunk() returned after close() of its end"
        must_raise_closed(problem, closed.send_chunk, number(0), self.moment)
        must_be_closed(other, self.limit, "close() of the other end")
        problem = "send_chunk() returned after recv_chunk() of its end had raised LinkClosedError"
        must_raise_closed(problem, other.send_chunk, number(0), self.moment)

    @pytest.mark.parametrize("closing", [0, 1], ids=["sender", "receiver"])
    @pytest.mark.parametrize("waiting", [0, 1], ids=["sender waits", "receiver waits"])
    def test_close_wakes_whoever_waits(self, ends: Ends, closing: int, waiting: int) -> None:
        """A thread in ``recv_chunk(None)`` ends with LinkClosedError when either end is closed."""
        errors: list[BaseException] = []
        thread = in_background(drain, ends[waiting], None, errors)
        time.sleep(self.moment)
        ends[closing].close()
        whose = "this end" if waiting == closing else "the other end"
        must_end(thread, self.limit, f"recv_chunk(None) still waits after close() of {whose}")
        assert [type(error) for error in errors] == [LinkClosedError], (
            f"recv_chunk(None) did not raise LinkClosedError after close() of {whose}"
        )

    # -- whole sets of weights -----------------------------------------------------------------------

    @pytest.mark.parametrize("extract_as", ["tensordict", "state_dict"])
    def test_weights_without_a_scheme(self, ends: Ends, extract_as: str) -> None:
        """``send_weights`` and ``receive_weights`` carry everything, extra state too."""
        sender, receiver = ends
        strategy = WeightStrategy(extract_as)  # type: ignore[arg-type]  # a name of the two
        source, destination = Zoo(1), Zoo(2)
        thread = in_background(lambda: sender.send_weights(source, strategy=strategy, timeout=self.limit))
        got = receiver.receive_weights(self.limit, model=destination, strategy=strategy)
        must_end(thread, self.limit, "the weights have arrived, but send_weights() has not returned")
        expected = fingerprint(source, strategy)
        assert fingerprint(destination, strategy) == expected, (
            "receive_weights(model=...) wrote other weights"
        )
        assert fingerprint(got, strategy) == expected, (
            "receive_weights() returned other weights than were sent"
        )

    def test_weights_wait_for_a_slow_receiver(self, ends: Ends) -> None:
        """The weights of ``send_weights`` stay available, and do not follow later changes of the model."""
        sender, receiver = ends
        source = mlp(1)
        expected = fingerprint(source)
        sender.send_weights(source, timeout=self.limit)
        scramble(source, 2)
        assert fingerprint(receiver.receive_weights(self.limit)) == expected, (
            "receive_weights() returned other weights than the model had in send_weights()"
        )

    def test_no_weights_in_time(self, ends: Ends) -> None:
        """``receive_weights`` returns None on timeout."""
        assert ends[1].receive_weights(self.moment) is None, "weights arrived that were not sent"

    def test_weights_that_stop_halfway(self, ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
        """``receive_weights`` keeps its timeout for the whole set, and loses no part of a late one."""
        sender, receiver = ends
        chunks: list[WeightChunk] = []
        with monkeypatch.context() as patch:
            patch.setattr(sender, "send_chunk", lambda chunk, timeout: chunks.append(chunk))
            sender.send_weights(source := mlp(1), timeout=self.limit)
        first, *rest = chunks
        sender.send_chunk(first, self.limit)
        with pytest.raises(SyncTimeoutError, match="only a part of the weights"):
            receiver.receive_weights(self.moment)
        for chunk in rest:
            sender.send_chunk(chunk, self.limit)
        assert fingerprint(receiver.receive_weights(self.limit)) == fingerprint(source), (
            "receive_weights() returned other weights than were sent"
        )

    def test_weights_that_do_not_fit(self, ends: Ends) -> None:
        """All destinations are checked before the first is written."""
        sender, receiver = ends
        good, bad = {"a": torch.zeros(3)}, {"a": torch.zeros(4)}
        sender.send_weights({"a": torch.ones(3)}, timeout=self.limit)
        with pytest.raises(SchemaMismatchError, match="a: float32"):
            receiver.receive_weights(self.limit, weights=good, model=torch.nn.ParameterDict(bad))
        assert good["a"].tolist() == [0, 0, 0], (
            "weights were written, though another destination does not fit"
        )

    def test_setup_methods(self, ends: Ends) -> None:
        """The pair of set-up methods carries first weights."""
        sender, receiver = ends
        source, destination = mlp(1), mlp(2)
        sender.setup_connection_and_weights_on_sender(weights=source)
        receiver.setup_connection_and_weights_on_receiver(worker_idx=0, model=destination, timeout=self.limit)
        assert fingerprint(destination) == fingerprint(source), "the receiver's set-up wrote other weights"
