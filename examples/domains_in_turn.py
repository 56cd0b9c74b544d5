"""Three domains in turn, each adapted to without the data of those before: anchors stack, or merge into one.

Every anchor is told which ones had pulled on its model (`lineage`), so that none is counted twice without a word.
Prints the accuracy on each domain in the end.

    python examples/domains_in_turn.py
"""

import copy

import torch
from torch import nn

import ewc_finetune as ewc

DOMAINS = ("digits", "digits?rotate=90", "digits?rotate=180")
TRAINING = {"epochs": 30, "lr": 1e-3, "batch_size": 50, "eval_on": []}


def learn_in_turn(start: nn.Module, way: str) -> list[float]:
    """Return the accuracy on each domain in the end."""
    model, anchors = copy.deepcopy(start), []
    for domain in DOMAINS:
        done = ewc.finetune(model, domain, anchors=anchors, **TRAINING)
        if way != "plain":
            anchors.append(ewc.consolidate(model, domain, name=domain, lineage=done.lineage))
        if way == "merged":
            anchors = [ewc.merge(anchors, online=True)] if len(anchors) > 1 else anchors
    return [score.accuracy for score in ewc.evaluate(model, list(DOMAINS))]


def main() -> None:
    torch.manual_seed(0)
    start = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    for way in ("plain", "stacked", "merged"):
        accuracies = learn_in_turn(start, way)
        print(f"{way:<8}" + "".join(f"{spec}: {a:.1%}   " for spec, a in zip(DOMAINS, accuracies, strict=True)))


if __name__ == "__main__":
    main()
