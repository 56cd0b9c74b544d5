"""The public functions, one for each command."""
