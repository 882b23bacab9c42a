"""Versions of weights in a directory. A crash leaves complete versions only."""
