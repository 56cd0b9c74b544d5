"""How much the suite of faults does: a little in `make test`, all in `make faults`."""

import os

FACTOR = float(os.environ.get("EWC_FT_FAULTS", "1"))


def times(small: int, seed: int = 0) -> range:
    """Numbers to seed cases with: so many in `make test`, and as many times that as the factor says."""
    return range(seed, seed + max(1, round(small * FACTOR)))
