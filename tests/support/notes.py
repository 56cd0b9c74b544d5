"""A progress that remembers what it is told."""

from ewc_finetune.progress import Silent


class Notes(Silent):
    """Keeps the notes, in `lines`."""

    def __init__(self):
        self.lines = []

    def note(self, message):
        self.lines.append(message)

    def about(self, words):
        return [line for line in self.lines if words in line]

    def __str__(self):
        return "\n".join(self.lines)
