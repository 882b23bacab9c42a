"""Contract tests of a transport whose other end does not read, sends rubbish, or leaves and comes back."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable

import pytest

from weight_update.errors import FormatError, LinkClosedError, SyncTimeoutError
from weight_update.testing.chunks import (
    LONG,
    SPOILERS,
    Ends,
    Spoilt,
    assert_same,
    drain,
    exchange,
    greet,
    hello,
    in_background,
    must_be_closed,
    must_end,
    must_raise_closed,
    must_receive,
    number,
    send_all,
    send_unread,
    update_of,
)
from weight_update.transports import TransportBackend


class TransportFailureTests:
    """The tests of :class:`TransportContract` in which something fails; it describes the attributes."""

    moment: float = 0.1
    slack: float = 1.0
    limit = LONG
    unread = 500
    token = "token"

    def make_successor(self) -> TransportBackend:
        """Return another receiver's end of the link, for a worker that takes the place of the first."""
        pytest.skip("make_successor() is not written: only one process can hold the receiver's end")

    # -- an end that does not read -------------------------------------------------------------------

    def test_send_does_not_wait_beyond_its_timeout(self, ends: Ends) -> None:
        """Chunks for an end that does not read are kept for it, or ``send_chunk`` raises in time."""
        sender, receiver = ends
        seconds: list[float] = []
        errors: list[BaseException] = []
        thread = in_background(send_unread, sender, self.unread, self.moment, seconds, errors)
        call = f"send_chunk(chunk, {self.moment:g}) to an end that does not read"
        must_end(thread, self.limit, f"{call} still waits, beyond its timeout")
        slowest = max(seconds)  # of many calls, while the machine may be busy
        assert slowest < self.moment + 4 * self.slack, f"{call} took {slowest:.3f} s"
        assert [type(error) for error in errors] in ([], [SyncTimeoutError]), (
            f"{call} raised another error than SyncTimeoutError"
        )
        for version in range(len(seconds) - len(errors)):
            got = must_receive(receiver, self.limit).header["version"]
            assert got == version, (
                "a chunk for which send_chunk() returned was lost, or chunks changed places"
            )
        if errors:
            must_be_closed(receiver, self.limit, "send_chunk() of the other end raised SyncTimeoutError")
        else:
            assert receiver.recv_chunk(self.moment) is None, "a chunk arrived that was not sent"

    def test_send_never_blocks_where_that_is_declared(self, ends: Ends) -> None:
        """A sender that declares ``send_never_blocks`` does not wait for an end that does not read."""
        sender, receiver = ends
        if not sender.capabilities.send_never_blocks:
            pytest.skip("send_chunk() may wait for the other end")
        thread = in_background(send_all, sender, [number(version) for version in range(10)], None)
        problem = (
            "send_chunk() of a short chunk waits for the other end, though send_never_blocks is declared"
        )
        must_end(thread, 4 * self.slack, problem)
        for version in range(10):
            got = must_receive(receiver, self.limit).header
            assert got == {"version": version}, "another chunk came than the one that was sent"

    @pytest.mark.parametrize("leave", ["sender closes", "sender disconnects", "receiver closes"])
    def test_leaving_wakes_whoever_sends(self, ends: Ends, leave: str) -> None:
        """A thread in ``send_chunk(None)`` does not go on waiting for an end that has left."""
        end = ends[leave.startswith("receiver")]
        seconds: list[float] = []
        errors: list[BaseException] = []
        thread = in_background(send_unread, ends[0], self.unread, None, seconds, errors)
        sent = -1
        while thread.is_alive() and sent < len(seconds):  # until it waits for the other end
            sent = len(seconds)
            time.sleep(self.moment)
        end.close() if leave.endswith("closes") else end.disconnect()
        must_end(thread, self.limit, f"send_chunk(chunk, None) still waits after the {leave}")
        assert [type(error) for error in errors] in ([], [LinkClosedError]), (
            f"send_chunk(chunk, None) raised another error than LinkClosedError after the {leave}"
        )

    # -- rubbish -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("receiving", [0, 1], ids=["sender", "receiver"])
    @pytest.mark.parametrize("spoil", SPOILERS)
    def test_rubbish_is_refused(self, ends: Ends, spoil: Callable[[bytes], bytes], receiving: int) -> None:
        """Bytes that are not a frame raise FormatError, and the worker can join again after it.

        The bytes come from ``WeightChunk.encode`` and ``encode_head``. A transport that calls neither has
        nothing to check.
        """
        sender, receiver = ends
        ends[1 - receiving].send_chunk(number(1, spoil), self.limit)
        try:
            got = ends[receiving].recv_chunk(self.limit)
        except FormatError:
            if sender.capabilities.allows_rejoin:
                ends[receiving].disconnect()
                if receiving == 0:
                    must_be_closed(receiver, self.limit, "disconnect() of the other end")
                self.join_again(sender, receiver)
        else:
            assert isinstance(got, Spoilt), "rubbish was taken for a chunk, or was dropped silently"

    def test_half_a_frame_is_no_chunk(self, ends: Ends) -> None:
        """A frame of which only the beginning arrived before the sender left is not returned."""
        sender, receiver = ends
        sender.send_chunk(number(1, lambda head: head[:-3]), self.limit)
        sender.close()
        try:
            got = receiver.recv_chunk(self.limit)
        except (FormatError, LinkClosedError):
            return
        assert isinstance(got, Spoilt), "half a frame was taken for a chunk, or was dropped silently"

    # -- joining again -------------------------------------------------------------------------------

    @pytest.mark.parametrize("leaving", [0, 1], ids=["sender", "receiver"])
    def test_disconnect_and_join_again(self, ends: Ends, leaving: int) -> None:
        """The other end learns of ``disconnect``; where the link allows it, the worker joins again."""
        sender, receiver = ends
        for _ in range(2):
            ends[leaving].send_chunk(number(8), self.limit)
            ends[leaving].disconnect()
            got = must_receive(ends[1 - leaving], self.limit)
            assert got.header == {"version": 8}, "another chunk came than the one sent before disconnect()"
            must_be_closed(ends[1 - leaving], self.limit, "disconnect() of the other end")
            if not sender.capabilities.allows_rejoin:
                return
            got_none = sender.recv_chunk(self.moment) is None
            assert got_none, "a chunk came from a worker that has left, and has not joined again"
            self.join_again(sender, receiver)

    def test_connections_release_their_descriptors(self, ends: Ends) -> None:
        """A worker that leaves and joins again and again leaves no files, pipes or sockets open."""
        sender, receiver = ends
        if not sender.capabilities.allows_rejoin:
            pytest.skip("a worker joins only once")
        if not os.path.isdir("/proc/self/fd"):
            pytest.skip("only Linux lists descriptors there")
        counts = []
        for rounds in (12, 13):  # caches fill in the first rounds
            for _ in range(rounds):
                receiver.disconnect()
                must_be_closed(sender, self.limit, "disconnect() of the receiver")
                self.join_again(sender, receiver)
            gc.collect()
            counts.append(len(os.listdir("/proc/self/fd")))
        grown = counts[1] - counts[0]
        assert grown < 10, (
            f"{grown} descriptors stayed open after 13 connections: close() releases everything"
        )

    def test_restart_keeps_a_link_that_works(self, ends: Ends) -> None:
        """``restart`` does not give up a connection that was just made."""
        sender, receiver = ends
        receiver.restart(self.limit)
        got = exchange(sender, receiver, number(2), self.limit)
        assert got.header == {"version": 2}, "another chunk came after restart() than the one that was sent"

    def test_a_successor_takes_over(self, ends: Ends) -> None:
        """A worker that joins in the place of another gets the link, and the former learns of it."""
        sender, former = ends
        successor = self.make_successor()
        try:
            self.join_again(sender, successor)
            must_be_closed(former, self.limit, "another worker has taken the place of this one")
            got = exchange(sender, successor, number(3), self.limit)
            assert got.header == {"version": 3}, "another chunk came to the successor than the one sent"
        finally:
            successor.close()

    def test_close_wakes_a_sender_that_waits_for_a_worker(self, ends: Ends) -> None:
        """A thread in ``recv_chunk(None)`` that waits for the next connection ends when the end is closed."""
        sender, receiver = ends
        receiver.disconnect()
        must_be_closed(sender, self.limit, "disconnect() of the receiver")
        errors: list[BaseException] = []
        thread = in_background(drain, sender, None, errors)
        time.sleep(self.moment)
        assert thread.is_alive() or not sender.capabilities.allows_rejoin, (
            "recv_chunk(None) of the sender ended instead of waiting for the worker to join again"
        )
        sender.close()
        must_end(thread, self.limit, "recv_chunk(None) of the sender still waits after its close()")
        assert [type(error) for error in errors] == [LinkClosedError], (
            "recv_chunk(None) of the sender did not raise LinkClosedError after its close()"
        )
        must_raise_closed("a worker waits for a sender that was closed", self._join_in_vain, receiver)

    def _join_in_vain(self, receiver: TransportBackend) -> None:
        receiver.restart(self.limit)
        receiver.send_chunk(hello(self.token), self.limit)
        drain(receiver, self.limit)

    def join_again(self, sender: TransportBackend, receiver: TransportBackend) -> None:
        """Join by a HELLO as a worker does after an error, and exchange a payload."""
        greet(sender, receiver, self.token, self.limit, again=True)
        sent = update_of(sender, 1000)
        assert_same(exchange(sender, receiver, sent, self.limit), sent)
