"""Transport over TCP between hosts, with a TCPStore for rendezvous."""
