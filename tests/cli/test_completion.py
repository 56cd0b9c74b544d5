"""What a shell completes."""

import shutil
import subprocess

import pytest

from ewc_finetune.cli import main
from ewc_finetune.cli.other_words import names


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(ewc_ft, shell, tmp_path):
    script = ewc_ft("completion", shell).output
    assert "_EWC_FT_COMPLETE" in script
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} to read the script")
    (tmp_path / "script").write_text(script)
    subprocess.run([shell, "-n", str(tmp_path / "script")], check=True)


def test_completing_choices():
    from click.shell_completion import ShellComplete

    def complete(*arguments):
        words = ShellComplete(main, {}, "ewc-ft", "_EWC_FT_COMPLETE").get_completions(
            list(arguments[:-1]), arguments[-1]
        )
        return [word.value for word in words]

    assert complete("fine") == ["finetune"]
    assert complete("finetune", "--decay", "") == ["constant", "cosine", "linear"]
    assert "--patience" in complete("finetune", "--p")
    for name, command in main.commands.items():  # those that --help leaves out too
        assert set(complete(name, "--")) >= {option for option in names(command) if option.startswith("--")}
    assert "--label-smoothing" in complete("finetune", "--")
