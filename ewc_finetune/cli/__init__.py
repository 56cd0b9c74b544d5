"""The command line: parse, call one function, print. torch is imported when a command needs it, never before."""

from __future__ import annotations

import click

from ewc_finetune._version import __version__
from ewc_finetune.choices import OLD_WORDS
from ewc_finetune.cli.command import Commands
from ewc_finetune.cli.completion import completion
from ewc_finetune.cli.consolidate import consolidate
from ewc_finetune.cli.evaluate import evaluate
from ewc_finetune.cli.finetune import finetune
from ewc_finetune.cli.inspect import inspect
from ewc_finetune.cli.mend import mend
from ewc_finetune.cli.merge import merge
from ewc_finetune.cli.pull import pull
from ewc_finetune.cli.push import push
from ewc_finetune.cli.report import report
from ewc_finetune.cli.sweep import sweep

_SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
    "token_normalize_func": lambda token: OLD_WORDS.get(token, token),
}


@click.group(cls=Commands, context_settings=_SETTINGS)
@click.version_option(__version__, prog_name="ewc-ft")
def main() -> None:
    """Adapt a deployed model to a new domain without losing the old one.

    \b
    ewc-ft consolidate model.pt --data mnist          while the old data is at hand
    ewc-ft finetune --anchors model.anchor.safetensors --data fmnist
    ewc-ft evaluate model-fmnist.pt --data mnist --data fmnist
    ewc-ft sweep --anchors model.anchor.safetensors --data fmnist --lambda 1..10000:5 --eval mnist --eval fmnist
    ewc-ft merge a.safetensors b.safetensors --output both.safetensors
    ewc-ft mend model-fmnist.pt --anchors model.anchor.safetensors --data fmnist
    ewc-ft inspect both.safetensors
    ewc-ft report model-fmnist.run                    what came of it, on one page
    ewc-ft push both.safetensors ORG/NAME             and others take --anchors hf://ORG/NAME

    DATA is mnist, fmnist, kmnist, cifar10, digits, imagefolder:PATH, images:PATH, npz:FILE, table:FILE, hf:DATASET,
    text:FILE, generate:N or package.module:function, with options behind a question mark: split=train|test,
    classes=0-4, limit=N, first=N, channels=1|3, rotate=DEGREES, permute=SEED, offset=N, active=0-4; of images
    size=PIXELS or resize=PIXELS&crop=PIXELS, mean=imagenet&std=imagenet (or numbers); of tables and datasets
    text=COLUMN, target=COLUMN, labels=A,B,C (the order of the model's outputs); of tables header=0, ignore=A,B,
    onehot=A,B, missing=mean, standardise=1, test=SHARE; of texts length=TOKENS, pack=TOKENS; joined by &.
    """  # noqa: D301 - click reads the \b


main.add_command(consolidate)
main.add_command(finetune)
main.add_command(evaluate)
main.add_command(merge)
main.add_command(mend)
main.add_command(inspect)
main.add_command(completion)
main.add_command(report)
main.add_command(sweep)
main.add_command(push)
main.add_command(pull)
