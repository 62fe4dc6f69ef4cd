"""Who knows the values (initializers) and who knows the representation (allocators)."""
