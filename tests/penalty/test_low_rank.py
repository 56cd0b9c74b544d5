"""The penalty through LoRA adapters: against autograd on the explicit penalty of the effective weights, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.errors import AnchorMismatchError, UsageError

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:peft")


class Layers(nn.Module):
    """One of each kind that LoRA knows, but for parameters of their own."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 12)
        self.conv = nn.Conv1d(1, 4, 3)
        self.grouped = nn.Conv1d(4, 4, 3, groups=2)
        self.fc = nn.Linear(32, 7)
        self.plain = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        x = self.emb(x).mean(1)
        x = torch.tanh(self.grouped(torch.tanh(self.conv(x[:, None]))))
        return self.head(torch.tanh(self.plain(torch.tanh(self.fc(x.flatten(1))))))


class Turned(nn.Module):
    """Weights that are stored `(inputs, outputs)`, as GPT-2's."""

    def __init__(self):
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.emb = nn.Embedding(11, 5)
        self.fc = Conv1D(7, 5)
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.fc(self.emb(x).mean(1))))


class Experts(nn.Module):
    """Three-dimensional parameters, one matrix to an expert."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 5)
        self.experts = nn.Module()
        self.experts.w = nn.Parameter(torch.randn(2, 5, 3))

    def forward(self, x):
        return torch.einsum("ni,eio->no", self.emb(x).mean(1), self.experts.w)


DATA = TensorDataset(
    torch.randint(0, 11, (40, 4), generator=torch.Generator().manual_seed(0)),
    torch.randint(0, 3, (40,), generator=torch.Generator().manual_seed(1)),
)
ALL = ["emb", "conv", "fc", "plain"]


def made(kind=Layers, dtype=torch.float64):
    torch.manual_seed(0)
    return kind().to(dtype)


def adapted(model, seed=1, **settings):
    """A copy of a model with LoRA, whose adapters add something already."""
    torch.manual_seed(seed)
    settings = {"r": 3, "lora_alpha": 5, "target_modules": ALL, "init_lora_weights": False, **settings}
    return peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**settings)).to(next(model.parameters()).dtype)


def effective(model):
    """The weights as PEFT itself merges them, with the graph that leads to the adapters."""
    found = {}
    for full, module in model.named_modules():
        name = full.removeprefix("base_model.model.").replace(".base_layer", "")
        if isinstance(module, peft.tuners.lora.LoraLayer) and not isinstance(module.base_layer, type(module)):
            base = module.get_base_layer()
            own = "in_proj_weight" if isinstance(base, nn.MultiheadAttention) else "weight"
            own = getattr(module, "parameter_name", own)
            start = f"{name}." if name else ""
            for other, parameter in base.named_parameters(recurse=False):
                found[start + other] = parameter
            active = [one for one in module.active_adapters if one in module.scaling]
            found[start + own] = getattr(base, own) + sum(module.get_delta_weight(one) for one in active)
        elif isinstance(module, peft.utils.other.ModulesToSaveWrapper):
            copy_of = module.modules_to_save[module.active_adapters[0]]
            found |= {f"{name}.{own}": parameter for own, parameter in copy_of.named_parameters()}
    for full, parameter in model.named_parameters():
        name = full.removeprefix("base_model.model.")
        if not any(word in name for word in ("lora_", "base_layer", "modules_to_save", "original_module")):
            found.setdefault(name, parameter)
    return found


def explicit(anchors, lambdas, weights):
    """The penalty as it is written, of whole matrices."""
    total = 0.0
    for anchor, lam in zip(anchors, lambdas, strict=True):
        for name, fisher in anchor.fisher.items():
            total = total + lam / 2 * (fisher.double() * (weights[name] - anchor.weights[name].double()) ** 2).sum()
        for block in anchor.blocks.values():
            weight, bias = weights[block.weight], None if block.bias is None else weights[block.bias]
            away = block.join(weight, bias) - block.join(
                anchor.weights[block.weight].double(), None if bias is None else anchor.weights[block.bias].double()
            )
            total = total + lam / 2 * (away * block.to(away).times(away)).sum()
    return total


def assert_right(model, anchors, lambdas):
    """The value, and the gradient of every parameter that is trained."""
    penalty = ewc.Penalty(model, anchors, lambdas)
    model.zero_grad()
    penalty.add_gradient()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    got = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in trained.items()}
    wanted = explicit(anchors, lambdas, effective(model))
    assert penalty.value() == pytest.approx(float(wanted.detach()), rel=1e-10)
    gradients = torch.autograd.grad(wanted, list(trained.values()), allow_unused=True)
    largest = max(float(one.abs().max()) for one in gradients if one is not None)
    moved = 0
    for (name, own), gradient in zip(got.items(), gradients, strict=True):
        moved += gradient is not None
        expected = torch.zeros_like(own) if gradient is None else gradient
        assert (own - expected).abs().max() <= 1e-10 * largest, name
    assert moved
    return penalty


@pytest.fixture(scope="module")
def anchors():
    model, found = made(), {}
    for name, settings in {
        "diagonal": {},
        "kfac": {"curvature": "kfac", "kfac_rank": "full"},
        "cut": {"curvature": "kfac", "kfac_rank": 2},
    }.items():
        found[name] = ewc.consolidate(model, DATA, **settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    found["newer"] = ewc.consolidate(model, DATA, curvature="kfac", kfac_rank="full")
    found["newer diagonal"] = ewc.consolidate(model, DATA)
    return found


@pytest.mark.parametrize("kinds", [["diagonal"], ["kfac"], ["cut"], ["kfac", "newer"], ["diagonal", "newer diagonal"]])
@pytest.mark.parametrize(
    "settings",
    [{}, {"use_rslora": True}, {"modules_to_save": ["head"]}, {"bias": "lora_only"}, {"target_modules": ["fc"]}],
    ids=lambda settings: next(iter(settings), "plain"),
)
def test_values_and_gradients(kinds, settings, anchors):
    assert_right(adapted(made(), **settings), [anchors[kind] for kind in kinds], [2.0, 0.5][: len(kinds)])


@pytest.mark.parametrize("curvature", ["diagonal", "kfac"])
def test_weights_that_are_stored_the_other_way_round(curvature):
    model = made(Turned)
    anchor = ewc.consolidate(model, DATA, curvature=curvature)
    for block in anchor.blocks.values():
        assert block.transposed == (block.weight == "fc.weight")
    assert_right(adapted(model, target_modules=["emb", "fc"], fan_in_fan_out=True), [anchor], [2.0])


def test_parameters_of_their_own():
    model = made(Experts)
    anchor = ewc.consolidate(model, DATA)
    assert_right(adapted(model, r=2, target_modules=["emb"], target_parameters=["experts.w"]), [anchor], [2.0])


@pytest.mark.parametrize("kind", ["diagonal", "kfac", "cut"])
def test_several_adapters_count_together_as_far_as_they_are_active(kind, anchors):
    model = adapted(made())
    torch.manual_seed(5)
    other = peft.LoraConfig(r=2, lora_alpha=3, target_modules=["fc", "plain"], init_lora_weights=False)
    model.add_adapter("other", other)
    model.double().base_model.set_adapter(["default", "other"])
    assert_right(model, [anchors[kind]], [2.0])
    model.set_adapter("other")
    penalty = assert_right(model, [anchors[kind]], [2.0])
    with model.disable_adapter():
        assert ewc.Penalty(model, anchors[kind], 2.0).value() < 1e-20 < penalty.value()


def test_where_the_base_is_not_the_anchors_weights(anchors):
    """As with PiSSA, which takes out of the base what its adapters begin with."""
    with torch.random.fork_rng():
        model = adapted(made(dtype=torch.float32), init_lora_weights="pissa", target_modules=["fc", "plain"]).double()
    for kind in ("diagonal", "kfac", "cut"):
        assert ewc.Penalty(model, anchors[kind], 2.0).value() < 1e-10
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.mul_(1.1)
    for kind in ("diagonal", "kfac", "cut"):
        assert_right(model, [anchors[kind]], [2.0])


def test_adapters_of_float32_and_bfloat16():
    model = made(dtype=torch.float32)
    for curvature in ("diagonal", "kfac"):
        anchor = ewc.consolidate(model, DATA, curvature=curvature)
        whole = adapted(model).double()
        exact = ewc.Penalty(whole, anchor, 2.0)
        exact.add_gradient()
        for dtype, near in ((torch.float32, 1e-5), (torch.bfloat16, 0.02)):
            half = adapted(model)
            for (name, own), other in zip(half.named_parameters(), whole.parameters(), strict=True):
                if "lora_" in name:
                    own.data = other.data.to(dtype)
            penalty = ewc.Penalty(half, anchor, 2.0)
            penalty.add_gradient()
            for own, other in zip(half.parameters(), whole.parameters(), strict=True):
                if own.grad is not None:
                    assert (own.grad - other.grad).norm() <= near * other.grad.norm()


def test_it_is_attached_to_an_optimizer(anchors):
    runs = []
    for attach in (True, False):
        model = adapted(made())
        optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=0.01)
        penalty = ewc.Penalty(model, anchors["kfac"], 5.0)
        if attach:
            penalty.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(DATA.tensors[0]), DATA.tensors[1]).backward()
            if not attach:
                penalty.add_gradient()
            optimizer.step()
        runs.append([p.detach().clone() for p in model.parameters()])
    assert all(one.equal(other) for one, other in zip(*runs, strict=True))


def test_names_of_what_is_free(anchors):
    model = adapted(made(), modules_to_save=["head"])
    assert ewc.Penalty(model, anchors["diagonal"], 1.0).free == ()
    only = copy.copy(anchors["diagonal"])
    fisher = {name: value for name, value in only.fisher.items() if name.startswith("fc")}
    free = ewc.Penalty(model, ewc.Anchor(**{**vars(only), "fisher": fisher}), 1.0).free
    assert free
    assert not any(".fc." in name for name in free)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda model: adapted(model, use_dora=True, target_modules=["fc"]), "is DoRA, whose weight is not linear"),
        (lambda model: adapted(model, lora_bias=True, target_modules=["fc"]), "has a bias of its own"),
        (
            lambda model: peft.get_peft_model(copy.deepcopy(model), peft.IA3Config(**IA3)),
            "has an adapter of the kind Linear, which a penalty does not know; it knows LoRA on linear layers",
        ),
        (lambda model: adapted(model, r=2, target_modules=["grouped"]), "grouped is a convolution in groups"),
        (lambda model: merged(adapted(model)), "are merged into its weight; call unmerge_adapter() first"),
        (lambda model: thawed(adapted(model)), "is trained itself, beside its adapters"),
    ],
)
def test_what_is_no_lora_is_refused_by_name(change, words, anchors):
    with pytest.raises(UsageError) as raised:
        ewc.Penalty(change(made()), anchors["diagonal"], 1.0)
    assert words in str(raised.value)


IA3 = {"target_modules": ["fc"], "feedforward_modules": []}


def merged(model):
    model.merge_adapter()
    return model


def thawed(model):
    model.base_model.model.fc.base_layer.weight.requires_grad_(True)
    return model


def test_the_proximal_form_is_refused(anchors):
    for kind in ("diagonal", "kfac"):
        with pytest.raises(UsageError, match="is trained through adapters. Use the gradient form"):
            ewc.Penalty(adapted(made()), anchors[kind], 1.0, "proximal")


def test_an_anchor_of_another_model_is_refused():
    model = made(Turned)
    anchor = ewc.consolidate(model, DATA)
    with pytest.raises(AnchorMismatchError, match="does not fit the model"):
        ewc.Penalty(adapted(made()), anchor, 1.0)


class Attention(nn.Module):
    """torch's own attention, whose projections of inputs are one weight."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.emb(x)
        return self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))


@pytest.mark.parametrize("curvature", ["diagonal", "kfac"])
def test_attention_of_torch(curvature):
    model = made(Attention)
    anchor = ewc.consolidate(model, DATA, curvature=curvature)
    assert_right(adapted(model, target_modules=["attention", "emb"]), [anchor], [2.0])
