"""Ways into other people's training scripts; each file needs its own package."""
