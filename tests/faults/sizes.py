"""How much the suite of faults tries: a little in `make test`, all of it in `make faults`."""

import os

# The share of all that is tried; a little of it where nothing is said.
SHARE = os.environ.get("EWC_FT_FAULTS")


def times(little: int, all_of_it: int) -> range:
    """Numbers, one for each case; they are its seed too."""
    return range(little if SHARE is None else max(1, round(all_of_it * float(SHARE))))
