"""TRL's trainers take the mixin as `Trainer` does."""

import pytest
import torch

import ewc_finetune as ewc

pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")

from support.transformers_models import llama, texts, tokenizer  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from ewc_finetune.integrations.transformers import EwcArguments, EwcMixin  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries


class EwcSFTTrainer(EwcMixin, SFTTrainer):
    pass


def test_supervised_fine_tuning_is_held(tmp_path):
    ids = torch.randint(5, 50, (40, 6), generator=torch.Generator().manual_seed(0))
    anchor = ewc.consolidate(llama(), [({"input_ids": ids}, ids)], curvature="kfac", likelihood="per-token", probe=40)
    away = {}
    for lam in (0.0, 1e4):
        trainer = EwcSFTTrainer(
            llama(),
            SFTConfig(
                str(tmp_path),
                max_steps=6,
                per_device_train_batch_size=4,
                learning_rate=1e-2,
                max_length=16,
                report_to=[],
                use_cpu=True,
                save_strategy="no",
                logging_steps=3,
                bf16=False,
            ),
            train_dataset=datasets.Dataset.from_dict({"text": texts(24)}),
            processing_class=tokenizer(),
            ewc=EwcArguments(anchors=[anchor], lambdas=[lam]),
        )
        trainer.train()
        logged = [line for line in trainer.state.log_history if "loss" in line]
        assert all({"penalty", "retention"} <= set(line) for line in logged)
        away[lam] = ewc.Penalty(trainer.model, anchor, 1.0).value()
    assert away[1e4] < 0.5 * away[0.0]
