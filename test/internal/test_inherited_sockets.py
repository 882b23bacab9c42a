"""Sockets that forked children close, found while other threads open and close descriptors."""

import socket
import threading
import time

from weight_update.transports.inherited_sockets import InheritedSockets, listening_sockets, packed_address


def test_other_threads_close_descriptors_meanwhile():
    with socket.create_server(("127.0.0.1", 0)) as server:
        sockets = InheritedSockets(packed_address(server.getsockname()))
        done = threading.Event()

        def scan():
            while not done.is_set():
                listening_sockets()  # copies each descriptor for a moment

        threads = [threading.Thread(target=scan) for _ in range(2)]
        for thread in threads:
            thread.start()
        try:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                sockets.keep_from_programs()
        finally:
            done.set()
            for thread in threads:
                thread.join()
            sockets.forget()
        assert not server.get_inheritable()
        assert packed_address(server.getsockname()) in listening_sockets()
