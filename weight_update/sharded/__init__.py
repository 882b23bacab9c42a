"""Trainers whose model is sharded over several ranks: all ranks make the same calls, one of them sends."""
