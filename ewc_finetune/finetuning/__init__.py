"""A fine-tune: its options, plan, run and record."""
