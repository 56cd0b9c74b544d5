"""`python -m ewc_finetune` is `ewc-ft`."""

from ewc_finetune.storage import signals


def main() -> None:
    """Run the command line, whose signals are taken care of before anything else is imported."""
    signals.run(_command_line)


def _command_line() -> None:
    from ewc_finetune.cli import main as commands

    commands(prog_name="ewc-ft")


if __name__ == "__main__":
    main()
