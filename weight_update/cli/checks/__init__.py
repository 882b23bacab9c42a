"""The checks of ``weight-update doctor``."""
