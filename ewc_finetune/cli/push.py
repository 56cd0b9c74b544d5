"""`ewc-ft push`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.declared import options_from
from ewc_finetune.cli.options import printing_options
from ewc_finetune.commands.push_options import PushOptions

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Put ANCHOR on the Hugging Face Hub, with a model card.")
@click.argument("anchor", type=click.Path())
@click.argument("repository", metavar="ORG/NAME")
@options_from(PushOptions)
@printing_options
def push(anchor: str, repository: str, printer: Printer, **options: Any) -> None:
    """Put ANCHOR on the Hugging Face Hub, with a model card that says what it is and how to use it.

    The repository is made unless it is there. Of a card that people have edited only our own section is renewed, and
    where nothing has changed there is no commit. Log in first: hf auth login, or HF_TOKEN.
    """
    from ewc_finetune.commands.push import push as run
    from ewc_finetune.errors import few

    done = run(anchor, repository, progress=printer, **options)
    parts = [what + few(names) for what, names in (("", done.changed), ("removed ", done.removed)) if names]
    printer.note(f"{done.url}: {'; '.join(parts)}" if parts else "nothing has changed: no commit")
    printer.note(f"{done.place}: sha256 {done.digest}")
    printer.result(done.to_json())
