"""Files: whole or not at all, checked, and read a tensor at a time."""
