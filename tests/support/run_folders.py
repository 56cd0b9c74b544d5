"""Run folders as `finetune` writes them, made by hand."""

import json
import math

VERSIONS = {"ewc_finetune": "0.1.0", "torch": "2.9.0", "numpy": "2.3.0", "python": "3.11.7"}
LAYERS = [("hidden.0", 200_960), ("hidden.1", 512), ("hidden.3", 32_896), ("hidden.4", 256), ("output", 1_290)]
SHARES, MOVES = (0.412, 0.021, 0.356, 0.018, 0.193), (0.043, 0.112, 0.071, 0.094, 0.208)


def score(domain, accuracy, loss=None, perplexity=None, samples=10_000):
    if loss is None:
        loss = -math.log(max(accuracy, 1e-3)) + 0.05
    return {"domain": domain, "samples": samples, "loss": loss, "accuracy": accuracy, "perplexity": perplexity}


def origin(name="mnist", **changes):
    return {
        "name": name,
        "created": "2026-01-04T09:12:00+00:00",
        "versions": {"ewc_finetune": "0.1.0", "torch": "2.9.0"},
        "checkpoint": {"file": "model.pt", "sha256": "3f" * 32, "format": "state dict", "architecture": "mlp"},
        "data": {"spec": name, "split": "train", "size": 60_000, "fingerprint": "9c" * 32},
        "likelihood": "categorical",
        "estimator": "exact",
        "draws": None,
        "samples": 10_000,
        "standard_error": {"trace": 0.021, "layers": {}},
        "curvature": "diagonal",
        "merged": None,
        "importance": [
            {"layer": layer, "parameters": size, "share": share, "mean": share / size, "max": 1.0}
            for (layer, size), share in zip(LAYERS, SHARES, strict=True)
        ],
        "excluded": {},
        "normalisation": {"statistics": "frozen", "layers": ["hidden.1", "hidden.4"]},
        "lineage": [],
        "scores": {"loss": 0.0612, "accuracy": 0.9761},
    } | changes  # fmt: skip


def anchor(name="mnist", strength=100.0, **changes):
    return {
        "file": f"{name}.anchor.safetensors",
        "sha256": "a7" * 32,
        "lambda": strength,
        "provenance": origin(name, **changes),
    }


def history(before, after, epochs=4, steps=600, penalty=True):
    """Yield lines that go from the scores before to those after."""
    yield {"step": 0, "epoch": 0, "scores": {s["domain"]: s for s in before}}
    for epoch in range(1, epochs + 1):
        for step in range((epoch - 1) * steps + 50, epoch * steps + 1, 50):
            wave = 1 + 0.06 * math.sin(step / 37)
            yield {
                "step": step,
                "epoch": epoch,
                "loss": (0.42 + 1.6 * math.exp(-step / 260)) * wave,
                "penalty": 0.034 * (1 - math.exp(-step / 300)) * wave if penalty else 0.0,
                "lr": 1e-4,
            }
        gone = (1 - math.exp(-1.3 * epoch)) / (1 - math.exp(-1.3 * epochs))
        scores = {}
        for old, new in zip(before, after, strict=True):
            between = {
                key: None if new[key] is None else old[key] + (new[key] - old[key]) * gone
                for key in ("loss", "accuracy", "perplexity")
            }
            scores[new["domain"]] = new | between
        yield {"step": epoch * steps, "epoch": epoch, "scores": scores}


def write_run(path, lines=None, **changes):
    """Write a run folder; a change of None leaves that key out."""
    before = changes.pop("before", [score("mnist", 0.9761), score("fmnist", 0.0812)])
    after = changes.pop("after", [score("mnist", 0.9331), score("fmnist", 0.8534)])
    anchors = changes.pop("anchors", [anchor()])
    data = changes.pop("data", "fmnist")
    strengths = [a["lambda"] for a in anchors] or None
    options = {
        "model": None,
        "anchors": [a["file"] for a in anchors],
        "data": data,
        "lambda": strengths,
        "tolerance": 0.02,
        "penalty-form": "gradient",
        "epochs": 4,
        "lr": 1e-4,
        "batch-size": 100,
        "optimizer": "adam",
        "momentum": 0.9,
        "norm-stats": None,
        "eval": ["mnist", "fmnist"],
        "seed": 0,
        "output": "model-fmnist.pt",
    } | changes.pop("options", {})  # fmt: skip
    held = "".join(f" --anchors {a['file']} --lambda {a['lambda']:g}" for a in anchors)
    document = {
        "format": "ewc-run",
        "format_version": 1,
        "status": "finished",
        "started": "2026-01-05T10:00:00+00:00",
        "ended": "2026-01-05T10:00:21+00:00",
        "options": options,
        "command": f"ewc-ft finetune{held} --data {data} --eval mnist --eval fmnist --output model-fmnist.pt",
        "folder": "/home/someone/models",
        "found": {
            "model": "model.pt",
            "checkpoint": {"sha256": "3f" * 32, "architecture": "mlp?hidden=256,128"},
            "anchors": anchors,
            "data": {"spec": data, "split": "train", "size": 60_000, "digest": "51" * 32},
            "eval": [{"spec": s["domain"], "split": "test", "size": s["samples"]} for s in after or []],
            "input": {"shape": [784]},
            "likelihood": "categorical",
            "norm_stats": "frozen",
            "parameters": 235_914,
            "lambda_search": changes.pop("search", None),
        }
        | changes.pop("found", {}),
        "versions": VERSIONS,
        "platform": "Linux-6.1-x86_64",
        "steps": 2_400,
        "seconds": 12.3,
        "before": before,
        "after": after,
        "retention": None,
        "layers": [
            {
                "layer": layer,
                "parameters": size,
                "share": share if anchors else None,
                "moved": moved,
                "penalty": 0.01 * share,
            }
            for (layer, size), share, moved in zip(LAYERS, SHARES, MOVES, strict=True)
        ],
    } | changes
    path.mkdir(parents=True)
    document = {key: value for key, value in document.items() if value is not None or key == "retention"}
    (path / "run.json").write_text(json.dumps(document, indent=2))
    if lines is None:
        lines = list(history(before or [], after or [], penalty=bool(anchors)))
    text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
    (path / "metrics.jsonl").write_text(text)
    return path


# lambda: kept and learned, as measured on MNIST, then Fashion-MNIST
FRONTIER = {
    10: (0.673, 0.865),
    30: (0.817, 0.861),
    50: (0.884, 0.859),
    80: (0.920, 0.853),
    100: (0.933, 0.853),
    200: (0.956, 0.847),
    300: (0.964, 0.843),
    1000: (0.972, 0.829),
    3000: (0.975, 0.817),
}
KFAC = {1: (0.942, 0.868), 3: (0.965, 0.868), 10: (0.973, 0.865), 30: (0.976, 0.862), 100: (0.976, 0.856)}


def write_plain(folder, **changes):
    after = changes.pop("after", [score("mnist", 0.4381), score("fmnist", 0.8684)])
    found = {"checkpoint": {"sha256": "3f" * 32, "architecture": "mlp?hidden=256,128"}}
    options = {"model": "model.pt", **changes.pop("options", {})}
    return write_run(folder, anchors=[], after=after, found=found, options=options, **changes)


def write_sweep(folder, kfac=True):
    """Write a folder of runs: the frontier of MNIST, then Fashion-MNIST."""
    for strength, (kept, learned) in FRONTIER.items():
        after = [score("mnist", kept), score("fmnist", learned)]
        write_run(folder / f"diagonal-{strength}.run", anchors=[anchor(strength=float(strength))], after=after)
    for strength, (kept, learned) in KFAC.items() if kfac else ():
        after = [score("mnist", kept), score("fmnist", learned)]
        anchors = [anchor(strength=float(strength), curvature="kfac")]
        write_run(folder / f"kfac-{strength}.run", anchors=anchors, after=after)
    write_plain(folder / "plain.run")
    return folder


def search(watched=True):
    """Return the search for a lambda, of which the old domain was watched or was not."""
    found = {3.1: (0.61, 0.861), 12.4: (0.79, 0.857), 49.6: (0.902, 0.846), 24.8: (0.861, 0.853), None: (0.47, 0.862)}
    return {
        "lambda": 49.6,
        "met": True,
        "trials": [
            {
                "lambda": strength,
                "within": True,
                "score": score("held out", learned),
                "watched": [score("mnist", kept), score("fmnist", learned)] if watched else [],
            }
            for strength, (kept, learned) in found.items()
        ],
    }


def write_language_model(folder, name, strength, kept, learned):
    return write_run(
        folder / name,
        data="hf:prose.jsonl?text=text&pack=128",
        anchors=[anchor("code", strength, likelihood="per-token")] if strength else [],
        before=[score("hf:code.jsonl?text=text&pack=128", 0.41, 3.78, 43.9),
                score("hf:prose.jsonl?text=text&pack=128", 0.2, 5.27, 195.0)],
        after=[score("hf:code.jsonl?text=text&pack=128", 0.38, math.log(kept), kept),
               score("hf:prose.jsonl?text=text&pack=128", 0.3, math.log(learned), learned)],
    )  # fmt: skip
