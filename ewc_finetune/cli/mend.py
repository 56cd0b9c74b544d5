"""`ewc-ft mend`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ewc_finetune.cli.command import Command
from ewc_finetune.cli.declared import options_from
from ewc_finetune.cli.options import printing_options
from ewc_finetune.mending.options import MendOptions

if TYPE_CHECKING:
    from ewc_finetune.cli.printer import Printer


@click.command(cls=Command, short_help="Bring back, without training, what MODEL has forgotten.")
@click.argument("model", type=click.Path())
@options_from(MendOptions)
@printing_options
def mend(model: str, data: str, output: str | None, printer: Printer, **options: Any) -> None:
    """Bring back what MODEL has forgotten since it was fine-tuned on DATA, without training.

    The anchors of the old domains and one of the new pull together; where they pull least lie the mended weights, at
    each ratio of their strengths others. Each is measured, with plain means of the old and new weights beside them.
    With --polish training goes on from there for a little, while old inputs are rehearsed.
    """
    from ewc_finetune.commands.mend import default_output
    from ewc_finetune.commands.mend import mend as run

    done = run(model, data, output=output or default_output(model), progress=printer, **options)
    printer.table(*done.table())
    printer.note(f"{done.output}: {done.taken.name}, {done.why}")
    printer.result(done.to_json())
