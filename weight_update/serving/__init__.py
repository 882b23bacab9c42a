"""Plugins of inference servers, by which their workers are receivers."""
