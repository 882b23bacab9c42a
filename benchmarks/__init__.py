"""Measurements of this library beside what a user would have otherwise; see ``docs/benchmarks.rst``."""
