"""One model for several anchors, against dense float64 algebra."""

from dataclasses import replace

import pytest
import torch
from support.kronecker import dense, make_anchor, psd, whole
from support.models import trained
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.curvature.kronecker_factors import DenseFactor
from ewc_finetune.penalty.merged_model import DAMPING, merged_model
from ewc_finetune.progress import Silent


def slow(anchors, strengths, layer):
    """Where the layer's matrix is to be, by one system of equations for all its weights."""
    left, right = 0.0, 0.0
    for anchor, strength in zip(anchors, strengths, strict=True):
        block = anchor.blocks[layer]
        output = block.output.scaled(block.output.size / block.output.trace)
        # Where both factors are cut, small pairs of directions are told apart less finely (`Block.terms`).
        both = strength * whole(replace(block, input=block.input.damped(DAMPING), output=output.damped(DAMPING)))
        bias = None if block.bias is None else anchor.weights[block.bias]
        left, right = left + both, right + both @ block.join(anchor.weights[block.weight], bias).double().flatten()
    return torch.linalg.solve(left, right).view(block.output.size, block.input.size)


@pytest.mark.parametrize("rank", [None, 1, 3])
def test_damping_adds_so_much_of_the_mean_eigenvalue(rank):
    factor = psd(6, 0) if rank is None else psd(6, 0).truncated(rank)
    matrix = factor.matrix()
    found = factor.damped(0.25).matrix()
    torch.testing.assert_close(found, matrix + 0.25 * matrix.trace() / 6 * torch.eye(6, dtype=torch.float64))
    torch.testing.assert_close(factor.matrix(), matrix, rtol=0, atol=0)


@pytest.mark.parametrize("truncate", [None, 0.8])
@pytest.mark.parametrize("strengths", [(1.0, 1.0), (0.1, 30.0), (1.0, 2.0, 3.0)])
def test_each_layer_is_where_damped_blocks_of_one_size_pull_least(strengths, truncate):
    model = trained(dense(), torch.float32)
    anchors = [make_anchor(model, seed, truncate=truncate) for seed in range(len(strengths))]
    found = merged_model(anchors, strengths, Silent())
    for layer, block in anchors[0].blocks.items():
        bias = None if block.bias is None else found[block.bias]
        expected = slow(anchors, strengths, layer)
        torch.testing.assert_close(block.join(found[block.weight], bias).double(), expected, rtol=1e-3, atol=1e-4)


def test_how_sure_a_network_was_says_nothing():
    model = trained(dense(), torch.float32)
    one, other = (make_anchor(model, seed) for seed in (0, 1))
    sure = {layer: replace(block, output=block.output.scaled(1e-6)) for layer, block in other.blocks.items()}
    expected, found = (merged_model([one, a], [1.0, 1.0], Silent()) for a in (other, replace(other, blocks=sure)))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_a_layer_that_an_anchor_has_nothing_for_is_the_others():
    model = trained(dense(), torch.float32)
    one, other = (make_anchor(model, seed) for seed in (0, 1))
    idle = {
        layer: replace(block, output=DenseFactor(torch.zeros(block.output.size, block.output.size)))
        for layer, block in other.blocks.items()
        if layer == "2"
    }
    found = merged_model([one, replace(other, blocks=dict(other.blocks) | idle)], [1.0, 1.0], Silent())
    torch.testing.assert_close(found["2.weight"], one.weights["2.weight"], rtol=1e-4, atol=1e-5)


def test_a_merge_writes_this_model_and_keeps_the_exact_centre_in_its_anchor(tmp_path):
    torch.manual_seed(0)
    model = trained(dense(), torch.float32)
    anchors = [make_anchor(model, seed) for seed in (0, 1)]
    merged = ewc.merge(
        anchors, lambdas=[2.0, 1.0], checkpoint=tmp_path / "m.pt", architecture="test_merged_model:dense"
    )
    written = torch.load(tmp_path / "m.pt", weights_only=True)
    expected = merged_model(anchors, [2.0, 1.0], Silent())
    assert all(torch.equal(written[name], value) for name, value in expected.items())
    exact = ewc.merge(anchors, lambdas=[2.0, 1.0])
    assert all(torch.equal(merged.weights[name], value) for name, value in exact.weights.items())
    assert any((written[name] - value).abs().max() > 1e-3 for name, value in exact.weights.items())


def test_the_running_form_writes_the_newest_model(tmp_path):
    model = trained(dense(), torch.float32)
    anchors = [make_anchor(model, seed) for seed in (0, 1)]
    ewc.merge(anchors, online=True, checkpoint=tmp_path / "m.pt", architecture="test_merged_model:dense")
    written = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(written[name], value) for name, value in anchors[1].weights.items())


def test_of_an_expanded_head_the_new_outputs_are_the_newer_ones(tmp_path):
    short, long = (trained(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, n)), torch.float32) for n in (3, 4))
    anchors = [make_anchor(short, 0), make_anchor(long, 1)]
    found = merged_model(anchors, [1.0, 1.0], Silent(), growing={"2.weight", "2.bias"})
    assert found["2.weight"].shape == (4, 5)
    between = (found["0.weight"] - anchors[1].weights["0.weight"]).abs().max()
    assert 0 < between < (anchors[0].weights["0.weight"] - anchors[1].weights["0.weight"]).abs().max()
