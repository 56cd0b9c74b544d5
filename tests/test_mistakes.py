"""What is wrong is said all at once: an output that exists hides no other mistake."""

import numpy as np
import pytest
import torch
from support.domains import noise
from support.models import Small, trained

import ewc_finetune as ewc
from ewc_finetune.errors import DataError, Mistakes, SeveralError, StorageError, UsageError


def test_one_is_raised_as_it_is_and_several_together():
    mistakes, only = Mistakes(), DataError("no data")
    with mistakes.noted():
        raise only
    with pytest.raises(DataError) as one:
        mistakes.check()
    assert one.value is only
    with mistakes.noted():
        raise UsageError("no option")
    with pytest.raises(SeveralError) as several:
        mistakes.check()
    assert str(several.value) == "2 things are wrong:\n- no data\n- no option"
    assert [type(error) for error in several.value.errors] == [DataError, UsageError]
    assert several.value.exit_code == 2
    with pytest.raises(ZeroDivisionError), Mistakes().noted():  # what nobody foresaw ends it at once
        raise ZeroDivisionError
    Mistakes().check()


def test_consolidate(tmp_path, ewc_ft):
    (tmp_path / "a.safetensors").write_bytes(b"")
    output = ("-o", "a.safetensors")
    result = ewc_ft("consolidate", "gone.pt", "--data", "digit", *output, "--rtol", 7, expect=2).stderr
    for said in ("4 things are wrong:", "a.safetensors exists", "rtol is 7", "no data is called 'digit'", "gone.pt"):
        assert said in result
    with pytest.raises(StorageError, match="exists"):  # one alone is what it was
        ewc.consolidate(trained(Small(), torch.float32), noise(), output=tmp_path / "a.safetensors")


def test_finetune(tmp_path, ewc_ft):
    model = trained(Small(), torch.float32)
    (tmp_path / "m.run").mkdir()
    with pytest.raises(SeveralError) as wrong:
        ewc.finetune(
            model, noise(), output=tmp_path / "m.pt", patience=1, likelihood="poisson", penalty_form="elastic",
            lambdas=[1.0, 2.0], eval_on=[],
        )  # fmt: skip
    said = str(wrong.value)
    for text in ("5 things", "the run folder", "a domain must be scored", "poisson", "elastic", "2 lambdas"):
        assert text in said
    command = ("finetune", "--anchors", "one", "--anchors", "two", "--data", "digit", "--lr", 1, "-o", "m.pt")
    said = ewc_ft(*command, expect=2).stderr
    for text in ("4 things", "one", "two", "no data is called 'digit'", "m.run exists"):
        assert text in said
    said = ewc_ft("finetune", "--anchors", "one", "--data", "digits", "--lambda", -1, expect=2).stderr
    for text in ("2 things", "one", "lambda is -1.0"):
        assert text in said
    said = ewc_ft("finetune", "--model", "gone.pt", "--data", "digits?limit=40", "-o", "m.pt", expect=1).stderr
    assert "m.run exists" in said
    assert "gone.pt" in said


def test_merge(tmp_path, ewc_ft):
    (tmp_path / "all.safetensors").write_bytes(b"")
    said = ewc_ft("merge", "one", "two", "--lambda", 0, "--gamma", 0.5, "-o", "all.safetensors", expect=2).stderr
    for text in ("5 things", "all.safetensors exists", "gamma belongs", "every lambda is 0", "- there is no", "two"):
        assert text in said


def test_evaluate_says_what_it_had_scored(ewc_ft):
    ewc_ft("finetune", "--model", "mlp?hidden=8", "--data", "digits", "--epochs", 0, "-o", "m.pt")
    digits = torch.rand(50, 1, 8, 8)
    digits[40:] = 3e38  # whose sums are infinite
    np.savez("bad.npz", inputs=digits.numpy(), targets=np.arange(50) % 10)
    said = ewc_ft("evaluate", "m.pt", "--data", "digits", "--data", "npz:bad.npz", expect=1).stderr
    assert "scored until then: digits 0." in said
    assert "npz:bad.npz" in said
