import os
import signal
import warnings
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from support.models import Small, trained
from torch.utils.data import TensorDataset

from ewc_finetune.cli import main
from ewc_finetune.curvature.engine import Engine

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
