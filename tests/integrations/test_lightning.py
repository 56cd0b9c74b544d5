"""Lightning with the callback ends where a plain loop with `Penalty` does, and keeps what it says of it."""

import copy

import pytest
import torch
from support.domains import blobs
from torch import nn
from torch.utils.data import DataLoader

import ewc_finetune as ewc
from ewc_finetune.checkpoint.open import load_checkpoint
from ewc_finetune.errors import AnchorMismatchError, UsageError
from ewc_finetune.integrations.arguments import EwcArguments

lightning = pytest.importorskip("lightning.pytorch")
from ewc_finetune.integrations.lightning import EwcCallback  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries

NEW = blobs(shift=2.0, seed=1, n=40)


class Module(lightning.LightningModule):
    def __init__(self, model, manual=False, known=True):
        super().__init__()
        self.model = model
        self.automatic_optimization = not manual
        self.known = known

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers(use_pl_optimizer=self.known)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


@pytest.fixture(scope="module")
def anchors():
    model = net()
    return {kind: ewc.consolidate(model, blobs(), curvature=kind, probe=48) for kind in ("diagonal", "kfac")}


def fit(module, ewc_arguments, folder, *, steps=10, callback=None, ckpt=None, **more):
    callback = callback or EwcCallback(ewc_arguments)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
        **{"enable_checkpointing": False, "log_every_n_steps": 5, **more},
    )
    trainer.fit(module, DataLoader(NEW, 4), DataLoader(NEW, 20), ckpt_path=ckpt)
    return trainer


def by_hand(anchor, *, steps=10, accumulate=1, clip=None, amp=None):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    penalty = ewc.Penalty(model, anchor, 50.0)
    batches = [batch for _ in range(10) for batch in DataLoader(NEW, 4)]
    for step in range(steps):
        optimizer.zero_grad()
        for x, y in batches[step * accumulate : (step + 1) * accumulate]:
            with torch.autocast("cpu", torch.bfloat16, enabled=amp is not None):
                loss = nn.functional.cross_entropy(model(x), y)
            (loss / accumulate).backward()
        penalty.add_gradient()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model, other, near=1e-6):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=near, atol=near)


@pytest.mark.parametrize("kind", ["diagonal", "kfac"])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"gradient_clip_val": 0.1}, {"clip": 0.1}),
        ({"accumulate_grad_batches": 2}, {"accumulate": 2}),
        ({"precision": "bf16-mixed"}, {"amp": torch.bfloat16}),
    ],
    ids=["plain", "clip", "accumulate", "bf16"],
)
def test_it_is_the_plain_loop(kind, theirs, ours, anchors, tmp_path):
    module = Module(net())
    fit(module, EwcArguments(anchors=[anchors[kind]], lambdas=[50.0]), tmp_path, **theirs)
    assert_same(module.model, by_hand(anchors[kind], **ours))


def test_manual_optimization_is_the_same(anchors, tmp_path):
    module = Module(net(), manual=True)
    fit(module, EwcArguments(anchors=[anchors["kfac"]], lambdas=[50.0]), tmp_path)
    assert_same(module.model, by_hand(anchors["kfac"]))


def test_a_step_that_lightning_does_not_know_of_is_refused(anchors, tmp_path):
    module = Module(net(), manual=True, known=False)
    with pytest.raises(UsageError, match=r"take it from self.optimizers\(\)"):
        fit(module, EwcArguments(anchors=[anchors["kfac"]]), tmp_path)
    assert_same(module.model, net())


def test_what_is_logged_and_saved(anchors, tmp_path):
    module = Module(net())
    trainer = fit(module, EwcArguments(anchors=[anchors["diagonal"]]), tmp_path)
    assert trainer.callback_metrics["penalty"] > 0
    assert 0 <= trainer.callback_metrics["retention"] <= 1
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    checkpoint = load_checkpoint(tmp_path / "new.ckpt")
    assert [entry["name"] for entry in checkpoint.metadata.lineage] == [anchors["diagonal"].provenance.name]


def test_it_goes_on_to_the_same_weights(anchors, tmp_path):
    held = EwcArguments(anchors=[anchors["diagonal"]], rehearse=["probes"], rehearse_batch=4)
    whole, first, second = Module(net()), Module(net()), Module(net())
    fit(whole, held, tmp_path, steps=20)
    fit(first, held, tmp_path, steps=10).save_checkpoint(tmp_path / "half.ckpt")
    fit(second, held, tmp_path, steps=20, ckpt=tmp_path / "half.ckpt")
    assert_same(second.model, whole.model)


def test_what_is_wrong_is_said_before_the_first_step(anchors, tmp_path):
    module = Module(net())
    with pytest.raises(UsageError, match="name anchors"):
        fit(module, EwcArguments(), tmp_path)
    with torch.no_grad():
        far = Module(copy.deepcopy(net()))
        for parameter in far.parameters():
            parameter.normal_()
    with pytest.raises(AnchorMismatchError, match="the model's weights are not those"):
        fit(far, EwcArguments(anchors=[anchors["diagonal"]]), tmp_path)
