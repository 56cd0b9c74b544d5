"""What messages tell people to do can be done: every option that they name is there, of the command that they name."""

import ast
import re
from pathlib import Path

import click
import pytest

import ewc_finetune
from ewc_finetune.cli import main

PACKAGE = Path(ewc_finetune.__file__).parent
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?![\w-])")
COMMAND = re.compile(r"ewc-ft ([a-z]+)((?:(?!ewc-ft)[^.;:,\n])*)")


def texts():
    """Yield every text of the package with its place; of those that are put together, the fixed parts joined."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield path, node.lineno, "".join(p.value if isinstance(p, ast.Constant) else "X" for p in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield path, node.lineno, node.value


def options_of(command):
    return {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help"}


@pytest.fixture(scope="module")
def commands():
    context = click.Context(main)
    found = {name: main.get_command(context, name) for name in main.list_commands(context)}
    return {name: options_of(command) for name, command in found.items() if command is not None}


def test_options_that_are_named_are_there(commands):
    known = set().union(*commands.values(), options_of(main))
    wrong = [
        f"{path.relative_to(PACKAGE)}:{line}: {option}"
        for path, line, text in texts()
        for option in OPTION.findall(text)
        if option not in known
    ]
    assert not wrong, "\n".join(wrong)


def test_commands_that_are_named_have_these_options(commands):
    named = [
        (f"{path.relative_to(PACKAGE)}:{line}: ewc-ft {name}", name, OPTION.findall(rest))
        for path, line, text in texts()
        for name, rest in COMMAND.findall(text)
        if name in commands
    ]
    assert len(named) > 10
    wrong = [
        f"{place} {option}" for place, name, options in named for option in options if option not in commands[name]
    ]
    assert not wrong, "\n".join(wrong)
