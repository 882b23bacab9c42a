"""Transport for Ray actors."""
