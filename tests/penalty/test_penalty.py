"""The penalty of summed quadratics against the plain sum over anchors, by autograd in float64."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from support.anchors import loop_over_anchors, make_anchor, stacks
from support.models import Small, trained
from torch import nn

import ewc_finetune as ewc
from ewc_finetune import Anchor, Penalty, Provenance
from ewc_finetune.anchor.compatibility import remarks
from ewc_finetune.errors import AnchorMismatchError, NonFiniteError, UsageError
from ewc_finetune.penalty.quadratic import spread_lambdas, sum_quadratics


@pytest.mark.parametrize("x", [1e-12, 3e-8, 1.5e-7, 1e-6, 1e-3, 1.0, 1e6])
def test_the_proximal_step_is_exact_however_small(x):
    """In float32 too: what one step moves is `x / (1 + x)` of the way, and many small ones add up."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    anchor = Anchor({"weight": torch.ones(1, 1)}, {"weight": torch.ones(1, 1)}, {}, Provenance("a"))
    Penalty(model, anchor, 1.0, "proximal").proximal_step(x)
    assert model.weight.item() == pytest.approx(x / (1 + x), rel=1e-6)


@pytest.mark.parametrize("form", ["gradient", "proximal"])
def test_a_float64_model_under_a_float32_anchor(form):
    """It keeps its precision, and where the curvature is 0 nothing moves."""
    model = trained(nn.Linear(4, 3))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    weights = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in before.items()}
    fisher = {"weight": torch.zeros(3, 4), "bias": torch.ones(3)}
    penalty = Penalty(model, Anchor(weights, fisher, {}, Provenance("a")), 2.0, form)
    assert penalty.value() == pytest.approx(before["bias"].square().sum().item(), rel=1e-12)
    if form == "gradient":
        penalty.add_gradient()
        torch.testing.assert_close(model.bias.grad, 2 * before["bias"], rtol=1e-12, atol=0)
    else:
        penalty.proximal_step(0.5)
        assert torch.equal(model.weight, before["weight"])
        torch.testing.assert_close(model.bias.detach(), before["bias"] / 2, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_anchors_stay_as_they_are(dtype):
    model = trained(nn.Linear(3, 2), dtype)
    anchors = [make_anchor(model, seed) for seed in range(3)]
    anchors = [replace(a, fisher={n: f.to(dtype) for n, f in a.fisher.items()}) for a in anchors]
    copies = [({**a.weights}, {**a.fisher}) for a in copy.deepcopy(anchors)]
    values = {Penalty(model, anchors, 3.0).value() for _ in range(2)}
    merged = ewc.merge(anchors)
    ewc.merge(anchors, online=True, gamma=0.5)
    values |= {Penalty(model, anchors, 3.0).value(), Penalty(model, anchors, 3.0).value()}
    assert len(values) == 1
    assert Penalty(model, merged, 3.0).value() == pytest.approx(values.pop(), rel=1e-5)
    for anchor, (weights, fisher) in zip(anchors, copies, strict=True):
        assert all(torch.equal(anchor.weights[name], weights[name]) for name in weights)
        assert all(torch.equal(anchor.fisher[name], fisher[name]) for name in fisher)


@pytest.mark.parametrize("lam", [1e39, 10**400])
def test_a_lambda_beyond_the_numbers(lam):
    model = nn.Linear(2, 2)
    with pytest.raises((NonFiniteError, UsageError), match="too large for"):
        Penalty(model, make_anchor(model, 0), lam)


@settings(max_examples=60, deadline=None)
@given(stacks)
def test_agrees_with_the_loop_over_anchors(stack):
    model = trained(Small(), torch.float32)
    anchors = [make_anchor(model, seed, zeros=zeros, missing=missing) for seed, zeros, missing, _ in stack]
    lambdas = [lam for *_, lam in stack]
    penalty = Penalty(model, anchors, lambdas)
    expected = loop_over_anchors(model, anchors, lambdas)
    assert penalty.value() == pytest.approx(expected.item(), rel=1e-5, abs=1e-12)
    gradients = torch.autograd.grad(expected, list(model.parameters()), allow_unused=True)
    penalty.add_gradient()
    # The terms of a sum may cancel, so errors are measured against its terms.
    scale = sum(lambdas) or 1.0
    for (name, p), g in zip(model.named_parameters(), gradients, strict=True):
        found = torch.zeros_like(p) if p.grad is None else p.grad
        wanted = torch.zeros_like(p) if g is None else g
        torch.testing.assert_close(
            found / scale, wanted / scale, rtol=1e-5, atol=3e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_a_step_with_a_closure(make):
    """As Lightning steps: the gradients come within the step, and the pull after them."""

    def run(closure):
        model = trained(Small(), torch.float32)
        optimizer = make(model.parameters(), lr=0.1)
        Penalty(model, make_anchor(model, 3), 2.0).attach(optimizer)

        def backward():
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            return loss

        for _ in range(3):
            if closure:
                assert optimizer.step(backward) > 0
                assert optimizer.step(closure=backward) > 0
            else:
                for _ in range(2):
                    backward()
                    optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_lbfgs_finds_the_minimum_of_both():
    model = nn.Linear(1, 1, bias=False).double()
    anchor = Anchor({"weight": torch.tensor([[1.0]]).double()}, {"weight": torch.tensor([[1.0]])}, {}, Provenance("a"))
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=10)
    Penalty(model, anchor, 3.0).attach(optimizer)

    def closure():
        optimizer.zero_grad()
        loss = (0.5 * (model.weight - 5) ** 2).sum()
        loss.backward()
        return loss

    for _ in range(30):
        optimizer.step(closure)
    assert model.weight.item() == pytest.approx((5 + 3 * 1) / (1 + 3), rel=1e-3)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_the_scaler_skips_moves_nothing(fused):
    model = trained(nn.Linear(3, 2), torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    Penalty(model, make_anchor(model, 0), 1.0, form="proximal").attach(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = model.weight.detach().clone()
    scaler.scale(model(torch.full((2, 3), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(model.weight, before)


def test_parameters_that_are_frozen_later_count_but_do_not_move():
    model = trained(nn.Linear(3, 2), torch.float32)
    penalty = Penalty(model, make_anchor(model, 0), 1.0)
    value = penalty.value()
    model.weight.requires_grad_(False)
    penalty.add_gradient()
    assert model.weight.grad is None
    assert penalty.value() == value


def test_one_anchor_keeps_its_centre_to_the_bit():
    model = trained(Small(), torch.float32)
    anchor = make_anchor(model, 3)
    quadratic = sum_quadratics([anchor], [1e4])
    assert all(torch.equal(quadratic.centre[n], anchor.weights[n]) for n in quadratic.centre)
    assert quadratic.constant == {}


def test_the_penalty_is_zero_where_the_anchor_is():
    model = trained(Small(), torch.float32)
    anchor = make_anchor(model, 3)
    model.load_state_dict(anchor.weights, strict=False)
    penalty = Penalty(model, anchor, 1e9)
    assert penalty.value() == 0
    penalty.add_gradient()
    assert all((p.grad == 0).all() for p in model.parameters())


def test_where_nothing_holds_the_newest_anchor_stays():
    model = nn.Linear(1, 1, bias=False)
    anchors = [make_anchor(model, seed, zeros=1.1) for seed in (0, 1)]
    assert torch.equal(sum_quadratics(anchors, [1.0, 1.0]).centre["weight"], anchors[1].weights["weight"])


def test_the_gradient_adds_to_what_is_there():
    model = trained(nn.Linear(3, 2), torch.float32)
    anchor = make_anchor(model, 0)
    model(torch.ones(1, 3)).sum().backward()
    task = {n: p.grad.clone() for n, p in model.named_parameters()}
    Penalty(model, anchor, 2.0).add_gradient()
    for name, p in model.named_parameters():
        pull = 2.0 * anchor.fisher[name] * (p.detach() - anchor.weights[name])
        torch.testing.assert_close(p.grad, task[name] + pull)


def test_frozen_parameters_are_left_alone_and_unheld_ones_named():
    model = trained(Small(), torch.float32)
    model.first.bias.requires_grad_(False)
    penalty = Penalty(model, make_anchor(model, 0, missing=["last.bias"]), 1.0)
    penalty.add_gradient()
    assert model.first.bias.grad is None
    assert model.last.bias.grad is None
    assert penalty.free == ("last.bias",)


def test_half_precision_weights():
    model = trained(nn.Linear(3, 2), torch.bfloat16)
    anchor = make_anchor(model, 0)
    penalty = Penalty(model, anchor, 1.0)
    assert penalty.value() == pytest.approx(loop_over_anchors(model, [anchor], [1.0]).item(), rel=1e-5)
    penalty.add_gradient()
    assert model.weight.grad.dtype == torch.bfloat16
    wanted = anchor.fisher["weight"] * (model.weight.detach().float() - anchor.weights["weight"].float())
    torch.testing.assert_close(model.weight.grad.float(), wanted, rtol=0.01, atol=1e-3)


def test_training_under_a_large_lambda_stays_near_the_anchor():
    """The minimum of loss + penalty is known for least squares; gradient descent has to find it."""
    model = nn.Linear(1, 1, bias=False).double()
    anchor = Anchor({"weight": torch.tensor([[1.0]]).double()}, {"weight": torch.tensor([[1.0]])}, {}, Provenance("a"))
    penalty = Penalty(model, anchor, 3.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        (0.5 * (model.weight - 5) ** 2).sum().backward()
        penalty.add_gradient()
        optimizer.step()
    assert model.weight.item() == pytest.approx((5 + 3 * 1) / (1 + 3), rel=1e-9)


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, [1.0, -0.1]])
def test_bad_lambdas(bad):
    with pytest.raises(UsageError, match="expected a finite number, 0 or above"):
        spread_lambdas(bad, 2)


def test_the_number_of_lambdas():
    assert spread_lambdas(3, 2) == [3.0, 3.0]
    assert spread_lambdas([1, 2], 2) == [1.0, 2.0]
    with pytest.raises(UsageError, match="3 lambdas for 2 anchors"):
        spread_lambdas([1, 2, 3], 2)


def test_anchors_that_fit_nothing():
    model, other = trained(nn.Linear(3, 2), torch.float32), trained(nn.Linear(3, 4), torch.float32)
    anchor = make_anchor(other, 0)
    with pytest.raises(AnchorMismatchError, match=r"weight has shape \(4, 3\) in the anchor and \(2, 3\) in the model"):
        Penalty(model, anchor, 1.0)
    with pytest.raises(AnchorMismatchError, match=r"it holds first\.weight \(6, 4\), which the model does not have"):
        Penalty(model, make_anchor(trained(Small()), 0), 1.0)
    with pytest.raises(AnchorMismatchError, match="anchors of different models"):
        sum_quadratics([make_anchor(model, 0), anchor], [1.0, 1.0])
    with pytest.raises(AnchorMismatchError, match="likelihood gaussian"):
        sum_quadratics([make_anchor(model, 0, likelihood="gaussian"), make_anchor(model, 1)], [1.0, 1.0])


def test_remarks_on_what_counts_twice():
    model = nn.Linear(1, 1)
    first = make_anchor(model, 0, digest="aa")
    second = make_anchor(model, 1, digest="bb", lineage=[{"name": "domain 0", "sha256": "aa", "lambda": 1.0}])
    assert remarks([first, make_anchor(model, 2, digest="cc")]) == []
    assert "same anchor" in remarks([first, first])[0]
    assert "counts twice in part" in remarks([first, second])[0]


def optimizers(parameters, lr=0.1):
    parameters = list(parameters)
    return {
        "sgd": torch.optim.SGD(parameters, lr=lr, momentum=0.5),
        "adam": torch.optim.Adam(parameters, lr=lr),
        "adamw": torch.optim.AdamW(parameters, lr=lr),
        "rmsprop": torch.optim.RMSprop(parameters, lr=lr),
    }


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop"])
def test_attached_is_as_added_by_hand(name):
    """Over steps of two backward passes each: the pull counts once for a step."""
    x = torch.randn(8, 4)

    def run(attached):
        model = trained(Small(), torch.float32)
        penalty = Penalty(model, make_anchor(model, 3), 2.0)
        optimizer = optimizers(model.parameters())[name]
        if attached:
            penalty.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            for part in x.split(4):
                model(part).square().sum().backward()
            if not attached:
                penalty.add_gradient()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(True), run(False), strict=True))


def test_detached_it_pulls_no_more():
    model = trained(nn.Linear(3, 2), torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = Penalty(model, make_anchor(model, 0), 1.0)
    handle = penalty.attach(optimizer)
    with pytest.raises(UsageError, match="is attached to this optimizer already"):
        penalty.attach(optimizer)
    handle.remove()
    before = model.weight.detach().clone()
    optimizer.zero_grad()
    optimizer.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("form", ["gradient", "proximal"])
def test_it_pulls_until_the_end_of_a_block(form):
    model = trained(nn.Linear(3, 2), torch.float32)
    weight, bias = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())

    def moved():
        before = [p.detach().clone() for p in model.parameters()]
        for optimizer in (weight, bias):
            optimizer.step()
        return [not torch.equal(p, then) for p, then in zip(model.parameters(), before, strict=True)]

    with Penalty(model, make_anchor(model, 0), 1.0, form).attach(weight) as attached:
        assert attached.penalty.value() > 0
        assert moved() == [True, False]
        model.zero_grad()
    assert moved() == [False, False]
    attached.remove()  # once more does nothing
    attached.penalty.attach(weight).remove()
    with Penalty(model, make_anchor(model, 0), 1.0, form) as penalty:
        penalty.attach(weight)
        penalty.attach(bias)
        assert moved() == [True, True]
        model.zero_grad()
    assert moved() == [False, False]


def test_each_optimizer_pulls_its_own_parameters():
    model = trained(nn.Linear(3, 2), torch.float32)
    penalty = Penalty(model, make_anchor(model, 0), 1.0)
    weight, bias = (torch.optim.SGD([p], lr=0.1) for p in model.parameters())
    penalty.attach(weight)
    penalty.attach(bias)
    expected = [p.detach() - 0.1 * g for p, g in zip(model.parameters(), pulls(penalty, model), strict=True)]
    weight.step()
    bias.step()
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.detach(), wanted)
    with pytest.raises(UsageError, match="none of the parameters"):
        penalty.attach(torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1))
    with pytest.raises(UsageError, match="LBFGS takes many steps in one"):
        Penalty(model, make_anchor(model, 0), 1.0, form="proximal").attach(torch.optim.LBFGS(model.parameters()))


def pulls(penalty, model):
    """The penalty's gradient alone."""
    model.zero_grad()
    penalty.add_gradient()
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return found


def test_a_scaled_loss():
    """As `torch.amp.GradScaler` scales it: whoever unscales later must not shrink the pull."""
    model = trained(nn.Linear(3, 2), torch.float32)
    penalty = Penalty(model, make_anchor(model, 0), 1.0)
    expected = pulls(penalty, model)
    penalty.add_gradient(loss_scale=1024.0)
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad / 1024, wanted)
        p.grad.zero_()
    penalty.add_gradient(loss_scale=torch.tensor(1024.0))
    for p, wanted in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad / 1024, wanted)


@pytest.mark.parametrize("fused", [False, True])
def test_with_the_grad_scaler(fused):
    """With float32 everywhere the scaler changes nothing, whether it or the fused optimizer takes the scale away."""

    def run(scaled):
        model = trained(nn.Linear(3, 2), torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
        Penalty(model, make_anchor(model, 0), 1.0).attach(optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=scaled)
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 3)).square().sum()).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    for a, b in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(a, b)


def test_the_proximal_step_is_the_minimum_it_claims_to_be():
    """Of penalty + |theta - theta'|^2 / (2 lr): its gradient is zero there."""
    model = trained(Small(), torch.float64)
    anchor, lr, lam = make_anchor(model, 1, zeros=0.3), 0.3, 7.0
    before = [p.detach().clone() for p in model.parameters()]
    Penalty(model, anchor, lam, form="proximal").proximal_step(lr)
    for (name, p), old in zip(model.named_parameters(), before, strict=True):
        slope = lam * anchor.fisher[name].double() * (p - anchor.weights[name]) + (p - old) / lr
        torch.testing.assert_close(slope, torch.zeros_like(p), rtol=0, atol=1e-12)
        assert torch.equal(p[anchor.fisher[name] == 0], old[anchor.fisher[name] == 0])


def test_attached_in_the_proximal_form():
    model = trained(nn.Linear(3, 2), torch.float32)
    anchor = make_anchor(model, 0)
    groups = [{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.5}]
    optimizer = torch.optim.SGD(groups, lr=1.0)
    Penalty(model, anchor, 2.0, form="proximal").attach(optimizer)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    model(torch.ones(1, 3)).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    optimizer.step()
    for (name, p), lr in zip(model.named_parameters(), (0.1, 0.5), strict=True):
        stepped = before[name] - lr * gradients[name]
        wanted = anchor.weights[name] + (stepped - anchor.weights[name]) / (1 + lr * 2.0 * anchor.fisher[name])
        torch.testing.assert_close(p.detach(), wanted)
        assert torch.equal(p.grad, gradients[name])


def test_stable_at_any_lambda_where_the_gradient_form_is_not():
    """lr lambda F = 10: the gradient form overshoots further each time, the proximal one converges."""

    def run(form):
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(2.0)
        anchor = Anchor({"weight": torch.ones(1, 1)}, {"weight": torch.ones(1, 1)}, {}, Provenance("a"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        penalty = Penalty(model, anchor, 100.0, form)
        penalty.attach(optimizer)
        assert penalty.largest_curvature() == ("weight", 100.0)
        for _ in range(20):
            optimizer.zero_grad()
            (0.5 * (model.weight - 5) ** 2).sum().backward()
            optimizer.step()
        return model.weight.item()

    assert abs(run("gradient")) > 1e6
    assert run("proximal") == pytest.approx((5 + 100 * 1) / (1 + 100), rel=0.01)


def test_the_proximal_form_in_half_precision():
    model = trained(nn.Linear(3, 2), torch.bfloat16)
    anchor = make_anchor(model, 0)
    before = model.weight.detach().float()
    Penalty(model, anchor, 2.0, form="proximal").proximal_step(0.5)
    wanted = anchor.weights["weight"].float() + (before - anchor.weights["weight"].float()) / (
        1 + anchor.fisher["weight"]
    )
    torch.testing.assert_close(model.weight.detach().float(), wanted, rtol=0.01, atol=0.01)


def test_large_and_oddly_laid_out_tensors():
    """Cut into pieces, and not contiguous: the numbers are those of the definition."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {"long": nn.Linear(300, 2000), "image": nn.Conv2d(64, 128, 3).to(memory_format=torch.channels_last)}
    )
    anchor = make_anchor(model, 0)
    expected = loop_over_anchors(model, [anchor], [3.0])
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    penalty = Penalty(model, anchor, 3.0)
    assert penalty.value() == pytest.approx(expected.item(), rel=1e-6)
    penalty.add_gradient()
    for p, g in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_sparse_gradients():
    model = nn.Embedding(5, 3, sparse=True)
    anchor = make_anchor(model, 0)
    model(torch.tensor([1, 1])).sum().backward()
    task = model.weight.grad.to_dense()
    Penalty(model, anchor, 1.0).add_gradient()
    pull = anchor.fisher["weight"] * (model.weight.detach() - anchor.weights["weight"])
    torch.testing.assert_close(model.weight.grad, task + pull)


def test_files_in_place_of_anchors(tmp_path):
    model = trained(nn.Linear(3, 2), torch.float32)
    anchor = make_anchor(model, 0).save(tmp_path / "a.safetensors")
    assert Penalty(model, str(anchor.path), 2.0).value() == Penalty(model, [anchor], 2.0).value()
    with pytest.raises(UsageError, match="penalty form is 'implicit'"):
        Penalty(model, anchor, 1.0, form="implicit")
