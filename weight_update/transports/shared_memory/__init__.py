"""Transport for workers on the same host: slots in shared memory, and a Unix socket for signals."""
