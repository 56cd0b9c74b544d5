"""What the README says is so."""

import re
import shlex

import click
import pytest
from support import ROOT

from ewc_finetune.cli import main
from ewc_finetune.data.options import read_options

README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ewc-ft (.*)$", "\n".join(re.findall(r"```sh\n(.*?)```", README, re.S)), re.M)


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_understood(line):
    name, *arguments = shlex.split(line, comments=True)
    # A command keeps its help option as it is first asked for, whose names its parent has.
    parent = click.Context(main, **main.context_settings)
    context = main.commands[name].make_context(name, arguments, parent)
    assert context.params["data"]


def test_there_are_commands():
    assert len(COMMANDS) == 13


def test_the_tables_are_those_that_the_examples_made():
    tables = sorted((ROOT / "examples" / "published").glob("*/*.md"))
    assert len(tables) >= 6
    for table in tables:
        assert table.read_text() in README, table


def test_every_option_named_exists():
    known = {
        name
        for command in main.commands.values()
        for option in command.params
        for name in (*option.opts, *option.secondary_opts)
    }
    assert set(re.findall(r"`(--[a-z-]+)", README)) <= known


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", line.lower()).strip().replace(" ", "-")
        for line in re.findall(r"^#+ (.*)$", README, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= anchors


def test_data_options_are_those_of_the_code():
    from ewc_finetune.specs.query import parse

    for option in re.findall(r"^\| `([a-z]+=[^`]*)`", README, re.M):
        read_options(parse("mnist?" + option.split("\\|")[0].replace("SEED", "1").replace("=N", "=1")))


def test_the_two_commands_are_in_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for target in ("demo:", "test:", "test-fast:", "bench:"):
        assert f"\n{target}" in makefile
