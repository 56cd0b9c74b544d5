import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import TensorDataset

from ewc_finetune.cli import main
from ewc_finetune.curvature.engine import Engine
from ewc_finetune.storage.checksums import KEY as CHECKSUMS

# A shell has what it starts in the background ignore Ctrl-C, and what that starts would ignore it too.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def data_dir():
    """The folder with the real MNIST and Fashion-MNIST, or a skip."""
    folder = Path(os.environ.get("EWC_FT_DATA", ""))
    if not (folder / "MNIST" / "raw").is_dir() or not (folder / "FashionMNIST" / "raw").is_dir():
        pytest.skip("EWC_FT_DATA names no folder with MNIST and FashionMNIST")
    return folder


@pytest.fixture
def ewc_ft(tmp_path, monkeypatch):
    """Run a command line in a folder of its own, as a user would."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, expect=0):
        result = CliRunner().invoke(main, [str(a) for a in arguments])
        assert result.exit_code == expect, result.output
        return result

    return run


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A Hub of one's own that the real client talks to, here and in child processes, with the token of one user."""
    from hub_server import TOKEN, USER, HubServer, forget_clients, point_client_at

    # What the client says of its own uploads, which would be an error here.
    warnings.filterwarnings("ignore", "Use 'content=<...>' to upload raw bytes/text content.", DeprecationWarning)
    forget_clients()
    with HubServer() as server:
        server.add_user(USER, TOKEN)
        point_client_at(server, tmp_path / "huggingface", monkeypatch)
        yield server
        forget_clients()
    assert not server.errors, server.errors[0]


def save_changed(tensors, path, metadata):
    """Write a safetensors file as somebody would who changes one: the checksums in its metadata are left out."""
    save_file(tensors, path, {name: text for name, text in metadata.items() if name != CHECKSUMS})


class Small(nn.Module):
    """A little of everything that a classifier may have: 4 numbers in, 3 classes out."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


def trained(model, dtype=torch.float64, seed=0):
    """Give a model weights and statistics that look lived in."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.data = buffer.data.abs() + 0.5
    return model.to(dtype).eval()


@pytest.fixture
def as_they_come(monkeypatch):
    """Have no batches put together: what happens from one chunk to the next is seen on few samples then."""
    monkeypatch.setattr(Engine, "good_size", lambda *_: 1)


@pytest.fixture
def small():
    return trained(Small())


@pytest.fixture
def samples():
    """Fifteen samples for `Small`, float64."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(15, 4, generator=generator, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(0, 3, (15,), generator=generator))
