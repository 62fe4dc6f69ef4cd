"""What concerns several ranks: slices, agreement, broadcast, FSDP1 and FSDP2."""
