"""`ewc-ft completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = ("bash", "zsh", "fish")


@click.command(short_help="Print what makes a shell complete commands and options.")
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print what makes a shell complete commands, options and their choices.

    \b
    bash   eval "$(ewc-ft completion bash)"     in ~/.bashrc
    zsh    eval "$(ewc-ft completion zsh)"      in ~/.zshrc
    fish   ewc-ft completion fish > ~/.config/fish/completions/ewc-ft.fish
    """  # noqa: D301 - click reads the \b
    kind = get_completion_class(shell)
    if kind is None:  # no such class in this click
        raise click.ClickException(f"this version of click has no completion for {shell}")
    click.echo(kind(context.find_root().command, {}, "ewc-ft", "_EWC_FT_COMPLETE").source())
