"""Versions of weights in a directory, written so that a crash leaves whole versions only."""
