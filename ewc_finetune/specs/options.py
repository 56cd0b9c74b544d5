"""How an option is declared: once, as a field of a command's dataclass.

From the fields come the command line's options, the keyword arguments of the function, what a run records and reads
back, and what may differ between two runs that are compared.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, Literal, ParamSpec, TypeVar

from ewc_finetune.choices import check_choice
from ewc_finetune.errors import UsageError, suggest
from ewc_finetune.specs.groups import Group

_KEY = "option"
# Where a documentation says what arguments a function takes: in the place of what it says of its options, else at the
# end, but before what it raises.
_PLACE = re.compile(r"(Args:\n    options: .*?\n\n|(?=Raises:|\Z))", re.DOTALL)
P = ParamSpec("P")
OptionsT = TypeVar("OptionsT")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Option:
    """What is to be known of an option beside its field's name, type and default.

    Attributes:
        help: A line for `--help`; none where only Python has the option.
        name: On the command line, without its dashes; the field's unless given.
        short: Its letter there.
        read: Makes a value of a text, raising `UsageError`; by the field's type unless given.
        path: What it is the path of, where it is one.
        least: The smallest value, of a whole number.
        most: The largest.
        choices: The words that it may be.
        wider: Whether in Python it may be others too, which are checked where it is used.
        metavar: What its value is called in the help.
        many: Whether it may be given several times.
        joined: Whether a list is one value, whose parts are joined by commas where it is said as a text.
        alone: A value that stands for all of many, and is given alone.
        required: Whether it must be given.
        main: Whether `--help` lists it; the others are in `--help-all`.
        group: The heading that it has there; that of the dataclass which declares it unless given.
        once: Whether it is refused where it is given twice, of which the last would win unnoticed.
        unless: What the help says of the default, where the value does not.
        recorded: Whether a run records it.
        filed: Whether a file may say it: whose files may be replaced, and whose code may run, is for whoever gives the
            command.
        sound: Whether a run that goes on may have another one: what is trained stays the same, but for rounding.
        varied: Whether the runs of a sweep differ in it.
        code: What its value names that may be somebody's code.
        setting: Whether runs are told apart by it where they are compared; `training` for what a plain run and a held
            one should share.
    """

    help: str | None = None
    name: str = ""
    short: str | None = None
    read: Callable[[str], Any] | None = None
    path: Literal["file", "folder", "any"] | None = None
    least: int | None = None
    most: int | None = None
    choices: Sequence[str] = ()
    wider: bool = False
    metavar: str | None = None
    many: bool = False
    joined: bool = False
    alone: str | None = None
    required: bool = False
    main: bool = False
    group: Group | None = None
    once: bool = False
    unless: str | None = None
    recorded: bool = True
    filed: bool = True
    sound: bool = False
    varied: bool = False
    code: Literal["data", "architecture", "loss"] | None = None
    setting: Literal["training", "method"] | None = None


def option(default: Any = MISSING, help: str | None = None, **more: Any) -> Any:  # noqa: A002 - as click calls it
    """Return the field of an option; see `Option`."""
    return field(default=default, metadata={_KEY: Option(help, **more)})


def declared(options: Any) -> list[tuple[Field[Any], Option]]:
    """Return the options of a dataclass with what is known of each, those first that must be given."""
    return sorted(((one, one.metadata[_KEY]) for one in fields(options)), key=lambda option: not option[1].required)


def spoken(options: Any, name: str) -> str:
    """Return the name on the command line of a field, without its dashes."""
    known: Option = next(one for one in fields(options) if one.name == name).metadata[_KEY]
    return known.name or name.replace("_", "-")


def group_of(options: Any, name: str) -> Group:
    """Return the heading under which help lists a field: its own, or the `GROUP` of the dataclass that declares it."""
    known: Option = next(one for one in fields(options) if one.name == name).metadata[_KEY]
    part = next(part for part in options.__mro__ if name in inspect.get_annotations(part))
    group: Group = known.group or vars(part)["GROUP"]
    return group


def names_of(options: Any, which: Callable[[Option], object]) -> set[str]:
    """Return the names on the command line of the options of which something holds."""
    return {spoken(options, one.name) for one, known in declared(options) if which(known)}


@dataclass(frozen=True)
class Setting:
    """An option that runs are told apart by.

    Attributes:
        default: What it is unless it is given.
        of_training: Whether a plain run and a held one should share it.
    """

    default: Any
    of_training: bool


def settings(options: Any) -> dict[str, Setting]:
    """Return the options that runs are told apart by, by their names on the command line."""
    return {
        spoken(options, one.name): Setting(one.default, known.setting == "training")
        for one, known in declared(options)
        if known.setting
    }


def check_declared(options: Any, only: Any = None) -> None:
    """Refuse whole numbers and words that are none of those that are declared.

    Args:
        options: An object of the dataclass.
        only: A part of it, whose fields alone are checked.

    Raises:
        UsageError: naming the option, its value and what is expected.
    """
    for one, known in declared(only or options):
        value, name = getattr(options, one.name), one.name.replace("_", " ")
        if (value is None and one.default is None) or known.many:
            continue
        whole = type(value) is not bool and isinstance(value, numbers.Integral)
        if known.least is not None and not (whole and value >= known.least):
            raise UsageError(f"{name} is {value}; expected a whole number, at least {known.least}")
        if known.choices and not known.wider:
            check_choice(name, value, known.choices)


def takes(options: Callable[P, OptionsT]) -> Callable[[Callable[[OptionsT], Result]], Callable[P, Result]]:
    """Have a function of a command's options be called with the options themselves, as its dataclass is made.

    Its signature and its documentation list the options, with the help that the command line has for each.

    Raises:
        TypeError: when it is called with a keyword that there isn't, naming the nearest.
    """

    def taking(function: Callable[[OptionsT], Result]) -> Callable[P, Result]:
        @functools.wraps(function)
        def called(*arguments: P.args, **keywords: P.kwargs) -> Result:
            check_keywords(called, keywords)
            try:
                shown.bind(*arguments, **keywords)
            except TypeError as error:
                raise TypeError(f"{function.__name__}() is called wrongly: {error}") from None
            given: Any = {name: _plain(value) for name, value in keywords.items()}
            if given.get("progress", given) is None:
                del given["progress"]  # None stands for what is so unless it is given
            return function(options(*arguments, **given))

        shown = inspect.signature(options).replace(return_annotation=inspect.signature(function).return_annotation)
        before, _, after = _PLACE.split(inspect.cleandoc(function.__doc__ or ""), maxsplit=1)
        called.__doc__ = f"{before.rstrip()}\n\nArgs:\n{_listed(options, shown.parameters)}\n\n{after}"
        called.__annotations__ = {name: one.annotation for name, one in shown.parameters.items()}
        setattr(called, "__signature__", shown)  # noqa: B010 - mypy knows no such attribute
        return called

    return taking


def _plain(value: Any) -> Any:
    """Return a number of numpy as one of Python, which JSON has; anything else as it is."""
    if isinstance(value, numbers.Real) and type(value).__module__ == "numpy":
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def _listed(options: Any, names: Iterable[str]) -> str:
    """Return what there is to know of each option, in paragraphs indented as docstrings are."""
    told = {one.name: known.help for one, known in declared(options)}
    for part in reversed(options.__mro__):
        _, _, attributes = inspect.cleandoc(part.__doc__ or "").partition("\nAttributes:\n")
        found = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE)
        told |= {name: " ".join(text.split()) for name, text in found}
    return "\n".join(
        textwrap.fill(f"{name}: {told[name]}", 116, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name in names
        if told.get(name)
    )


def check_keywords(function: Callable[..., object], given: Mapping[str, object]) -> None:
    """Refuse an argument that there isn't, as Python would, naming the nearest.

    Raises:
        TypeError: if there is one.
    """
    known = inspect.signature(function).parameters
    for name in given:
        if name not in known:
            raise TypeError(f"{function.__name__}() has no argument {name!r}. {suggest(name, known)}")


def is_number(value: object) -> bool:
    """Whether a value is a finite number, of numpy's too, and not true or false."""
    return type(value) is not bool and isinstance(value, numbers.Real) and math.isfinite(value)
