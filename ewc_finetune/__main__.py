"""`python -m ewc_finetune` is `ewc-ft`."""

from ewc_finetune.cli import main

if __name__ == "__main__":
    main(prog_name="ewc-ft")
