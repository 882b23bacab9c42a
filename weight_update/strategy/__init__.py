"""Strategies: how weights leave a model and how they enter one."""
