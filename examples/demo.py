"""The main job on data that needs no download: a classifier of handwritten digits meets digits turned by a quarter.

Trains a small network on the digits of scikit-learn, consolidates it into an anchor, and adapts it to the same digits
turned by 90 degrees, once plainly and once held by the anchor. Prints what is kept and what is learned, and draws it.

    make demo          or:  python examples/demo.py [--output FOLDER]
"""

from __future__ import annotations

import argparse
from pathlib import Path

from matplotlib.figure import Figure

import ewc_finetune as ewc

OLD, NEW = "digits", "digits?rotate=90"
LAMBDA = 100.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("demo"), help="folder for what is made (demo)")
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, anchor_file = folder / "digits.pt", folder / "digits.anchor.safetensors"

    print(f"1. Train a small network on {OLD}: the deployed model.")
    ewc.finetune("mlp?hidden=64", OLD, epochs=40, lr=1e-3, batch_size=50, output=checkpoint, overwrite=True)

    print("2. Consolidate it, while the old data is at hand: what each weight matters goes into an anchor.")
    anchor = ewc.consolidate(checkpoint, OLD, output=anchor_file, overwrite=True)
    print(f"   {anchor_file}: {anchor_file.stat().st_size:,} bytes, {anchor.provenance.samples:,} samples")

    print(f"3. Adapt it to {NEW} without the old data, once plainly and once held by the anchor.\n")
    common = {"epochs": 30, "lr": 1e-3, "batch_size": 50, "eval_on": [OLD, NEW], "overwrite": True}
    runs = {
        "plain": ewc.finetune(checkpoint, NEW, output=folder / "plain.pt", **common),
        "with the anchor": ewc.finetune(
            None, NEW, anchors=anchor_file, lambdas=LAMBDA, output=folder / "held.pt", **common
        ),
    }
    print(f"{'fine-tuning':<18}{'retention':>12}{'plasticity':>12}{'mean':>8}")
    before = [score.accuracy for score in runs["plain"].before]
    print(f"{'none (before)':<18}{before[0]:>12.1%}{before[1]:>12.1%}{sum(before) / 2:>8.1%}")
    for name, run in runs.items():
        kept, learned = (score.accuracy for score in run.after)
        print(f"{name:<18}{kept:>12.1%}{learned:>12.1%}{(kept + learned) / 2:>8.1%}")
    draw(runs, folder / "demo.png")
    print(f"\nRetention is the accuracy on {OLD}, plasticity that on {NEW}. The figure: {folder / 'demo.png'}")


def draw(runs: dict[str, ewc.Finetuned], path: Path) -> None:
    """Draw retention and plasticity of both runs over the epochs."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, domain, title in zip(
        panels, (OLD, NEW), ("Retention: the old digits", "Plasticity: turned by 90°"), strict=True
    ):
        for (name, run), color in zip(runs.items(), ("C3", "C0"), strict=True):
            scored = [line for line in run.history if "scores" in line]
            values = [100 * line["scores"][domain]["accuracy"] for line in scored]
            axes.plot([line["epoch"] for line in scored], values, color=color, label=name)
            axes.annotate(
                f"{values[-1]:.0f}",
                (scored[-1]["epoch"], values[-1]),
                xytext=(4, -3),
                textcoords="offset points",
                color=color,
            )
        axes.set(title=title, xlabel="epoch of fine-tuning on the new domain")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set(ylabel="accuracy, %", ylim=(0, 103))
    panels[1].legend(frameon=False, loc="lower right")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
