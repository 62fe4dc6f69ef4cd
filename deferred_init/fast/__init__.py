"""A counter-based generator: values that depend on seed, name and place alone."""
