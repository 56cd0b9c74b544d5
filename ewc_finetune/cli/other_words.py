"""What people from elsewhere call our commands and options, so that a word that is no option leads to the one meant."""

from __future__ import annotations

from collections.abc import Mapping

import click

# Of how many other commands an option is at most that they are named: what most have is no hint.
_ELSEWHERE = 2
# By what is meant: the words for it of PEFT, transformers, timm, avalanche and of papers. A value may stand behind an
# option; a name in capitals is an argument's.
OPTIONS = {
    "--data": "dataset dataset-name train-data train-file training-data train-dataset new-data data-path input-data",
    "MODEL": "model checkpoint ckpt weights model-path model-name-or-path",
    "ANCHOR": "anchor anchors",
    "FILE": "file anchor model checkpoint",
    "RUN": "run runs run-dir",
    "--model": "checkpoint ckpt weights pretrained base-model backbone initial-checkpoint model-path "
    "model-name-or-path pretrained-model-name-or-path",
    "--arch": "architecture model-class model-type network",
    "--anchors": "anchor ewc fisher importances old-anchors old-data old-task",
    "--eval": "eval-data eval-dataset val-data val validation validation-file test-data test old-data old-task",
    "--lambda": "ewc-lambda lambda-ewc lambdas lamb lam strength alpha reg reg-strength regularization penalty "
    "penalty-weight importance-weight ewc-weight",
    "ewc-ft consolidate --data": "old-data old-task",
    "ewc-ft push": "push-to-hub hub-model-id",
    "--tolerance": "max-drop plasticity",
    "--penalty-form": "penalty-type form",
    "--penalty-form proximal": "proximal implicit",
    "--rehearse": "replay rehearsal buffer memory exemplars distill distillation lwf old-data",
    "--rehearse-weight": "replay-weight distill-weight distillation-weight",
    "--rehearse-batch": "replay-batch batch-size-mem replay-batch-size",
    "--epochs": "num-epochs num-train-epochs train-epochs max-epochs n-epochs steps max-steps num-steps iterations",
    "--lr": "learning-rate step-size eta",
    "--batch-size": "bs bsz batch mb-size train-mb-size eval-mb-size train-batch-size eval-batch-size "
    "per-device-train-batch-size per-device-eval-batch-size",
    "--optimizer": "opt optim optimiser",
    "--optimizer adamw": "adamw",
    "--optimizer sgd": "sgd",
    "--weight-decay": "wd l2-penalty",
    "--accumulate": "gradient-accumulation-steps grad-accum grad-accum-steps accumulation-steps",
    "--clip": "max-grad-norm clip-grad clip-norm grad-clip gradient-clip-val",
    "--warmup": "warmup-steps warmup-ratio warmup-epochs",
    "--decay": "scheduler sched lr-scheduler lr-scheduler-type lr-decay schedule",
    "--decay cosine": "cosine",
    "--amp": "mixed-precision precision half autocast",
    "--amp fp16": "fp16 float16",
    "--amp bf16": "bf16 bfloat16",
    "--compile": "torch-compile torchcompile",
    "--label-smoothing": "smoothing label-smoothing-factor",
    "--norm-stats": "freeze-bn bn-stats batch-norm running-stats",
    "--workers": "num-workers dataloader-num-workers",
    "--eval-every": "eval-steps eval-interval eval-strategy evaluation-strategy val-check-interval",
    "--patience": "early-stopping early-stopping-patience early-stop",
    "--keep best": "load-best-model-at-end save-best best",
    "--log-every": "logging-steps log-interval print-freq",
    "--tensorboard": "tb report-to log-dir logging-dir",
    "--head": "classifier num-labels num-classes",
    "--head new": "new-head reset-classifier",
    "--freeze": "freeze-layers frozen",
    "--loss": "loss-fn loss-function criterion objective",
    "--class-weights": "class-weight weights pos-weight",
    "--focal": "focal-loss focal-gamma gamma-focal",
    "--metric": "metrics score-with",
    "--select-on": "metric-for-best-model monitor",
    "--retain": "retention min-retention forgetting",
    "--output": "out output-dir output-path output-file save save-to save-path save-dir save-model",
    "--overwrite": "force overwrite-output-dir clobber exist-ok",
    "--resume": "resume-from resume-from-checkpoint continue",
    "--seed": "random-seed random-state manual-seed seeds",
    "--config": "config-file options-file",
    "--dry-run": "estimate simulate plan",
    "--device": "accelerator",
    "--device cuda": "gpu gpus cuda use-cuda",
    "--device cpu": "cpu use-cpu no-cuda",
    "--device mps": "mps",
    "--trust-code": "trust-remote-code allow-pickle unsafe",
    "--data-dir": "data-root cache-dir download-dir root",
    "--curvature": "importance fisher",
    "--curvature kfac": "kfac",
    "--curvature diagonal": "diagonal ewc",
    "--curvature identity": "identity l2",
    "--kfac-rank": "rank",
    "--curvature-dtype": "dtype precision half",
    "--estimator": "fisher-type fisher-estimator",
    "--estimator empirical": "empirical empirical-fisher",
    "--estimator exact": "exact",
    "--estimator sampled": "sampled",
    "--draws": "mc-samples n-mc",
    "--samples": "num-samples n-samples max-samples fisher-samples sample-size subset limit",
    "--rtol": "tol tolerance",
    "--exclude": "ignore skip",
    "--probe": "probes memory mem-size buffer-size exemplars",
    "--name": "domain task-name",
    "--gamma": "ewc-decay decay-factor discount forgetting-factor",
    "--checkpoint": "merged-model",
    "--ratio": "ratios lambda strength alpha",
    "--anchor-of-new": "new-anchor",
    "--polish": "steps max-steps epochs",
    "--plot": "figure draw chart",
    "--verify": "check checksum",
    "--jobs": "parallel n-jobs num-jobs processes",
    "--no-plain": "no-baseline",
    "--discard": "cleanup",
    "--create-pr": "pr pull-request",
    "--message": "commit-message",
    "--license": "licence",
    "--revision": "branch",
    "--json": "as-json output-json json-output format",
    "--verbose": "log-level",
    "--quiet": "silent no-progress no-progress-bar disable-tqdm",
    "--debug": "traceback",
}
COMMANDS = {
    "finetune": "train fit tune fine-tune adapt",
    "consolidate": "fisher anchor ewc importance",
    "evaluate": "eval test score validate",
    "merge": "combine average join",
    "mend": "repair restore recover heal",
    "inspect": "info show describe",
    "report": "summary plot",
    "sweep": "grid search",
    "push": "upload publish share",
    "pull": "download fetch",
}


def meant(command: click.Command, others: Mapping[str, click.Command], word: str) -> list[str]:
    """Return what was probably meant by a word that is no option of a command, such as `--device cuda` by the word gpu.

    Args:
        command: The command.
        others: All commands by their names, of which another one may have the option.
        word: What was taken for an option.
    """
    asked = word.lstrip("-").replace("_", "-").lower()
    if f"--{asked}" in names(command):
        return [f"--{asked}"]
    found = [it for it, words in OPTIONS.items() if asked in words.split() and _has(command, it)]
    elsewhere = [f"ewc-ft {name} {word}" for name, other in others.items() if word in names(other)]
    return found or (elsewhere if len(elsewhere) <= _ELSEWHERE else [])


def names(command: click.Command) -> set[str]:
    """Return the names of a command's options (`--lr`, `--no-rules`) and arguments (`MODEL`)."""
    found: set[str] = set()
    for one in command.params:
        found |= {*one.opts, *one.secondary_opts} if isinstance(one, click.Option) else {_singular(str(one.name))}
    return found


def _has(command: click.Command, it: str) -> bool:
    """Whether a command has what may be meant: an argument, an option, or one that may have a value."""
    name, _, value = it.partition(" ")
    if not value or name not in names(command):
        return name in {*names(command), "ewc-ft"}
    return any(
        name in one.opts and isinstance(one.type, click.Choice) and value in one.type.choices for one in command.params
    )


def _singular(argument: str) -> str:
    return argument.upper().removesuffix("S")
