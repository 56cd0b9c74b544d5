"""The headings under which a command's help lists its options; a dataclass of options says its own as `GROUP`."""

from enum import Enum


class Group(Enum):
    """A heading, in the order in which help has them."""

    MODEL = "Model and data"
    GRID = "Runs"
    PENALTY = "Penalty"
    MENDING = "Mending"
    REHEARSAL = "Rehearsal"
    TRAINING = "Training"
    CURVATURE = "Curvature"
    ANCHOR_SIZE = "Size of the anchor"
    HUB = "On the Hub"
    SCORES = "Scores and log"
    COMPUTING = "Computing"
    OUTPUT = "Output"
    MESSAGES = "Messages"
