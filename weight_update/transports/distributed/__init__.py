"""Transport over torch.distributed, with a TCPStore for rendezvous."""
