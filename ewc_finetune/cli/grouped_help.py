"""Help in groups: the options that matter first in `--help`, all of them in `--help-all`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from ewc_finetune.specs.groups import Group

F = TypeVar("F", bound=Callable[..., Any])

# The key under which click's context remembers that all options are to be listed.
_ALL = "ewc_finetune.cli.all_options"
# The widest that an option may be to have its text beside it, as in click's own lists.
_WIDEST = 26


class GroupedOption(click.Option):
    """An option under a heading of the help.

    Args:
        group: The heading.
        main: Whether `--help` lists it.
    """

    def __init__(self, *arguments: Any, group: Group, main: bool, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.group = group
        self.main = main


def plain_option(*names: str, group: Group, main: bool = True, **more: Any) -> Callable[[F], F]:
    """Add an option that only the command line has, under a heading of the help; the rest is as in `click.option`."""
    return click.option(*names, cls=GroupedOption, group=group, main=main, **more)


def help_all_option() -> click.Option:
    """Return the option that lists all options."""

    def shown(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
        if wanted and not context.resilient_parsing:
            click.echo(full_help(context), color=context.color)
            context.exit()

    return GroupedOption(
        ["--help-all"],
        group=Group.MESSAGES,
        main=True,
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=shown,
        help="Show this message with all options and exit.",
    )


def full_help(context: click.Context) -> str:
    """Return a command's help with all of its options."""
    context.meta[_ALL] = True
    return context.get_help()


def write_groups(context: click.Context, formatter: click.HelpFormatter) -> None:
    """Write the options of a command under their headings, in one pair of columns, and where there are more."""
    records: dict[Group, list[tuple[str, str]]] = {group: [] for group in Group}
    left: list[Group] = []
    for parameter in context.command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None or not isinstance(parameter, click.Option):
            continue
        group = parameter.group if isinstance(parameter, GroupedOption) else Group.MESSAGES
        if _ALL in context.meta or not isinstance(parameter, GroupedOption) or parameter.main:
            records[group].append(record)
        else:
            left.append(group)
    width = min(_WIDEST, max(len(names) for rows in records.values() for names, _ in rows))
    for group, rows in records.items():
        if rows:
            with formatter.section(group.value):
                formatter.write_dl([(names.ljust(width), told) for names, told in rows], width)
    if left:
        formatter.write_paragraph()
        formatter.write_text(
            f"--help-all lists {len(left)} more, of: {', '.join(group.value for group in Group if group in left)}."
        )
