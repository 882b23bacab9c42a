"""The patch encoding: only the elements that changed since a version that the worker has."""
