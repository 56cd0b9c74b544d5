"""A program for torchrun, or for one process: trains a small model by a trainer that is named, and saves it."""

import os
import sys
import warnings
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
warnings.simplefilter("ignore")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import ewc_finetune as ewc  # noqa: E402


def by_trainer(anchor, batch, folder):
    from integrations.test_trainer import InOrder, arguments, rows, still

    from ewc_finetune.integrations.transformers import EwcArguments

    more = {"ddp_backend": "gloo"} if "RANK" in os.environ else {}
    trainer = InOrder(
        still(),
        arguments(folder, per_device_train_batch_size=batch, max_grad_norm=0.1, **more),
        train_dataset=rows(24),
        ewc=EwcArguments(anchors=[anchor], lambdas=[50.0]),
    )
    trainer.train()
    return trainer.model


def by_accelerate(anchor, batch, folder):
    from accelerate import Accelerator
    from integrations.test_lightning import NEW, net

    accelerator = Accelerator(cpu=True)
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(NEW, batch))
    ewc.Penalty(model, anchor, 50.0).attach(optimizer)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    way, anchor, batch, output = sys.argv[1:]
    trained = globals()[way](anchor, int(batch), Path(output).with_suffix(""))
    if int(torch.distributed.get_rank() if torch.distributed.is_initialized() else 0) == 0:
        torch.save(trained.state_dict(), output)
