"""The penalty, and rehearsal, in the loops that people train in: each of its own extra, imported when it is asked for."""
