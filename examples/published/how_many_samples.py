"""How many samples does a Fisher need? MNIST's, from 50 samples to all, and what a fine-tune under it keeps.

The network of the notebook experiment (784-256-128-10) is trained on MNIST; its exact Fisher is taken from ever more of
the training images; each of them holds the network while it learns Fashion-MNIST, with lambda 100. The columns: the
standard error of the trace that the pass itself reports, how far the diagonal is from that of all images (one minus the
cosine of the angle between them), and the accuracies after the fine-tune.

    python examples/published/how_many_samples.py                     about 4 minutes on two cores
    python examples/published/how_many_samples.py --quick             a few seconds, to see that it runs

Writes samples.md to --output (the folder how_many_samples beside this file).
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path

import torch

import ewc_finetune as ewc
from ewc_finetune.checkpoint.builtin_models import MLP
from ewc_finetune.data.sources import load_domain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="where MNIST and FashionMNIST lie (default: $EWC_FT_DATA)")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(""), help="folder")
    parser.add_argument("--quick", action="store_true", help="little data: shows that it runs, no result")
    options = parser.parse_args()
    limit = "?limit=500" if options.quick else ""
    old, new = (load_domain(f"{name}{limit}", "train", options.data_dir) for name in ("mnist", "fmnist"))
    tests = {name: load_domain(f"{name}{limit}", "test", options.data_dir) for name in ("mnist", "fmnist")}
    torch.manual_seed(0)
    model = MLP()
    ewc.finetune(model, old, norm_stats="update", epochs=4, eval_on={})
    counts = (50, 200, 500) if options.quick else (50, 200, 500, 2_000, 10_000, 60_000)
    anchors, seconds = {}, {}
    for count in counts:
        start = time.perf_counter()
        anchors[count] = ewc.consolidate(model, old, samples=count)
        seconds[count] = time.perf_counter() - start
        print(f"{count:,} samples: {seconds[count]:.1f} s", flush=True)
    whole = flat(anchors[counts[-1]])
    columns = ["samples", "standard error of the trace", "distance from all", "MNIST kept", "Fashion-MNIST"]
    rows = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for count, anchor in anchors.items():
        done = ewc.finetune(copy.deepcopy(model), new, anchors=anchor, eval_on=tests)
        kept, learned = (score.accuracy for score in done.after)
        distance = 1 - torch.cosine_similarity(flat(anchor), whole, dim=0).item()
        error = (anchor.provenance.standard_error or {})["trace"]
        rows.append(f"| {count:,} | {error:.1%} | {distance:.4f} | {kept:.3f} | {learned:.3f} |")
        print(rows[-1], flush=True)
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "samples.md").write_text("\n".join(rows) + "\n")
    print(f"\nThe Fisher of {counts[-1]:,} images took {seconds[counts[-1]]:.1f} s. Written to {options.output}")


def flat(anchor: ewc.Anchor) -> torch.Tensor:
    return torch.cat([value.double().flatten() for value in anchor.fisher.values()])


if __name__ == "__main__":
    main()
