"""Options of the command line, made from where they are declared (`specs.options`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import MISSING, Field
from typing import Any, TypeVar

import click

from ewc_finetune.cli.grouped_help import GroupedOption
from ewc_finetune.errors import UsageError
from ewc_finetune.specs.groups import Group
from ewc_finetune.specs.options import Option, declared, group_of, spoken

F = TypeVar("F", bound=Callable[..., Any])

_NUMBERS = {"int": click.INT, "float": click.FLOAT}


class DeclaredOption(GroupedOption):
    """An option that knows how it was declared."""

    def __init__(self, *arguments: Any, declared: Option, **more: Any) -> None:
        super().__init__(*arguments, main=declared.main, **more)
        self.declared = declared


def options_from(options: Any, but: Collection[str] = ()) -> Callable[[F], F]:
    """Add the options of a dataclass to a command, in their order, each under its field's name.

    Args:
        options: The dataclass.
        but: Fields that the command has in another way.
    """

    def added(function: F) -> F:
        for one, known in reversed([*declared(options)]):
            if known.help is not None and one.name not in but:
                function = _made(one, known, spoken(options, one.name), group_of(options, one.name))(function)
        return function

    return added


def _made(one: Field[Any], known: Option, name: str, group: Group) -> Callable[[F], F]:
    """Return what adds one option."""
    known_as: dict[str, Any] = {"cls": DeclaredOption, "declared": known, "group": group}
    names = [f"--{name}", *([f"-{known.short}"] if known.short else []), one.name]
    told = f"{known.help}  [default: {known.unless}]" if known.unless else known.help
    if str(one.type).startswith("bool"):
        flag = names if one.default is False else [f"--{name}/--no-{name}", one.name]
        shown = one.default is True and known.unless is None
        return click.option(*flag, **known_as, is_flag=True, default=one.default, show_default=shown, help=told)
    many = known.many or known.once
    default = None if one.default is MISSING else one.default
    if isinstance(default, float) and default.is_integer():
        default = int(default)
    # With a default of None, click 8.5 takes a required option for given.
    unless: dict[str, Any] = {} if known.required else {"default": None if many else default}
    return click.option(
        *names,
        **known_as,
        type=_type(one, known),
        multiple=many,
        required=known.required,
        callback=_several(default, known.alone) if known.many else _only_one if known.once else None,
        **unless,
        show_default=not many and default is not None and known.unless is None,
        metavar=known.metavar,
        help=told,
    )


def _type(one: Field[Any], known: Option) -> Any:
    if known.read is not None:
        return str if known.read is str else _Reading(known.read, known.metavar or "text")
    if known.path is not None:
        return click.Path(dir_okay=known.path != "file", file_okay=known.path != "folder")
    if known.choices:
        return (_Numbered if known.wider else click.Choice)(list(known.choices))
    if known.least is not None:
        return click.IntRange(known.least, known.most)
    return _NUMBERS.get(str(one.type).partition(" ")[0], click.STRING)


class _Numbered(click.Choice[str]):
    """One of some words, or one with a number behind a colon: `cuda:1`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return a word that is checked where it is used, if it may be numbered."""
        word, colon, number = str(value).partition(":")
        return value if word in self.choices and colon and number.isdecimal() else super().convert(value, param, ctx)


class _Reading(click.ParamType[Any]):
    """A text that is read by a function which refuses it with a `UsageError`."""

    def __init__(self, read: Callable[[str], Any], name: str) -> None:
        self.read, self.name = read, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return what is read of a text."""
        if not isinstance(value, str):
            return value
        try:
            return self.read(value)
        except UsageError as error:
            return self.fail(f"{error}.", param, ctx)


def _only_one(context: click.Context, parameter: click.Parameter, values: tuple[Any, ...]) -> Any:
    """Refuse an option that is given twice, where the last would win unnoticed."""
    if len(values) > 1:
        raise click.BadParameter(f"given {len(values)} times; this command takes one")
    return values[0] if values else None


def _several(unless: Any, alone: str | None) -> Callable[..., Any]:
    """Return what makes a list of what was given; what it is without any is the field's default."""

    def values(context: click.Context, parameter: click.Parameter, given: tuple[Any, ...]) -> Any:
        if alone is None or alone not in given:
            said = context.get_parameter_source(str(parameter.name)) is not click.core.ParameterSource.DEFAULT
            return _flat(given) or (unless if unless is None or not said else [])
        if len(given) > 1:
            raise click.BadParameter(f"{alone} stands for all of them; give it alone")
        return alone

    return values


def _flat(given: tuple[Any, ...]) -> list[Any]:
    """Return what was given, with lists that were read of one text as their parts, each once."""
    if not any(isinstance(value, list) for value in given):
        return list(given)
    return list(dict.fromkeys(part for value in given for part in value))
