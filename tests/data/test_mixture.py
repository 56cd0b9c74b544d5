"""Several domains as one: how often each sample is taken, how they go together, and what is refused."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from support.domains import blobs
from support.notes import Notes
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import ewc_finetune as ewc
from ewc_finetune.data.domain import Domain, as_domain
from ewc_finetune.data.draw import Part, draw_parts
from ewc_finetune.data.mixture import mixed
from ewc_finetune.data.sources import resolve_domains
from ewc_finetune.errors import DataError, EwcError, UsageError


class Singly(Dataset):
    """The same samples, read one by one, with labels that are plain numbers."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, n):
        x, y = self.dataset[n]
        return x, int(y)


def numbered(start, n, weight=None, name="data"):
    """Samples whose inputs are their own numbers."""
    inputs, labels = torch.arange(start, start + n).float()[:, None], torch.zeros(n, dtype=torch.long)
    return Domain(name, TensorDataset(inputs, labels), labels=labels, weight=weight)


def walk(domain, seed=None, size=4):
    shuffle = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.cat([inputs for inputs, _ in domain.batches(size, shuffle)]).flatten().int().tolist()


@given(
    st.lists(st.tuples(st.integers(1, 30), st.floats(0.01, 5)), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(0, 100)),
)
def test_each_part_is_drawn_as_its_weight_says(sizes, seed):
    parts = [Part("part", samples, weight) for samples, weight in sizes]
    shuffle = None if seed is None else torch.Generator().manual_seed(seed)
    times = torch.bincount(draw_parts(parts, shuffle), minlength=sum(part.samples for part in parts))
    for part, taken in zip(parts, times.split([part.samples for part in parts]), strict=True):
        assert int(taken.sum()) == part.drawn == max(1, round(part.samples * part.weight))
        assert int(taken.max() - taken.min()) <= 1


def test_each_epoch_draws_anew_and_over_time_all():
    domain = mixed([numbered(0, 10), numbered(10, 10, 0.3)])
    assert (domain.size, domain.count_batches(4)) == (13, 4)
    shuffle = torch.Generator().manual_seed(0)
    epochs = [[int(x) for inputs, _ in domain.batches(4, shuffle) for x in inputs.flatten()] for _ in range(30)]
    assert all(set(range(10)) < set(epoch) for epoch in epochs)
    assert {tuple(sorted(epoch)) for epoch in epochs[:5]} != {tuple(sorted(epochs[0]))}
    assert {sample for epoch in epochs for sample in epoch} == set(range(20))
    assert walk(domain) == walk(domain) == sorted(walk(domain)), "unshuffled it is always the same"


def test_a_single_domain_without_a_weight_is_left_alone():
    domain = numbered(0, 5)
    assert mixed([domain]) is domain
    assert len(walk(mixed([numbered(0, 5, weight=2.0)]))) == 10


def test_what_is_read_singly_is_walked_alike():
    a, b = blobs(), blobs(shift=1.0, n=40)
    at_once = mixed([as_domain(a, "a"), Domain("b", b, labels=b.tensors[1], weight=0.5)])
    singly = mixed([as_domain(a, "a"), Domain("b", Singly(b), weight=0.5)])
    for skip in (0, 3):
        walks = [list(one.batches(16, torch.Generator().manual_seed(3), skip=skip)) for one in (at_once, singly)]
        assert len(walks[0]) == len(walks[1]) == 9 - skip
        for (x, y), (other_x, other_y) in zip(*walks, strict=True):
            assert x.equal(other_x)
            assert y.equal(other_y)


def test_the_fisher_of_a_mixture_is_the_weighted_mean():
    a, b = blobs(n=30), blobs(shift=2.0, seed=1, n=20)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    a, b = (TensorDataset(data.tensors[0].double(), data.tensors[1]) for data in (a, b))
    of_a, of_b = ewc.consolidate(model, a).fisher, ewc.consolidate(model, b).fisher
    doubled = Domain("b", b, labels=b.tensors[1], weight=2.0)
    anchor = ewc.consolidate(model, [a, doubled], samples=None)
    assert anchor.provenance.samples == 70
    for name, value in anchor.fisher.items():
        torch.testing.assert_close(value, (30 * of_a[name] + 40 * of_b[name]) / 70, rtol=1e-5, atol=1e-9)


def test_images_of_a_folder_go_together_with_arrays(tmp_path):
    for label in ("0", "1"):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for n in range(4):
            grey = np.full((9, 9), 40 * n, dtype=np.uint8)
            Image.fromarray(grey).save(tmp_path / "photos" / label / f"{n}.png")
    x = np.zeros((6, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.array([0, 1] * 3))
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    notes = Notes()
    data = [f"npz:{tmp_path}/a.npz", f"imagefolder:{tmp_path}/photos?size=8&channels=1&weight=0.5"]
    done = ewc.finetune(model, data, epochs=2, eval_on=[], batch_size=5, progress=notes)
    assert done.steps == 4
    assert notes.about(f"each epoch has all 6 of {data[0]}, 4 of 8 of {data[1]}")


def test_a_second_table_goes_by_the_columns_of_the_first(tmp_path):
    (tmp_path / "a.csv").write_text("size,city,y\n1,Oslo,0.5\n3,Rome,1.5\n")
    (tmp_path / "b.csv").write_text("city,y,size\nRome,2.5,300\n")
    domains = ["table:a.csv?onehot=city&standardise=1", "table:b.csv"]
    seen = []
    model = nn.Linear(3, 1)
    model.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].clone()))
    data = [spec.replace("table:", f"table:{tmp_path}/") for spec in domains]
    ewc.finetune(model, data, epochs=1, eval_on=[], batch_size=3)
    assert [299.0 - 1, 0.0, 1.0] in seen[-1].tolist(), "(300 - 2) / 1, and Rome is the second city"


def test_names_of_classes_are_numbered_together(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,ham\n2,spam\n")
    (tmp_path / "b.csv").write_text("x,label\n3,egg\n4,spam\n")
    data = [f"table:{tmp_path}/a.csv", f"table:{tmp_path}/b.csv"]
    done = ewc.finetune("mlp?hidden=4&batch_norm=false", data, epochs=1, eval_on=[], output=tmp_path / "m.pt")
    assert done.model.head.out_features == 3
    anchor = ewc.consolidate(tmp_path / "m.pt", data)
    assert anchor.provenance.classes == ["ham", "spam", "egg"]
    assert anchor.provenance.name == "a+b"


def of(*shape, dtype=torch.float32, labels=True):
    return TensorDataset(*([torch.zeros(3, *shape, dtype=dtype)] + [torch.zeros(3, dtype=torch.long)] * labels))


@pytest.mark.parametrize(
    ("first", "other", "error", "words"),
    [
        (of(4), DataLoader(of(4)), UsageError, "is a stream or loader, which has no samples by number"),
        (of(4), of(5), DataError, "a sample is 4 (float32) of the first, and 5 (float32) of the other"),
        (of(1, 8, 8), of(3, 8, 8), DataError, "size= and channels= behind the question mark make images alike"),
        (of(1, 8, 8), of(1, 8, 8, dtype=torch.uint8), DataError, "(uint8) of the other"),
        (of(4), of(4, labels=False), DataError, "has no labels"),
        (of(4), TensorDataset(torch.zeros(3, 4), torch.zeros(3)), DataError, "the labels of one are classes and"),
        (of(4), [({"a": torch.zeros(3, 4)}, torch.zeros(3))], UsageError, "is a stream or loader"),
        ("digits", "digits?mean=0.5&std=0.5", DataError, "the numbers of the first are as they come, and the other's"),
        ("digits?augment=flip", "digits", UsageError, "they say augment= differently"),
        ("digits", "digits?active=0-4", UsageError, "they say active= differently"),
    ],
)
def test_what_does_not_go_together_is_refused(first, other, error, words):
    with pytest.raises(error) as raised:
        mixed(resolve_domains({"a": first, "b": other}, "train"))
    assert words in str(raised.value)


def test_names_that_only_the_alphabet_numbers_are_not_mixed_up(tmp_path):
    (tmp_path / "a.csv").write_text("x,label\n1,ham\n2,spam\n")
    (tmp_path / "b.csv").write_text("x,label\n3,cat\n4,dog\n")
    with pytest.raises(DataError, match="would have the same numbers. Give the names of all"):
        mixed(resolve_domains([f"table:{tmp_path}/a.csv", f"table:{tmp_path}/b.csv"], "train"))


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "1e9", "a", "1001"])
def test_weights_that_are_none(weight):
    with pytest.raises(UsageError, match="expected how often to take each sample, above 0 and up to 1,000"):
        resolve_domains(f"digits?weight={weight}", "train", weighted=True)


@pytest.mark.parametrize(
    "use",
    [
        ewc.evaluate,
        lambda model, data: ewc.finetune(model, blobs(), eval_on=data),
        lambda model, data: ewc.finetune(model, blobs(), eval_on=[], select_on=[data]),
        lambda model, data: ewc.finetune(model, blobs(), eval_new=data),
        lambda model, data: ewc.finetune(model, blobs(), eval_on=[], rehearse=data),
    ],
)
def test_only_what_is_trained_on_or_consolidated_has_weights(use):
    with pytest.raises(EwcError, match="weight= is for --data of finetune, sweep and consolidate"):
        use(nn.Linear(4, 3), "digits?weight=0.5")


def test_texts_and_their_labels_go_together(tmp_path):
    """A classifier numbers labels by its own names; what is packed is mixed by its samples, not by its texts."""
    pytest.importorskip("transformers")
    from support.transformers_models import bert, corpus, llama, reviews, saved

    folder = saved(bert(), tmp_path / "bert")
    data = [reviews(tmp_path / "a.jsonl", ("good", "bad", "good")), reviews(tmp_path / "b.jsonl") + "?weight=2"]
    notes = Notes()
    ewc.finetune(folder, data, epochs=1, batch_size=5, eval_on=[], progress=notes)
    assert notes.about(f"each epoch has all 12 of {data[0]}, 2 times the 12 of {data[1]}")
    anchor = ewc.consolidate(folder, data)
    assert anchor.provenance.samples == 36
    assert anchor.provenance.classes == ["bad", "fine", "good"]
    with pytest.raises(UsageError, match="their texts become inputs differently"):
        ewc.consolidate(folder, [data[0], data[1] + "&length=5"])
    folder = saved(llama(), tmp_path / "llama")
    data = [corpus(tmp_path / "a.txt") + "?pack=6", corpus(tmp_path / "b.txt", seed=1) + "?pack=8&weight=0.5"]
    ewc.finetune(folder, data, epochs=1, batch_size=5, eval_on=[], progress=notes)
    assert notes.about(f"each epoch has all 12 of {data[0]}, 4 of 8 of {data[1]}")
    with pytest.raises(DataError, match="a sample is"):
        ewc.consolidate(folder, [data[0], TensorDataset(torch.zeros(3, 4))])


@pytest.mark.parametrize(
    ("first", "other", "words"),
    [
        ("&unit=10", "&unit=1000", r"the numbers of one are not those of the other \(unit=\)"),
        ("&standardise=1", "&standardise=0", r"\(standardise, missing or onehot=\)"),
    ],
)
def test_tables_in_other_numbers_are_not_mixed(first, other, words, tmp_path):
    (tmp_path / "t.csv").write_text("a,b,price\n1,2,10.5\n3,4,20.5\n")
    data = [f"table:{tmp_path}/t.csv?target=price{more}" for more in (first, other)]
    with pytest.raises(UsageError, match=words):
        ewc.finetune("mlp?hidden=4", data, eval_on=[])


def test_a_unit_that_the_first_says_is_that_of_the_others(tmp_path):
    (tmp_path / "t.csv").write_text("a,b,price\n1,2,10.5\n3,4,20.5\n")
    data = [f"table:{tmp_path}/t.csv?target=price{more}" for more in ("&unit=10", "")]
    done = ewc.finetune("mlp?hidden=4", data, eval_on=[], output=tmp_path / "m.pt", epochs=1)
    assert done.steps == 1
    with pytest.raises(UsageError, match=r"\(unit=\)"):
        ewc.consolidate(tmp_path / "m.pt", [data[1], data[0].replace("unit=10", "unit=5")])


@pytest.mark.parametrize("named", ["labels=cat,dog", "labels=dog,cat"])
def test_one_name_has_one_number(named, tmp_path):
    (tmp_path / "t.csv").write_text("x,label\n1,cat\n2,dog\n")
    data = [f"table:{tmp_path}/t.csv?labels=cat,dog", f"table:{tmp_path}/t.csv?{named}"]
    if named == "labels=cat,dog":
        assert mixed(resolve_domains(data, "train")).classes == ("cat", "dog")
    else:
        with pytest.raises(DataError, match="their classes have different names and would have the same numbers"):
            mixed(resolve_domains(data, "train"))


def test_pairs_and_single_texts_are_not_mixed(tmp_path):
    pytest.importorskip("transformers")
    from support.transformers_models import llama, saved

    (tmp_path / "a.txt").write_text("w1 w2 w3 w4\n" * 20)
    folder, data = saved(llama(), tmp_path / "llama"), f"text:{tmp_path}/a.txt"
    for first, other in ((f"{data}?pack=4", data), (data, f"{data}?pack=4")):
        with pytest.raises(UsageError, match="their texts become inputs differently; say text=, length= and pack="):
            ewc.finetune(folder, [first, other], eval_on=[])
