"""The penalty, and rehearsal, in the loops that people train in: each with an extra of its own."""
