"""Options from a file, or from a run that is to go on; what the command line says comes first."""

from __future__ import annotations

import shlex
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
        help="Take options from a TOML file (lambda = 100), a run folder or its run.json; those given here win. Code "
        "that it names runs with --trust-code alone.",
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
    """Refuse code that a file's options name, unless the command line trusts it; what is run is said.

    Raises:
        UsageError: naming the code, and what the command line may say.
    """
    paths = context.meta.get(_PATHS, {})
    from_file = {name: context.params[name] for name in paths if _is_from_file(context, name)}
    if not from_file:
        return
    from ewc_finetune.finetuning.request import code_named

    names = {option.name: f"--{_name(option)}" for option in context.command.params}
    for name, texts in code_named(from_file).items():
        said = shlex.join(word for text in texts for word in (names[name], text))
        if not context.params["trust_code"]:
            raise UsageError(
                f"{paths[name]} names code: {said}. It would run as it stands there, and a file's word is not enough "
                f"for that. Add --trust-code if you know and trust who wrote the file, or give {names[name]} yourself"
            )
        note(f"{paths[name]} names code, which runs: {said}")


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
