"""Send groups: the workers that take the same bytes of an update."""
