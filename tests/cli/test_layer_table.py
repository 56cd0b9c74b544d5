"""Many layers are put together by block, the heaviest first; all of them come with --verbose."""

import inspect
import re
import sys

import pytest
import torch
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.formats.state_dict import save_state_dict
from ewc_finetune.cli.layer_table import block_of, by_block


@pytest.mark.parametrize(
    ("layer", "block"),
    [
        ("bert.encoder.layer.3.attention.self.query", "bert.encoder.layer.3"),
        ("bert.embeddings.word_embeddings", "bert.embeddings"),
        ("bert.pooler.dense", "bert.pooler"),
        ("model.layers.12.mlp.up_proj", "model.layers.12"),
        ("model.norm", "model.norm"),
        ("lm_head", "lm_head"),
        ("layer1.0.conv2", "layer1.0"),
        ("features.7", "features.7"),
        ("features.denseblock1.denselayer2.conv1", "features.denseblock1"),
    ],
)
def test_the_block_of_a_layer(layer, block):
    assert block_of(layer) == block


def test_blocks_have_the_sums_of_their_layers():
    rows = [
        {"layer": "h.0.a", "parameters": 10, "share": 0.1, "mean": 1.0, "max": 3.0},
        {"layer": "h.1.a", "parameters": 10, "share": 0.6, "mean": 6.0, "max": 9.0},
        {"layer": "h.0.b", "parameters": 30, "share": 0.3, "mean": 1.0, "max": 4.0},
    ]
    assert by_block(rows) == [
        {"layer": "h.1", "layers": 1, "parameters": 10, "share": 0.6, "mean": 6.0, "max": 9.0},
        {"layer": "h.0", "layers": 2, "parameters": 40, "share": pytest.approx(0.4), "mean": 1.0, "max": 4.0},
    ]


class Deep(nn.Module):
    """Forty-one layers in ten blocks and a head."""

    def __init__(self, blocks=10):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(6, 6) for _ in range(4)) for _ in range(blocks))
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        for block in self.layers:
            for layer in block:
                x = x + layer(x).tanh()
        return self.head(x)


SOURCE = "import torch\nfrom torch import nn\n\n\n"


@pytest.fixture
def deep(ewc_ft, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "deep", raising=False)  # of another test's folder
    (tmp_path / "deep.py").write_text(SOURCE + inspect.getsource(Deep))
    values = torch.randn(40, 6, generator=torch.Generator().manual_seed(0)).tolist()
    rows = [",".join(f"{value:.3f}" for value in row) for row in values]
    (tmp_path / "data.csv").write_text(
        "a,b,c,d,e,f,label\n" + "".join(f"{row},{n % 3}\n" for n, row in enumerate(rows))
    )

    def consolidate(blocks, *options):
        torch.manual_seed(0)
        save_state_dict(tmp_path / "m.pt", Deep(blocks), ModelMetadata(architecture=f"deep:Deep?blocks={blocks}"))
        return ewc_ft(
            *("consolidate", "m.pt", "--data", "csv:data.csv?target=label", "--overwrite", "-o", "a.safetensors"),
            *options,
        )

    return consolidate


def table(result):
    lines = result.stderr.splitlines()
    start = next(n for n, line in enumerate(lines) if "share of curvature" in line)
    return [lines[start], *(line for line in lines[start + 2 :] if "%" in line and "e" in line and "  " in line)]


def test_consolidate_merge_and_inspect(deep, ewc_ft):
    made = deep(10)
    for result in (made, ewc_ft("inspect", "a.safetensors"), ewc_ft("merge", "a.safetensors", "-o", "b.safetensors")):
        header, *rows = table(result)
        assert header.split()[:2] == ["block", "layers"]
        names, shares = zip(*((row.split()[0], float(row.split()[3].rstrip("%"))) for row in rows[:11]), strict=True)
        assert sorted(names) == sorted([*(f"layers.{n}" for n in range(10)), "head"])
        assert list(shares) == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(100, abs=1)
        assert "41 layers, put together by block, the heaviest first; --verbose has a row for each" in result.stderr
    every = ewc_ft("inspect", "a.safetensors", "--verbose").stderr
    assert "layers.9.3 " in every
    assert "put together" not in every
    few = deep(4)
    assert "layers.3.3 " in few.stderr
    assert "put together" not in few.stderr


def test_more_blocks_than_rows(deep):
    rows = table(deep(30))[1:]
    assert rows[23].startswith("8 more ")
    assert sum(float(row.split("%")[0].split()[-1]) for row in rows[:24]) == pytest.approx(100, abs=2)


def test_factors_and_free_parameters_of_many_layers(deep, ewc_ft):
    said = deep(10, "--curvature", "kfac", "--exclude", "layers.0.*").stderr
    assert re.search(r"left free: (layers\.0\.\d\.\w+, ){4}and 4 more, --exclude layers\.0\.\*", said)
    short, long = (ewc_ft("inspect", "a.safetensors", *more).stderr for more in ((), ("--verbose",)))
    assert "in blocks      37 layers" in short
    assert "  layers.9.3" not in short
    assert "  layers.9.3" in long
    assert "layers.0.3.bias" in long
    assert "layers.0.3.bias" not in short
    assert len(ewc.inspect("a.safetensors").facts) > 37
