"""Options from a file, or from a run that is to go on; what the command line says comes first."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeVar

import click

from ewc_finetune.choices import OLD_WORDS
from ewc_finetune.cli.declared import DeclaredOption
from ewc_finetune.cli.grouped_help import plain_option
from ewc_finetune.errors import UsageError
from ewc_finetune.specs.groups import Group

F = TypeVar("F", bound=Callable[..., Any])

# The key under which click's context remembers which file said a parameter.
_PATHS = "ewc_finetune.runs.options_file.paths"


def config_option(of_run: Callable[[MutableMapping[str, Any]], None] | None = None) -> Callable[[F], F]:
    """Add `--config`; what a run says may be changed by `of_run` before it is taken."""

    def configured(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
        if value is not None:
            _take(context, Path(value), of_run)

    return plain_option(
        "--config",
        group=Group.OUTPUT,
        main=False,
        type=click.Path(),
        metavar="FILE",
        is_eager=True,
        expose_value=False,
        callback=configured,
        help="Take options from a TOML file (lambda = 100), a run folder or its run.json; those given here win.",
    )


def resumed(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Take the options of a run that is to go on."""
    if value is not None:
        _take(context, Path(value, "run.json"))
    return value


def _take(context: click.Context, path: Path, of_run: Callable[[MutableMapping[str, Any]], None] | None = None) -> None:
    """Make what a file says the defaults of this command."""
    from ewc_finetune.runs.options_file import read_config

    if context.resilient_parsing:  # a shell asks what may come next
        return
    params = {_name(option): option for option in context.command.params}
    options = {n: o for n, o in params.items() if isinstance(o, DeclaredOption) and o.declared.filed}
    never = {*params, *OLD_WORDS, "help", "resume"} - {*options}
    known: dict[str, Any] = {}
    said = read_config(path, options, never)
    if of_run is not None and (path.is_dir() or path.name == "run.json"):
        of_run(said)
    for name, value in said.items():
        known[options[name].name or name] = _value(options[name], value, f"{path}: {name}")
    context.default_map = {**(context.default_map or {}), **known}
    context.meta[_PATHS] = {**context.meta.get(_PATHS, {}), **dict.fromkeys(known, path)}


def check_named(context: click.Context, note: Callable[[str], None]) -> None:
    """See that the functions and classes that a file's options name are the user's own, and say which are imported.

    What stands on the command line may be anything.

    Raises:
        EwcError: naming what is not, and the option to repeat on the command line.
    """
    paths = context.meta.get(_PATHS, {})
    declared = [option for option in context.command.params if isinstance(option, DeclaredOption)]
    naming = {str(option.name): option.declared.code for option in declared if option.declared.code}
    named = {name: paths[name] for name in naming if name in paths and _is_from_file(context, name)}
    if not named:
        return
    from ewc_finetune.checkpoint.architecture import names_code as code_of_architecture
    from ewc_finetune.checkpoint.location import is_there
    from ewc_finetune.data.sources import names_code as code_of_data
    from ewc_finetune.likelihood.objective import names_code as code_of_loss
    from ewc_finetune.specs.importing import find_own, working_directory_on_path

    options = {option.name: option for option in context.command.params}
    codes = {"architecture": code_of_architecture, "data": code_of_data, "loss": code_of_loss}
    wrong: list[str] = []
    for name, path in named.items():
        value, option = context.params[name], f"--{_name(options[name])}"
        texts = [value] if isinstance(value, str) else value or []
        for text in dict.fromkeys(texts):
            head = None if name == "model" and is_there(text) else codes[str(naming[name])](text)
            if head is None:
                continue
            try:
                with working_directory_on_path(first=True):
                    find_own(head, str(naming[name]), option, UsageError, note)
            except UsageError as error:
                wrong.append(f"{path}: {error}")
    if wrong:
        raise UsageError("; ".join(dict.fromkeys(wrong)))


def _is_from_file(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is click.core.ParameterSource.DEFAULT_MAP


def _value(option: click.Parameter, value: Any, where: str) -> Any:
    """Return a value of a file as click would find it on the command line."""
    many = isinstance(option, click.Option) and option.multiple
    if isinstance(value, list) and isinstance(option, DeclaredOption) and option.declared.joined:
        return ",".join(map(str, value))
    if isinstance(value, list) and not many:
        raise UsageError(f"{where} is a list; it takes one value")
    values = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) for item in values) and not (isinstance(option, click.Option) and option.is_flag):
        raise UsageError(f"{where} is true or false; it takes a value")
    said = [item if isinstance(item, bool) else str(item) for item in values]
    return said if many else said[0]


def _name(option: click.Parameter) -> str:
    """Return the long name of an option, without its dashes."""
    return max(option.opts, key=len).lstrip("-")
