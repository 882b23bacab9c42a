"""Relay: one copy of each update to every other host, shared there by its workers."""
