"""The diagonal in half precision: nothing overflows, nothing vanishes, and the error is what is said."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from support.files import change_anchor, metadata_of, record_of

import ewc_finetune as ewc
from ewc_finetune.anchor.half_precision import decode, encode, rounded
from ewc_finetune.errors import AnchorError, UsageError

HALVES = {"float16": 2.0**-11, "bfloat16": 2.0**-8}  # the largest relative error of rounding
numbers = st.one_of(
    st.just(0.0),
    st.floats(0, 1, width=32),
    st.floats(0, 3.4028234663852886e38, width=32),
    st.floats(0, 2.0**-126, width=32),
)


@pytest.mark.parametrize("dtype", HALVES)
@given(values=st.lists(numbers, min_size=1, max_size=8))
def test_what_is_stored(dtype, values):
    fisher = torch.tensor(values)
    stored, scale = encode(fisher, dtype)
    found = decode(stored, scale)
    assert str(stored.dtype) == f"torch.{dtype}"
    assert (scale.dtype, scale.shape) == (torch.float32, ())
    assert stored.isfinite().all()
    assert found.isfinite().all()
    assert torch.equal(found == 0, fisher == 0)  # what is held stays held, and what is free stays free
    # Against float64: to half of the last place, where the dtype has all of its places.
    exact = fisher.double()
    full = exact >= exact.max() * 2.0**-28
    assert ((found.double() - exact).abs()[full] <= exact[full] * HALVES[dtype] + 2.0**-150).all()
    assert ((found.double() - exact).abs() <= exact.max() * 2.0**-38 + exact * HALVES[dtype] + 2.0**-149).all()
    again = encode(found, dtype)
    assert torch.equal(again[0], stored)
    assert torch.equal(again[1], scale)


def test_nothing_is_nothing():
    for dtype in HALVES:
        assert decode(*encode(torch.zeros(3), dtype)).tolist() == [0, 0, 0]
        assert decode(*encode(torch.zeros(0), dtype)).shape == (0,)
        assert decode(*encode(torch.tensor(2.0), dtype)).item() == 2.0


def test_the_error_that_is_said():
    fisher = {"a": torch.rand(1000, generator=torch.Generator().manual_seed(0)) ** 30, "b": torch.tensor([1e-30, 1e30])}
    for dtype, unit in HALVES.items():
        found, storage = rounded(fisher, dtype)
        exact = torch.cat([value.double() for value in fisher.values()])
        off = torch.cat([value.double() for value in found.values()]) - exact
        assert storage.error == pytest.approx((off.norm() / exact.norm()).item())
        assert 0 < storage.error < unit
    assert rounded(fisher, "float16")[1].raised > 1
    assert rounded(fisher, "float32") == (fisher, None)
    with pytest.raises(UsageError, match="curvature dtype"):
        rounded(fisher, "int8")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("curvature", ["diagonal", "kfac"])
def test_an_anchor_in_half_precision(small, samples, tmp_path, dtype, curvature):
    data = torch.utils.data.TensorDataset(samples.tensors[0].float(), samples.tensors[1])
    small.float()
    options = {"curvature": curvature} | ({"exclude": ["first.*"]} if curvature == "kfac" else {})
    whole = ewc.consolidate(small, data, **options)
    made = ewc.consolidate(small, data, curvature_dtype=dtype, output=tmp_path / "a.safetensors", **options)
    read = ewc.Anchor.load(made.path)
    assert made.fisher
    for name, value in made.fisher.items():
        assert value.dtype == read.fisher[name].dtype == torch.float32
        assert torch.equal(value, read.fisher[name])
        torch.testing.assert_close(value, whole.fisher[name], rtol=HALVES[dtype], atol=float(value.max()) * 2**-38)
    with safe_open(made.path, framework="pt") as file:
        assert file.metadata()["format_version"] == "2"
        assert {file.get_slice(f"fisher.{name}").get_dtype() for name in made.fisher} == {
            {"float16": "F16", "bfloat16": "BF16"}[dtype]
        }
    assert read.provenance.curvature_storage["dtype"] == dtype
    assert read.save(tmp_path / "b.safetensors").digest == made.digest
    said = dict(ewc.inspect(made.path).facts)["stored as"]
    assert said.startswith(f"diagonal in {dtype}, off by ")


def test_the_old_format_is_written_where_nothing_else_is_needed(small, samples, tmp_path):
    made = ewc.consolidate(small, samples, output=tmp_path / "a.safetensors")
    assert metadata_of(made.path)["format_version"] == "1"
    assert not {"curvature_storage", "weights_reference", "probes"} & record_of(made.path).keys()


def test_merged(small, samples, tmp_path, ewc_ft):
    half, whole = (
        ewc.consolidate(small, samples, curvature_dtype=dtype, output=tmp_path / f"{dtype}.safetensors")
        for dtype in ("float16", "float32")
    )
    both = ewc.merge([half, whole])
    assert both.provenance.curvature_storage is None
    for name, value in both.fisher.items():
        torch.testing.assert_close(value, half.fisher[name] + whole.fisher[name])
    said = ewc_ft("merge", half.path, whole.path, "-o", "both.safetensors", "--curvature-dtype", "bfloat16").stderr
    assert "diagonal in bfloat16, off by" in said
    read = ewc.Anchor.load(tmp_path / "both.safetensors")
    torch.testing.assert_close(dict(read.fisher), dict(both.fisher), rtol=2**-8, atol=1e-12)


@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor(-1.0), torch.tensor(float("nan")), torch.ones(2),
                                   torch.tensor(1)])  # fmt: skip
def test_scales_that_cannot_be(small, samples, tmp_path, scale):
    made = ewc.consolidate(small, samples, curvature_dtype="float16", output=tmp_path / "a.safetensors")
    name = next(iter(made.fisher))
    change_anchor(made.path, lambda _, tensors: tensors.update({f"scale.{name}": scale}))
    with pytest.raises(AnchorError, match=rf"scale.{name} should be one number above 0"):
        ewc.Anchor.load(made.path)
