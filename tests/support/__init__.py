"""What several test modules share; no test module imports another."""

from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
