"""Transport over TCP between hosts, with a rendezvous at one known port."""
