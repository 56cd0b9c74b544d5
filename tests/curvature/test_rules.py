"""Every rule, and what makes rules hard, against a slow, obvious float64 loop over single samples."""

import warnings

import pytest
import torch
import torch.utils.checkpoint
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models import trained
from torch import nn
from torch.nn import functional

import ewc_finetune as ewc
from ewc_finetune.curvature.fisher import compute_fisher
from ewc_finetune.curvature.plan import make_plan
from ewc_finetune.curvature.rules import FORMS, MODULE_RULES
from ewc_finetune.errors import ArchitectureError
from ewc_finetune.likelihood.categorical import Categorical

pytestmark = pytest.mark.usefixtures("as_they_come")


def by_hand(model, inputs, targets):
    """Differentiate log p(y | x) one sample at a time; the empirical Fisher, without anything of the engine's."""
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for n, target in enumerate(targets):
        one = {k: v[n : n + 1] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[n : n + 1]
        outputs = model(**one) if isinstance(inputs, dict) else model(one)
        outputs = outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]
        log_p = outputs.log_softmax(dim=-1).flatten()[target]
        for name, g in zip(
            parameters, torch.autograd.grad(log_p, list(parameters.values()), allow_unused=True), strict=True
        ):
            if g is not None:
                total[name] += g**2
    return {name: value / len(targets) for name, value in total.items()}


def agrees(model, inputs, targets, ruled=None, batch_size=4, tolerance=1e-10):
    """Compare the engine with the loop; `ruled` says how many parameters must have gone by rules, all unless given."""
    model.eval()
    expected = by_hand(model, inputs, targets)
    starts = range(0, len(targets), batch_size)

    def part(start):
        cut = slice(start, start + batch_size)
        return {k: v[cut] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[cut]

    batches = [(part(start), targets[start : start + batch_size]) for start in starts]
    found = compute_fisher(model, batches, Categorical(), "empirical")
    # Behind a normalisation a scale may have no gradient but rounding.
    floor = 1e-12 * max(value.max() for value in expected.values())
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=floor)
        assert ((found.values[name] - value).abs().max() / scale).item() < tolerance, (name, found.path)
    plan = make_plan(model, dict(model.named_parameters()), part(0))
    assert len(plan.ruled) == (len(expected) if ruled is None else ruled), found.path
    assert "another course" not in found.path
    # The exact estimator goes another way through the same uses: many vectors, and squares of G at the outputs.
    exact = compute_fisher(model, batches, Categorical(), "exact").values
    total = {name: torch.zeros_like(value) for name, value in exact.items()}
    logits = torch.cat([_logits(model, inputs_) for inputs_, _ in batches])
    for label in range(logits.shape[1]):
        weights = logits.softmax(dim=1)[:, label].detach()
        each = [by_hand(model, part_of(inputs, n), torch.tensor([label])) for n in range(len(targets))]
        for name in total:
            total[name] += sum(w * one[name] for w, one in zip(weights, each, strict=True)) / len(targets)
    for name, value in total.items():
        scale = value.abs().max().clamp(min=floor)
        assert ((exact[name] - value).abs().max() / scale).item() < tolerance, (name, found.path)


def part_of(inputs, n):
    return {k: v[n : n + 1] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[n : n + 1]


def _logits(model, inputs):
    outputs = model(**inputs) if isinstance(inputs, dict) else model(inputs)
    return outputs if isinstance(outputs, torch.Tensor) else outputs["logits"]


def draw(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def labels(count, classes=3, seed=2):
    return torch.randint(0, classes, (count,), generator=torch.Generator().manual_seed(seed))


class Pooled(nn.Module):
    """Some layers, and whatever they return brought to three logits by a mean over all but the channels."""

    def __init__(self, *layers, channels, channel_dim=1):
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.channel_dim = channel_dim
        self.head = nn.Linear(channels, 3)

    def forward(self, x):
        x = self.layers(x).movedim(self.channel_dim, 1)
        return self.head(x.flatten(2).tanh().mean(2) if x.ndim > 2 else x.tanh())


LAYERS = {
    "linear": (lambda: Pooled(nn.Linear(4, 5), channels=5), (4,)),
    "linear on sequences": (lambda: Pooled(nn.Linear(4, 5), channels=5, channel_dim=2), (6, 4)),
    "linear on two sequences": (lambda: Pooled(nn.Linear(4, 5), channels=5, channel_dim=3), (2, 3, 4)),
    "conv1d": (lambda: Pooled(nn.Conv1d(2, 5, 3, stride=2, padding=1), channels=5), (2, 9)),
    "conv2d": (lambda: Pooled(nn.Conv2d(2, 5, 3), channels=5), (2, 6, 5)),
    "conv2d, one position": (lambda: Pooled(nn.Conv2d(2, 5, 3), channels=5), (2, 3, 3)),
    "conv2d, 1 by 1, stride": (lambda: Pooled(nn.Conv2d(3, 5, 1, stride=2), channels=5), (3, 6, 5)),
    "conv2d, many channels": (lambda: Pooled(nn.Conv2d(128, 128, 3, padding=1), channels=128), (128, 9, 9)),
    "conv2d, large maps": (lambda: Pooled(nn.Conv2d(6, 5, 3, padding=2, dilation=2), channels=5), (6, 9, 9)),
    "conv2d, uneven": (
        lambda: Pooled(nn.Conv2d(2, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), channels=4),
        (2, 7, 6),
    ),
    "conv2d, groups": (lambda: Pooled(nn.Conv2d(4, 6, 3, groups=2, padding=1), channels=6), (4, 5, 5)),
    "conv2d, depthwise": (lambda: Pooled(nn.Conv2d(4, 4, 3, groups=4, stride=2), channels=4), (4, 6, 6)),
    "conv2d, same": (lambda: Pooled(nn.Conv2d(2, 4, 3, padding="same"), channels=4), (2, 5, 5)),
    "conv2d, same, uneven sides": (
        lambda: Pooled(nn.Conv2d(2, 4, (4, 3), padding="same", dilation=(1, 2)), channels=4),
        (2, 6, 7),
    ),
    "conv2d, valid": (lambda: Pooled(nn.Conv2d(2, 4, 3, padding="valid"), channels=4), (2, 5, 5)),
    "conv2d, circular": (lambda: Pooled(nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular"), channels=4), (2, 5, 5)),
    "conv3d": (lambda: Pooled(nn.Conv3d(2, 4, 2, padding=1), channels=4), (2, 3, 4, 3)),
    "conv transpose 1d": (lambda: Pooled(nn.ConvTranspose1d(2, 4, 3, stride=2), channels=4), (2, 5)),
    "conv transpose 2d": (
        lambda: Pooled(
            nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2), channels=6
        ),
        (4, 4, 4),
    ),
    "conv transpose 3d": (lambda: Pooled(nn.ConvTranspose3d(2, 3, 2), channels=3), (2, 2, 3, 2)),
    "layer norm": (lambda: Pooled(nn.LayerNorm(4), channels=4, channel_dim=2), (6, 4)),
    "layer norm over two": (lambda: Pooled(nn.LayerNorm((3, 4)), channels=3), (3, 4)),
    "rms norm": (lambda: Pooled(nn.RMSNorm(4), channels=4, channel_dim=2), (6, 4)),
    "group norm": (lambda: Pooled(nn.GroupNorm(2, 4), channels=4), (4, 3, 3)),
    "instance norm": (lambda: Pooled(nn.InstanceNorm2d(3, affine=True), channels=3), (3, 4, 4)),
    "instance norm with statistics": (
        lambda: Pooled(nn.InstanceNorm2d(3, affine=True, track_running_stats=True), channels=3),
        (3, 4, 4),
    ),
    "batch norm": (lambda: Pooled(nn.BatchNorm2d(3), channels=3), (3, 4, 4)),
    "batch norm of vectors": (lambda: Pooled(nn.BatchNorm1d(4), channels=4), (4,)),
    "prelu": (lambda: Pooled(nn.PReLU(3), channels=3), (3, 4)),
    "prelu with one weight": (lambda: Pooled(nn.PReLU(), channels=4), (4,)),
}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    build, shape = LAYERS[name]
    agrees(trained(build()), draw(5, *shape), labels(5))


class Tokens(nn.Module):
    """A weight that embeds and reads out, positions, a scale and a bias: a very small language model's parts."""

    def __init__(self, padding=None):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=padding)
        self.place = nn.Parameter(torch.zeros(1, 5, 4))
        self.start = nn.Parameter(torch.zeros(1, 1, 4))
        self.scale = nn.Parameter(torch.zeros(4))
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(7, 3)

    def forward(self, tokens):
        h = self.embed(tokens) + self.place[:, :0].sum() + self.place
        h = torch.cat([self.start.expand(len(h), -1, -1), h], dim=1)
        h = h + self.scale * self.mix(h).tanh()
        return self.head(functional.linear(h, self.embed.weight).tanh().mean(1))


class Positions(nn.Module):
    """Embeddings of positions, which are the same for all samples."""

    def __init__(self, places, change=lambda rows: rows):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.place = nn.Embedding(5, 4)
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, 3)
        self.places = places
        self.change = change

    def forward(self, tokens):
        h = self.norm(self.embed(tokens) + self.change(self.place(self.places)))
        return self.head(h.tanh().mean(1))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(4))
        self.shift = nn.Parameter(torch.zeros(3, 1))
        self.everywhere = nn.Parameter(torch.zeros(()))
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):  # (batch, 3, 4)
        x = torch.cat([self.token.expand(len(x), -1, -1), (x * self.scale + self.shift).tanh()], dim=1)
        x = self.everywhere * x
        x += self.shift[0]
        return self.head(x.mean(1))


class Functional(nn.Module):
    """Weights that no module owns the use of, and products written out."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.zeros(4, 5))
        self.b = nn.Parameter(torch.zeros(6, 5))
        self.c = nn.Parameter(torch.zeros(6))
        self.d = nn.Parameter(torch.zeros(6, 3))

    def forward(self, x):
        x = (x @ self.a).tanh()
        x = functional.linear(x, self.b, self.c).tanh()
        return torch.addmm(self.c[:3], x, self.d)


class SharedBias(nn.Module):
    """Biases that share one tensor, and a layer used three times on its own output."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.two = nn.Linear(4, 4)
        self.two.bias = self.one.bias
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        for _ in range(3):
            x = self.one(x).tanh()
        return self.head(self.two(x).tanh())


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.second = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = functional.leaky_relu(self.first(x), 0.2, inplace=True)
        x = functional.elu(self.norm(x), inplace=True).mean((2, 3))
        y = self.second(x)
        y += x
        y.mul_(2).relu_()
        return self.head(y)


class TimeFirst(nn.Module):
    """The batch in the second dimension, and folded with time in both orders."""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.major = nn.Linear(4, 4)
        self.minor = nn.Linear(4, 4)
        self.image = nn.Conv1d(1, 2, 2)
        self.head = nn.Linear(4, 3)

    def forward(self, x):  # (batch, time, 4)
        x = self.one(x.transpose(0, 1))
        time, batch = x.shape[:2]
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.minor(x.reshape(time * batch, 4)).tanh().view(time, batch, 4).transpose(0, 1)
        x = self.major(x.reshape(batch * time, 4)).tanh()
        x = x + self.image(functional.pad(x[:, None], (0, 1))).mean(1)
        return self.head(x.view(batch, time, 4).mean(1))


class Dictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.number = nn.Linear(2, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens, numbers):
        h = self.embed(tokens).mean(1) + self.number(numbers)
        return {"hidden": h, "logits": self.head(h.tanh())}


class Dead(nn.Module):
    """Layers whose output goes nowhere, and one that is never called."""

    def __init__(self):
        super().__init__()
        self.lost = nn.LSTM(4, 4)
        self.used = nn.Linear(4, 3)
        self.dead = nn.Linear(4, 3)
        self.never = nn.Linear(4, 3)

    def forward(self, x):
        self.lost(x)
        self.dead(x)
        return self.used(x)


def tokens(count, seed=3):
    return torch.randint(0, 7, (count, 5), generator=torch.Generator().manual_seed(seed))


HARD = {
    # name: model, inputs, how many parameters go by rules (None for all)
    "tied embedding": (Tokens, lambda: tokens(5), 7),
    "tied embedding with padding": (lambda: Tokens(padding=2), lambda: tokens(5), 7),
    "positions looked up once": (lambda: Positions(torch.arange(5)[None]), lambda: tokens(5), 5),
    "positions without a batch": (lambda: Positions(torch.arange(5)), lambda: tokens(5), 5),
    "positions that must be single": (
        lambda: Positions(torch.arange(5)[None], lambda rows: rows.view(5, 4)),
        lambda: tokens(5),
        4,
    ),
    "scales and biases": (Scaled, lambda: draw(5, 3, 4), 5),
    "functional": (Functional, lambda: draw(5, 4), 3),
    "shared bias, repeated layer": (SharedBias, lambda: draw(5, 4), None),
    "in place": (InPlace, lambda: draw(5, 2, 5, 5), None),
    "time first": (TimeFirst, lambda: draw(5, 3, 4), None),
    "dictionary": (
        Dictionary,
        lambda: {
            "tokens": torch.randint(0, 5, (5, 3), generator=torch.Generator().manual_seed(0)),
            "numbers": draw(5, 2),
        },
        None,
    ),
    "dead and unused": (Dead, lambda: draw(5, 4), 2),
    "transformer": (
        lambda: Pooled(
            nn.TransformerEncoderLayer(4, 2, 6, batch_first=True), nn.LayerNorm(4), channels=4, channel_dim=2
        ),
        lambda: draw(5, 3, 4),
        None,
    ),
    "weight norm": (
        lambda: Pooled(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), channels=5),
        lambda: draw(5, 4),
        3,
    ),
    "lstm": (lambda: Pooled(Last(), channels=4), lambda: draw(5, 3, 2), 2),
    "TorchScript": (
        lambda: Pooled(traced(nn.Linear(4, 4)), nn.Linear(4, 4), channels=4),
        lambda: draw(5, 4),
        4,
    ),
}


def traced(module):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.trace(module.double(), draw(2, 4))


class LastOf(nn.Module):
    """Needs the fallback: the last row, through an LSTM."""

    def __init__(self):
        super().__init__()
        self.last = nn.LSTM(4, 4, batch_first=True)

    def forward(self, x):
        return self.last(x)[0][:, -1]


class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(2, 4, batch_first=True)

    def forward(self, x):
        return self.lstm(x)[0][:, -1]


@pytest.mark.parametrize("name", HARD)
def test_hard_cases(name):
    build, inputs, ruled = HARD[name]
    model = trained(build())
    agrees(model, inputs(), labels(5), ruled)


def test_zero_batch_norm_weights():
    """A residual block often starts, or is pruned, with a scale of zero; its gradient is not."""
    model = trained(InPlace())
    model.norm.weight.data.zero_()
    agrees(model, draw(5, 2, 5, 5), labels(5))
    assert compute_fisher(model, [(draw(5, 2, 5, 5), labels(5))], Categorical()).values["norm.weight"].min() > 0


def test_a_model_that_overwrites_its_inputs():
    model = trained(Pooled(nn.ReLU(inplace=True), nn.Linear(4, 4), LastOf(), channels=4))
    inputs = draw(5, 2, 4)
    found = compute_fisher(model, [(inputs.clone(), labels(5))], Categorical(), "empirical")
    expected = by_hand(model, inputs.clone(), labels(5))
    for name, value in expected.items():
        torch.testing.assert_close(found.values[name], value, rtol=1e-10, atol=1e-14)


class Routed(nn.Module):
    """Each sample goes to one of two layers; which ones are called depends on the batch."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        out = torch.zeros_like(x)
        for expert, chosen in zip(self.experts, (x[:, 0] > 0, x[:, 0] <= 0), strict=True):
            if chosen.any():
                out[chosen] = expert(x[chosen])
        return self.head(out.tanh())


class ByLength(nn.Module):
    """What is long goes through a layer more."""

    def __init__(self):
        super().__init__()
        self.short, self.long, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        h = self.short(x).tanh()
        return self.head((self.long(h) if x.shape[1] > 2 else h).mean(1))


class Packed(nn.Module):
    """Lays the tokens that are not padding (0) end to end: samples have different numbers of rows."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, tokens):
        real = tokens > 0
        mixed = torch.zeros(*tokens.shape, 4, dtype=torch.float64)
        mixed[real] = self.mix(self.embed(tokens[real])).tanh()
        return self.head(mixed.sum(1))


class Chunked(nn.Module):
    """Cuts the batch in pieces by itself."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.cat([self.inner(part) for part in x.split(3)]).tanh())


class Sorting(nn.Module):
    """Uses a weight on the samples in their order and in another."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        order = x[:, 0].argsort()
        back = self.inner(x[order])[order.argsort()]
        return self.head((back + self.inner(x * 2)).tanh())


class Hidden(nn.Module):
    """Holds a weight in a list, where torch.func cannot replace it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))
        self.kept = [self.weight]
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head((x * self.kept[0] ** 2).tanh())


class Forces(nn.Module):
    """Differentiates by its own inputs on the way."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.inner(x).tanh().sum(), x, create_graph=True)
        return self.head(slope)


class TimeMajor(nn.Module):
    """Folds (time, batch), without a bias that would tell where a blank sample is."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(4, 4, bias=False), nn.Linear(4, 3)

    def forward(self, x):
        folded = x.transpose(0, 1).reshape(-1, 4)
        return self.head(self.inner(folded).tanh().view(x.shape[1], len(x), 4).mean(0))


def signs(*values):
    x = draw(len(values), 4)
    x[:, 0] = torch.tensor(values, dtype=torch.float64)
    return x


def increasing(*shape):
    x = draw(*shape)
    return x[x[:, 0].argsort()]


def padded(*lengths):
    tokens = torch.randint(1, 7, (len(lengths), 4), generator=torch.Generator().manual_seed(0))
    return tokens.where(torch.arange(4) < torch.tensor(lengths)[:, None], 0)


UNLIKE = {
    # What later samples do, the first ones did not. name: model, batches
    "another expert": (Routed, [signs(1, 1, 1), signs(-1, -1), signs(1, -1, 1)]),
    "another expert within a batch": (Routed, [signs(1, -1, 1, 1)]),
    "longer": (ByLength, [draw(2, 2, 4), draw(3, 3, 4), draw(2, 2, 4)]),
    "packed, all alike first": (Packed, [padded(4, 4, 4), padded(4, 2, 3), padded(1, 1, 4)]),
    "packed, dividing evenly": (Packed, [padded(4, 4, 2, 2, 3, 3)]),
    "pieces of the batch": (Chunked, [draw(2, 4), draw(10, 4), draw(3, 4)]),
    "out of order": (Sorting, [draw(8, 4)]),
    "hidden": (Hidden, [draw(5, 4)]),
    "forces": (Forces, [draw(5, 4)]),
    "blank first": (
        TimeMajor,
        [torch.cat([torch.zeros(1, 3, 4).double(), draw(3, 3, 4), torch.zeros(1, 3, 4).double()])],
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_samples_unlike_the_first(name):
    build, batches = UNLIKE[name]
    model = trained(build())
    found = compute_fisher(model, [(x, labels(len(x))) for x in batches], Categorical(), "empirical")
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x in batches:
        for n, value in by_hand(model, x, labels(len(x))).items():
            expected[n] += value * len(x) / found.samples
    for n, value in expected.items():
        torch.testing.assert_close(found.values[n], value, rtol=1e-9, atol=1e-14, msg=f"{n}: {found.path}")


def test_samples_that_change_places_unseen_are_found_out():
    """In order at first, and then not: no shape and no call tells, but single samples are compared as it goes."""
    model = trained(Sorting())
    batches = [increasing(4, 4), increasing(4, 4), draw(8, 4, seed=5), draw(8, 4, seed=6), draw(8, 4, seed=7)]
    data = [(x, labels(len(x))) for x in batches]
    with pytest.raises(ArchitectureError, match=r"wrong for one after sample \d+: .* Run again without rules"):
        compute_fisher(model, data, Categorical(), "empirical")
    found = compute_fisher(model, data, Categorical(), "empirical", rules=False)
    expected = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
    for x, y in data:
        for n, value in by_hand(model, x, y).items():
            expected[n] += value * len(x) / found.samples
    for n, value in expected.items():
        torch.testing.assert_close(found.values[n], value, rtol=1e-9, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "size", "rest"),
    [
        ("resnet18", 64, 0),
        ("mobilenet_v3_small", 64, 0),
        ("efficientnet_b0", 64, 0),
        ("convnext_tiny", 32, 0),
        ("vit_b_16", 32, 0),
        ("swin_t", 32, 12),
    ],
)
def test_whole_models_of_torchvision(name, size, rest):
    options = {"image_size": size} if name == "vit_b_16" else {}
    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None, num_classes=3, **options).double().eval()
    for tensor_name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point():
            tensor.data += 0.02 * torch.randn_like(tensor)
        if tensor_name.endswith("running_var"):
            tensor.data.abs_().add_(0.5)
    inputs, targets = draw(3, 3, size, size), labels(3)
    found = compute_fisher(model, [(inputs, targets)], Categorical(), "empirical").values
    expected = by_hand(model, inputs, targets)
    for parameter, value in expected.items():
        scale = value.abs().max().clamp(min=1e-300)
        assert ((found[parameter] - value).abs().max() / scale).item() < 1e-10, parameter
    plan = make_plan(model, dict(model.named_parameters()), inputs)
    assert len(plan.rest) == rest


@st.composite
def architectures(draw_):
    """A random small network on images: convolutions, norms, activations, then vectors; layers may come twice."""
    channels, layers = 2, []
    for _ in range(draw_(st.integers(1, 4))):
        kind = draw_(st.sampled_from(["conv", "norm", "group", "prelu", "relu", "transpose", "again"]))
        if kind == "conv":
            groups = draw_(st.sampled_from([g for g in (1, 2) if channels % g == 0]))
            wider = groups * draw_(st.integers(1, 3))
            kernel, padding = draw_(st.sampled_from([(1, 0), (2, 1), (3, 1)]))
            layers.append(
                nn.Conv2d(
                    channels, wider, kernel, draw_(st.integers(1, 2)), padding, groups=groups, bias=draw_(st.booleans())
                )
            )
            channels = wider
        elif kind == "transpose":
            layers.append(nn.ConvTranspose2d(channels, 2, 2, stride=draw_(st.integers(1, 2))))
            channels = 2
        elif kind == "again":
            again = nn.Conv2d(channels, channels, 3, padding=1)
            layers += [again, nn.Tanh(), again]
        else:
            made = {
                "norm": nn.BatchNorm2d(channels),
                "group": nn.GroupNorm(1, channels),
                "prelu": nn.PReLU(channels),
                # In place where autograd allows it: nothing before it needs what it overwrites.
                "relu": nn.ReLU(inplace=bool(layers) and not isinstance(layers[-1], (nn.ReLU, nn.Tanh))),
            }
            layers.append(made[kind])
    return trained(Pooled(*layers, channels=channels), seed=draw_(st.integers(0, 100)))


@settings(max_examples=40, deadline=None)
@given(model=architectures(), samples=st.integers(1, 5), batch_size=st.integers(1, 5))
def test_random_small_architectures(model, samples, batch_size):
    agrees(model, draw(samples, 2, 5, 5), labels(samples), batch_size=batch_size)


@settings(max_examples=40, deadline=None)
@given(
    dim=st.integers(0, 2),
    minor=st.booleans(),
    batch=st.integers(2, 4),
    single=st.lists(st.integers(1, 3), min_size=3, max_size=3),
)
def test_the_batch_dim_is_found_and_brought_to_the_front(dim, minor, batch, single):
    from ewc_finetune.curvature.batch_dims import BatchFirst, find_batch_dim

    singles = [draw(*single, seed=n) for n in range(batch)]
    folded = torch.stack(singles, dim=dim + 1).flatten(dim, dim + 1)
    batched = folded if minor else torch.cat(singles, dim=dim)
    found = find_batch_dim(batched, singles)
    assert found is not None
    assert torch.equal(BatchFirst(found, batch)(batched), torch.stack(singles))


class Quadratic(nn.Module):
    """What no rule knows: the weight enters squared."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        return x * self.weight**2


@pytest.fixture
def registered():
    yield ewc.register_rule(Quadratic)
    MODULE_RULES.pop(Quadratic, None)


def test_a_rule_of_a_users_own(registered):
    model = Pooled(nn.Linear(4, 4), Quadratic(), channels=4)
    agrees(trained(model), draw(5, 4), labels(5), ruled=4)  # the fallback without a rule
    agrees(trained(Pooled(nn.Linear(4, 4), Quadratic(), channels=4, channel_dim=2)), draw(5, 3, 4), labels(5), ruled=4)

    @registered
    def rule(module, inputs, gradient):
        (x,) = inputs
        each = 2 * module.weight * x * gradient
        return {"weight": each if each.ndim == 2 else each.flatten(1, -2).sum(1)}

    agrees(trained(model), draw(5, 4), labels(5))
    agrees(trained(Pooled(nn.Linear(4, 4), Quadratic(), channels=4, channel_dim=2)), draw(5, 3, 4), labels(5))
    ewc.check_rule(trained(Quadratic()), draw(3, 4))
    for seed in range(20):
        ewc.check_rule(trained(Quadratic(), torch.float32, seed=seed), draw(8, 4, seed=seed).float())


def test_a_wrong_rule_is_found_out(registered):
    @registered
    def rule(module, inputs, gradient):
        return {"weight": inputs[0] * gradient}  # not the derivative of a square

    agrees(trained(Pooled(Quadratic(), channels=4)), draw(5, 4), labels(5), ruled=2)
    with pytest.raises(
        AssertionError, match=r"weight: the rule and autograd differ by .* of the norm, in torch.float64"
    ):
        ewc.check_rule(trained(Quadratic()), draw(3, 4))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model = trained(Pooled(Quadratic(), channels=4)).to(dtype)
        plan = make_plan(model, dict(model.named_parameters()), draw(2, 4).to(dtype))
        assert plan.rest["layers.0.weight"] == "has a rule that differs from autograd"

    @registered
    def failing(module, inputs, gradient):
        raise AttributeError("no such thing")

    model = trained(Pooled(Quadratic(), channels=4))
    reasons = make_plan(model, dict(model.named_parameters()), draw(2, 4)).rest
    assert reasons == {"layers.0.weight": "has a rule that fails with AttributeError: no such thing"}

    @registered
    def other(module, inputs, gradient):
        return {"weight": gradient.sum(0)}

    with pytest.raises(AssertionError, match=r"weight: the rule's gradients have shape \(4,\); expected \(3, 4\)"):
        ewc.check_rule(trained(Quadratic()), draw(3, 4))


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm_in_its_cheaper_form_is_batch_norm(shape, affine):
    norm = nn.BatchNorm1d(3, affine=affine).double()
    norm.running_mean, norm.running_var = torch.randn(3).double(), torch.rand(3).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    args = (x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    expected, found = functional.batch_norm(*args), FORMS[functional.batch_norm](*args)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    g = torch.randn(shape, dtype=torch.float64)
    by_form, by_torch = (torch.autograd.grad(outputs, x, g)[0] for outputs in (found, expected))
    torch.testing.assert_close(by_form, by_torch, rtol=1e-12, atol=1e-12)
    # Rounding would not be the same in half precision, nor would it have a gradient where none flows on.
    for other in (x.detach(), x.detach().bfloat16().requires_grad_()):
        args = tuple(None if t is None else t.detach().to(other.dtype) for t in args[1:])
        args = (other, *args)
        assert torch.equal(FORMS[functional.batch_norm](*args), functional.batch_norm(*args))


def test_cheaper_forms_are_left_out_where_the_model_is_run_again():
    """A checkpoint that recomputes compares what is saved; the form saves other things."""

    class Recomputing(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.body, x, use_reentrant=False)

    model, inputs = trained(Recomputing()), torch.randn(4, 4, dtype=torch.float64)
    plan = make_plan(model, dict(model.named_parameters()), inputs)
    assert not plan.forms
    assert not plan.rest
    assert make_plan(model.body, dict(model.body.named_parameters()), inputs).forms
