"""Help in groups: what matters first, all of it with --help-all."""

import re
import subprocess
import sys

import click
import pytest

from ewc_finetune.cli import main
from ewc_finetune.cli.command import Command
from ewc_finetune.cli.grouped_help import GroupedOption
from ewc_finetune.specs.groups import Group

COMMANDS = [name for name, command in main.commands.items() if isinstance(command, Command)]
HEADINGS = {group.value for group in Group}


def listed(text):
    """Return the options of a help, each with the heading that it stands under."""
    found, heading = {}, None
    for line in text.splitlines():
        if line.endswith(":") and line[:-1] in HEADINGS:
            heading = line[:-1]
        elif option := re.match(r"  (?:-\w, )?(--[a-z-]+)", line):
            assert option[1] not in found
            found[option[1]] = heading
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_main_options_and_all_of_them(ewc_ft, name):
    brief, full = (listed(ewc_ft(name, option).stdout) for option in ("--help", "--help-all"))
    options = [one for one in main.commands[name].params if isinstance(one, click.Option)]
    assert full.keys() == {max(one.opts, key=len) for one in options} | {"--help"}
    assert brief.items() <= full.items()
    assert None not in full.values()
    assert len(brief) <= 15
    left = [one for one in options if isinstance(one, GroupedOption) and not one.main]
    headings = ", ".join(group.value for group in Group if group in {one.group for one in left})
    end = " ".join(ewc_ft(name, "--help").stdout.rpartition("\n\n")[2].split())
    assert end == f"--help-all lists {len(left)} more, of: {headings}."
    assert len(full) - len(brief) == len(left)


@pytest.mark.parametrize("name", COMMANDS)
def test_it_is_read_in_80_columns(ewc_ft, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for option in ("--help", "--help-all"):
        assert max(map(len, ewc_ft(name, option).stdout.splitlines())) <= 80


def test_nothing_heavy_is_imported_for_it():
    script = (
        "import sys; from ewc_finetune.cli import main; main(['finetune', '--help-all'], standalone_mode=False);"
        "print({'torch', 'numpy', 'jsonschema', 'rich', 'matplotlib'} & sys.modules.keys(), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "set()\n"
    assert "--label-smoothing" in done.stdout
