"""The contents of files, verified, as the documents that ``weight-update inspect`` shows."""
