"""Where an anchor comes from, in words: as `inspect`, the model card and the report have them."""

import pytest

from ewc_finetune.anchor import describe

KFAC = {"curvature": "kfac", "estimator": "sampled", "draws": 3, "standard_error": {"trace": 0.0004}}
MERGED = {"form": "offline", "gamma": None, "lineage": "all", "kfac_sum": "factors", "kfac_distance": {"a": 0.02}}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (describe.data({"spec": "a", "split": "train", "size": 60_000}, 500), "a, train split, 500 of 60,000 samples"),
        (describe.data({"spec": "mnist", "size": 1}), "mnist, 1 sample"),
        (describe.data(None, 80), "80 samples"),
        (describe.curvature(KFAC), "K-FAC blocks and diagonal Fisher"),
        (describe.estimate(KFAC), "sampled, 3 draws, standard error of the trace 0.04%"),
        (describe.estimate({"curvature": "identity", "estimator": "none"}), ""),
        (
            describe.curvature({"curvature": "kfac", "merged": {**MERGED, "parents": [1, 2]}}),
            "K-FAC blocks and diagonal Fisher, merged offline, lineage all, "
            "factors for sums of blocks (off by up to 2%), from 2 anchors",
        ),
        (describe.merging({"form": "online", "gamma": 0.9, "parents": [1]}), "merged online, gamma 0.9, from 1 anchor"),
        (
            describe.parent({"lambda": 2.5, "sha256": "ab", "provenance": {**KFAC, "name": "a", "data": {"size": 9}}}),
            "a, lambda 2.5, 9 samples, K-FAC blocks and diagonal Fisher, sampled, 3 draws, "
            "standard error of the trace 0.04%, SHA-256 ab",
        ),
        (describe.ancestor({"name": "old", "lambda": 100.0, "hub": "hf://a/b@c"}), "old, lambda 100, hf://a/b@c"),
        (describe.normalisation({"layers": ["norm"], "statistics": "frozen"}), "1 layer, running statistics frozen"),
        (describe.scores({"loss": 0.25, "accuracy": 0.9321}), "accuracy 93.21%, loss 0.25"),
        (describe.size(224), "224 bytes"),
        (describe.size(123_456), "0.1 MB"),
    ],
)  # fmt: skip
def test_what_is_said(said, expected):
    assert said == expected


@pytest.mark.parametrize("junk", [None, "x", -1, 1e308, float("nan"), 10**400, [], {}, [1], True, {"a": 1}])
def test_what_somebody_else_wrote_makes_no_traceback(junk):
    for said in (describe.data, describe.normalisation, describe.scores, describe.versions, describe.by_reason):
        said(junk)
        said({"layers": junk, "size": junk, "accuracy": junk, "a": junk})
    for said in (describe.curvature, describe.estimate, describe.ancestor):
        said(dict.fromkeys(("curvature", "draws", "standard_error", "name", "lambda", "estimator"), junk))
    describe.merging({"parents": [], "gamma": junk, "kfac_distance": junk, "kfac_sum": junk})
    describe.parent({"provenance": dict.fromkeys(("name", "data", "samples", "curvature", "draws"), junk)})
