"""The measurements of ``weight-update bench``."""
