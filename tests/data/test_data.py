import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ewc_finetune.data.domain import Fingerprint, as_domain
from ewc_finetune.data.options import read_options
from ewc_finetune.data.sources import load_domain
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.specs.query import parse


def tensors(spec, split="train", data_dir=None):
    return load_domain(spec, split, data_dir).samples.tensors


def test_digits_have_a_fixed_split():
    train, test = tensors("digits"), tensors("digits", "test")
    assert (len(train[0]), len(test[0])) == (1438, 359)
    assert train[0].shape[1:] == (1, 8, 8)
    assert (train[0].min(), train[0].max()) == (0, 1)
    assert torch.equal(tensors("digits?split=test", "train")[0], test[0])
    rows = {bytes(x.numpy().tobytes()) for x in train[0]}
    assert not any(bytes(x.numpy().tobytes()) in rows for x in test[0])


def test_options_apply_in_order():
    images, labels = tensors("digits?classes=0-2,7&limit=30")
    assert len(images) == 30
    assert set(labels.tolist()) == {0, 1, 2, 7}
    plain = tensors("digits?limit=30")[0]
    permuted = tensors("digits?limit=30&permute=3")[0]
    assert not torch.equal(permuted, plain)
    assert torch.equal(permuted.flatten(1).sort().values, plain.flatten(1).sort().values)
    assert torch.equal(permuted, tensors("digits?permute=3&limit=30")[0])
    assert not torch.equal(permuted, tensors("digits?limit=30&permute=4")[0])
    assert torch.equal(tensors("digits?first=5&permute=3", "test")[0], tensors("digits?permute=3", "test")[0][:5])


def test_a_limit_is_an_even_draw_over_the_classes(tmp_path):
    for c, count in enumerate((40, 3, 40)):  # as folders have them: one class after the other
        (tmp_path / str(c)).mkdir()
        for i in range(count):
            Image.new("L", (2, 2), i).save(tmp_path / str(c) / f"{i:02}.png")
    folder = f"imagefolder:{tmp_path}"
    assert torch.bincount(load_domain(f"{folder}?limit=6", "train").labels).tolist() == [2, 2, 2]
    drawn = load_domain(f"{folder}?limit=20", "train")
    assert sorted(torch.bincount(drawn.labels).tolist()) == [3, 8, 9]  # a class with too few gives what it has
    assert drawn.samples.files == load_domain(f"{folder}?limit=20", "train").samples.files
    assert drawn.samples.files == sorted(drawn.samples.files)
    assert set(load_domain(f"{folder}?limit=6", "train").samples.files) < set(drawn.samples.files)
    assert drawn.samples.files != load_domain(f"{folder}?first=20", "train").samples.files
    assert load_domain(f"{folder}?first=20", "train").labels.tolist() == [0] * 20
    assert drawn.remarks == (
        "limit=20 draws 20 of 83 samples evenly from 3 classes, always the same; first=20 takes the first",
    )
    assert "of which 1 get none" in load_domain(f"{folder}?limit=2", "train").remarks[0]
    assert load_domain(f"{folder}?limit=83", "train").remarks == ()
    assert load_domain(f"{folder}?first=43&limit=6", "train").labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_limit_means_the_same_for_data_in_memory_and_without_classes(tmp_path):
    assert torch.bincount(tensors("digits?limit=50")[1]).tolist() == [5] * 10
    assert torch.bincount(tensors("digits?classes=3-4&limit=50")[1]).tolist() == [0, 0, 0, 25, 25]
    np.savez(tmp_path / "a.npz", x=np.arange(40.0)[:, None], y=np.arange(40.0))
    for spec in (f"npz:{tmp_path / 'a.npz'}?limit=5", f"npz:{tmp_path / 'a.npz'}?limit=5&inputs=y&target=x"):
        domain = load_domain(spec, "train")
        values = domain.samples.tensors[0].flatten().tolist()
        assert len(set(values)) == 5
        assert values == sorted(values)
        assert values != [0, 1, 2, 3, 4]
        assert domain.remarks == ("limit=5 draws 5 of 40 samples at random, always the same; first=5 takes the first",)


def test_rotation_is_counterclockwise():
    plain, turned = tensors("digits?limit=4")[0], tensors("digits?limit=4&rotate=90")[0]
    torch.testing.assert_close(turned, torch.rot90(plain, 1, (2, 3)), atol=1e-5, rtol=0)


def test_size_and_channels():
    assert tensors("digits?limit=2&size=12&channels=3")[0].shape == (2, 3, 12, 12)
    assert tensors("digits?limit=2&size=12x10")[0].shape == (2, 1, 12, 10)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("mnits", r"no data is called 'mnits'\. Did you mean 'mnist'\?"),
        ("digits?limt=3", r"no option 'limt'\. Did you mean 'limit'\?"),
        ("digits?limit=many", "limit=many is not understood; expected a number of samples"),
        ("digits?limit=0", "expected a number of samples, at least 1"),
        ("digits?limit=-3", "expected a number of samples"),
        ("digits?split=dev", "expected train or test"),
        ("digits?classes=4-", "expected labels such as 0-4"),
        ("digits?classes=4-2", "expected labels such as 0-4"),
        ("digits?rotate=nan", "expected degrees"),
        ("digits?permute=x", "expected a seed"),
        ("digits?size=0x3", "expected pixels"),
        ("digits?channels=2", "1 .grey. or 3"),
        ("digits?limit", "expected key=value"),
        ("digits?limit=1&limit=2", "'limit' comes twice"),
        ("?limit=3", "names nothing"),
        ("", "names nothing"),
        ("imagefolder", "name the folder"),
        ("digits:here", "no data is called 'digits'"),
    ],
)
def test_specs_that_cannot_be_meant(spec, message):
    with pytest.raises(UsageError, match=message):
        load_domain(spec, "train")


@given(st.text())
@example("0\r?")
@settings(max_examples=200)
def test_any_text_is_read_or_refused(text):
    try:
        address = parse(text)
        read_options(address)
    except UsageError:
        return
    assert parse(str(address)) == address


def test_nothing_left():
    with pytest.raises(DataError, match="nothing is left; its labels are 0, 1, 2, 3, 4, 5, 6, 7, 8, 9"):
        load_domain("digits?classes=11", "train")


def test_a_download_that_fails_says_where_to_put_the_files(tmp_path, monkeypatch):
    from torchvision import datasets

    def offline(self):
        raise OSError("no route to host")

    monkeypatch.setattr(datasets.MNIST, "download", offline)
    with pytest.raises(DataError, match=r"MNIST is not in .*no route to host.*--data-dir or EWC_FT_DATA"):
        load_domain("mnist", "train", tmp_path)


def test_real_mnist_and_fashion_mnist(data_dir):
    for spec, first in (("mnist", "0 - zero"), ("fmnist", "T-shirt/top")):
        domain = load_domain(spec, "train", data_dir)
        images, labels = domain.samples.tensors
        assert images.shape == (60_000, 1, 28, 28)
        assert images.dtype == torch.uint8
        assert sorted(set(labels.tolist())) == list(range(10))
        assert domain.classes[0] == first
        assert domain.split == "train"
    assert tensors("mnist", "test", data_dir)[0].shape[0] == 10_000


def test_cifar10_is_read_from_torchvisions_own_layout(tmp_path, monkeypatch):
    """CIFAR-10 keeps (N, H, W, C) arrays and a list of labels; a stand-in with that shape, read by the real code."""
    from torchvision import datasets

    class Cifar:
        classes = ("plane", "car")

        def __init__(self, root, train, download):
            self.data = torch.arange(2 * 4 * 4 * 3, dtype=torch.uint8).reshape(2, 4, 4, 3).numpy()
            self.targets = [1, 0]

    monkeypatch.setattr(datasets, "CIFAR10", Cifar)
    images, labels = tensors("cifar10", data_dir=tmp_path)
    assert images.shape == (2, 3, 4, 4)
    assert images[0, :, 0, 1].tolist() == [3, 4, 5]
    assert labels.tolist() == [1, 0]


@pytest.fixture
def photos(tmp_path):
    """Two classes of three images each, of several sizes."""
    for c, name in enumerate(("cats", "dogs")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(3):
            Image.new("RGB", (10 + i, 12), (100 * c, 20 * i, 0)).save(tmp_path / "photos" / name / f"{i}.png")
    return tmp_path / "photos"


def test_image_folders(photos):
    domain = load_domain(f"imagefolder:{photos}?size=8", "train")
    assert domain.classes == ("cats", "dogs")
    assert domain.split is None
    ((images, labels),) = domain.batches(10)
    assert images.shape == (6, 3, 8, 8)
    assert images.dtype == torch.uint8
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    limited = load_domain(f"imagefolder:{photos}?size=8&classes=1&limit=2&channels=1&rotate=90", "train")
    ((images, labels),) = limited.batches(10)
    assert images.shape == (2, 1, 8, 8)
    assert labels.tolist() == [1, 1]


def test_image_folders_with_splits(photos, tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    photos.rename(root / "train")
    assert load_domain(f"imagefolder:{root}?size=8", "train").split is None  # there is no other split to score on
    with pytest.raises(DataError, match=r"there is no folder .*test"):
        load_domain(f"imagefolder:{root}", "test")
    (root / "test" / "dogs").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(root / "test" / "dogs" / "0.png")
    assert load_domain(f"imagefolder:{root}?size=8", "train").split == "train"
    test = load_domain(f"imagefolder:{root}?size=8", "test")
    assert test.classes == ("cats", "dogs")
    assert test.labels.tolist() == [1]  # a class that the test split lacks moves no other


def test_image_folders_that_are_wrong(photos, tmp_path):
    with pytest.raises(DataError, match=r"1\.png has shape .* make them alike with \?size=PIXELS"):
        list(load_domain(f"imagefolder:{photos}", "train").batches(10))
    with pytest.raises(DataError, match="there is no folder"):
        load_domain(f"imagefolder:{tmp_path}/none", "train")
    with pytest.raises(DataError, match="no splits to choose from"):
        load_domain(f"imagefolder:{photos}?split=test", "train")
    (photos / "cats" / "0.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"0\.png cannot be read as an image"):
        list(load_domain(f"imagefolder:{photos}?size=8", "train").batches(10))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="Expected a folder for each class"):
        load_domain(f"imagefolder:{tmp_path}/empty", "train")


class MapStyle(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return torch.full((2,), float(i)), i % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.full((2,), float(i)), i % 3) for i in range(7)])


TENSORS = TensorDataset(torch.arange(7.0)[:, None].repeat(1, 2), torch.arange(7) % 3)


@pytest.mark.parametrize(
    "data",
    [TENSORS, MapStyle(), Stream(), DataLoader(TENSORS, batch_size=3), [TENSORS[:3], TENSORS[3:]]],
    ids=["tensors", "map-style", "iterable", "loader", "list of batches"],
)
def test_every_kind_of_data_gives_the_same_samples(data):
    domain = as_domain(data)
    batches = list(domain.batches(3))
    assert torch.equal(torch.cat([x for x, _ in batches]), TENSORS.tensors[0])
    assert torch.equal(torch.cat([y for _, y in batches]), TENSORS.tensors[1])
    assert torch.equal(domain.first(), TENSORS.tensors[0][:1])
    assert domain.size in (7, None)
    assert domain.count_batches(3) in (3, 2, None)


@pytest.mark.parametrize("data", [TENSORS, MapStyle()], ids=["tensors", "map-style"])
def test_shuffling_and_subsets(data):
    domain = as_domain(data)
    order = torch.cat([x[:, 0] for x, _ in domain.batches(2, torch.Generator().manual_seed(0))])
    assert order.tolist() != list(range(7))
    assert sorted(order.tolist()) == list(range(7))
    assert torch.cat([x[:, 0] for x, _ in domain.subset([4, 1]).batches(9)]).tolist() == [4, 1]


def test_data_that_is_none():
    with pytest.raises(DataError, match="read only once"):
        as_domain(x for x in [])
    with pytest.raises(DataError, match="is a int; expected"):
        as_domain(3)
    with pytest.raises(DataError, match=r"is .{x: list}.; expected .inputs, labels. or inputs alone"):
        list(as_domain([{"x": ["a text"]}]).batches(1))
    with pytest.raises(DataError, match=r"is .Tensor, Tensor, Tensor."):
        list(as_domain([(torch.ones(1),) * 3]).batches(1))


def test_the_fingerprint_is_of_the_samples_alone():
    def fingerprint(*batches):
        taken = Fingerprint()
        for x, y in batches:
            taken.update(x, y)
        return taken.hexdigest()

    x, y = TENSORS.tensors
    whole = fingerprint((x, y))
    assert whole == fingerprint((x[:3], y[:3]), (x[3:], y[3:]))
    assert whole != fingerprint((x, y + 1))
    assert whole != fingerprint((x + 1, y))
    assert whole != fingerprint((x, None))
    assert whole != fingerprint((x.flip(0), y))


def test_a_batch_may_be_a_dictionary_with_labels_in_it_or_beside_it():
    tokens, labels = torch.arange(6).view(3, 2), torch.tensor([0, 1, 0])
    inside = list(as_domain([{"tokens": tokens, "labels": labels}]).batches(1))
    beside = list(as_domain([({"tokens": tokens}, labels)]).batches(1))
    for (found,) in (inside, beside):
        assert found[0].keys() == {"tokens"}
        assert torch.equal(found[1], labels)
    ((_, none),) = as_domain([{"tokens": tokens}]).batches(1)
    assert none is None


def test_the_fingerprint_of_dictionaries_does_not_depend_on_the_batches():
    def fingerprint(*batches):
        taken = Fingerprint()
        for inputs in batches:
            taken.update(inputs, None)
        return taken.hexdigest()

    a, b = torch.arange(6.0).view(3, 2), torch.arange(3)
    assert fingerprint({"a": a, "b": b}) == fingerprint({"a": a[:1], "b": b[:1]}, {"a": a[1:], "b": b[1:]})
    assert fingerprint({"a": a, "b": b}) != fingerprint({"c": a, "b": b})


def test_a_folder_of_images_without_classes(tmp_path):
    for name in ("one.png", "deep/two.PNG", "deep/er/three.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (6, 4), "red").save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    domain = load_domain(f"images:{tmp_path}?channels=1&limit=2", "train")
    assert domain.size == 2
    ((images, labels),) = domain.batches(5)
    assert images.shape == (2, 1, 4, 6)
    assert labels is None
    with pytest.raises(UsageError, match="images have no classes"):
        load_domain(f"images:{tmp_path}?classes=1", "train")
    with pytest.raises(DataError, match="there is no folder"):
        load_domain(f"images:{tmp_path}/nowhere", "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no images, in itself or in any folder"):
        load_domain(f"images:{tmp_path}/empty", "train")


def test_several_arrays_are_a_dictionary_by_their_names(tmp_path):
    path, left, right = tmp_path / "a.npz", np.arange(12.0).reshape(6, 2), np.arange(18).reshape(6, 3)
    np.savez(path, left=left, right=right, y=np.arange(6) % 2, z=np.ones(5), label=np.array(list("abcabc")))
    domain = load_domain(f"npz:{path}?inputs=left,right&classes=1&limit=2&offset=1&target=y", "train")
    ((inputs, labels),) = domain.batches(5)
    assert {name: tensor.dtype for name, tensor in inputs.items()} == {"left": torch.float32, "right": torch.int64}
    assert inputs["left"].tolist() == [left[n].tolist() for n in inputs["right"][:, 0] // 3]
    assert (labels.tolist(), domain.size) == ([2, 2], 2)
    domain = load_domain(f"npz:{path}?inputs=right,left&target=label", "train")
    assert (list(domain.first()), domain.classes) == (["right", "left"], ("a", "b", "c"))
    order = torch.Generator().manual_seed(0)
    batches = list(domain.batches(4, order))
    drawn = torch.cat([inputs["right"][:, 0] // 3 for inputs, _ in batches])
    assert torch.cat([labels for _, labels in batches]).tolist() == (drawn % 3).tolist()
    assert sorted(drawn.tolist()) == list(range(6))
    np.savez(path, left_train=left, right_train=right, left_test=left[:2], right_test=right[:2])
    domain = load_domain(f"npz:{path}?inputs=left,right", "test")
    assert (domain.size, domain.split, domain.labelled, list(domain.first())) == (2, "test", False, ["left", "right"])


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        ("left,rihgt", UsageError, "no array 'rihgt' for the inputs. Did you mean 'right'?"),
        ("left,left", UsageError, "inputs=left,left is not understood; expected .* none twice"),
        ("left,y", UsageError, "y is an input and the target too; name the target"),
        ("left,z", DataError, "different numbers of samples: left 6, z 5, y 6"),
        ("left,right&size=3", UsageError, "its samples are no images, so they cannot be resized"),
        ("left,right&mean=0&std=1", UsageError, "its samples are no images, so they cannot be normalised"),
        ("left,words&target=z", DataError, "words is <U1 of shape .*expected numbers"),
    ],
)
def test_arrays_that_go_into_no_dictionary(asked, error, message, tmp_path):
    numbers = {name: np.ones((6, 2)) for name in ("left", "right")}
    np.savez(tmp_path / "a.npz", **numbers, y=np.zeros(6, int), z=np.ones(5), words=np.array(list("abcabc")))
    with pytest.raises(error, match=message):
        load_domain(f"npz:{tmp_path / 'a.npz'}?inputs={asked}", "train")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([(torch.ones(2, 3), torch.ones(2, 4), torch.zeros(2))], r"\(Tensor, Tensor, Tensor\); expected"),
        ([((torch.ones(2, 3), torch.ones(2, 4)), torch.zeros(2))], r"\(\(Tensor, Tensor\), Tensor\); expected"),
        (TensorDataset(torch.ones(2, 3), torch.ones(2, 4), torch.zeros(2)), r"\(Tensor, Tensor, Tensor\); expected"),
    ],
)
def test_a_tuple_of_inputs_leads_to_a_dictionary(data, said):
    with pytest.raises(DataError, match=said + r".*by the names of the model's arguments: \({'left': a, 'right': b}"):
        as_domain(data).first()
    assert as_domain(data).labels is None


def test_arrays(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.arange(12.0).reshape(6, 2), y=np.array([0, 1, 2, 0, 1, 2]))
    domain = load_domain(f"npz:{path}?classes=1-2&first=3", "train")
    inputs, labels = next(iter(domain.batches(10)))
    assert inputs.tolist() == [[2, 3], [4, 5], [8, 9]]
    assert (inputs.dtype, labels.tolist(), domain.split) == (torch.float32, [1, 2, 1], None)
    images = np.zeros((4, 1, 6, 6), np.uint8)
    np.savez(path, x_train=images, y_train=np.arange(4), x_test=images[:2], y_test=np.arange(2), other=np.ones(3))
    assert load_domain(f"npz:{path}", "train").size == 4
    assert load_domain(f"npz:{path}?rotate=30&size=3", "test").split == "test"
    np.savez(path, pixels=images, kind=np.linspace(0, 1, 4))
    assert load_domain(f"npz:{path}?inputs=pixels&target=kind", "train").labels.dtype == torch.float32
    assert load_domain(f"npz:{path}?inputs=pixels", "train").labels is None
    for spec, message in (
        ("?inputs=pixel", "no array 'pixel' for the inputs. Did you mean 'pixels'"),
        ("", "which array are the inputs.*It has pixels, kind"),
        ("?inputs=pixels&target=other", "no array 'other' for the target. Known: kind, pixels"),
        ("?inputs=kind&rotate=3", "its samples are no images"),
    ):
        with pytest.raises(UsageError, match=message):
            load_domain(f"npz:{path}{spec}", "train")
    np.savez(path, x=np.ones((3, 2)), y=np.ones(2))
    with pytest.raises(DataError, match="different numbers of samples: x 3, y 2"):
        load_domain(f"npz:{path}", "train")
    np.savez(path, x=np.array([None, "a"], dtype=object))
    with pytest.raises(DataError, match=r"cannot be read as arrays .*allow_pickle"):
        load_domain(f"npz:{path}", "train")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match="cannot be read as arrays"):
        load_domain(f"npz:{path}", "train")


def test_tables(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,label\n1,2.5,cat\n3,4,dog\n-1,0,cat\n")
    domain = load_domain(f"csv:{path}", "train")
    inputs, labels = next(iter(domain.batches(10)))
    assert inputs.tolist() == [[1, 2.5], [3, 4], [-1, 0]]
    assert (labels.tolist(), domain.classes) == ([0, 1, 0], ("cat", "dog"))
    path.write_text("a,b\n1,2.5\n3,4\n-1,0\n")
    inputs, labels = next(iter(load_domain(f"csv:{path}?target=b&first=2", "train").subset([1]).batches(1)))
    assert labels.tolist() == [4.0]
    for content, message in (
        ("a,b,label\n1,x,2\n", r"not all values are numbers in column 'b' \('x' in line 2\)"),
        ("a,b,label\n1,2\n", "row 2: 2 fields, and the first line has 3"),
        ("a,a,label\n1,2,3\n", "all different"),
        ("", "expected a first line"),
        ("label\n1\n", "no column beside the target"),
    ):
        path.write_text(content)
        with pytest.raises(DataError, match=message):
            load_domain(f"csv:{path}", "train").first()
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UsageError, match="there is no column 'c' for the target"):
        load_domain(f"csv:{path}?target=c", "train")
    with pytest.raises(DataError, match="there is no file"):
        load_domain("csv:nothing.csv", "train")
    with pytest.raises(UsageError, match=r"this data has no option 'inputs'"):
        load_domain(f"csv:{path}?inputs=a", "train")


def made(count=5, split="train", scale=1.0):
    size = count if split == "train" else 2
    return TensorDataset(torch.arange(size)[:, None] * scale, torch.arange(size))


def made_by_itself(limit=3, mean=0.0):
    return TensorDataset(torch.full((9, 2), mean), torch.arange(9) % limit)


def made_without_splits():
    return [(torch.ones(2, 3), torch.tensor([0, 1]))]


def fails():
    raise OSError("the tape is torn")


def test_functions():
    domain = load_domain("test_data:made?count=7&scale=0.5&first=6", "train")
    assert (domain.name, domain.size, domain.split) == ("test_data:made?count=7&scale=0.5&first=6", 6, "train")
    assert next(iter(domain.batches(6)))[0][:, 0].tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
    assert load_domain("test_data:made", "test").size == 2
    own = load_domain("test_data:made_by_itself?limit=2&mean=0.5&first=4", "train")  # what it names is its own
    assert (own.labels.tolist(), own.samples.tensors[0].unique().tolist()) == ([0, 1, 0, 1], [0.5])
    assert load_domain("test_data:made_without_splits", "test").split is None
    with pytest.raises(UsageError, match="takes no argument split"):
        load_domain("test_data:made_without_splits?split=test", "train")
    with pytest.raises(DataError, match="fails failed with OSError: the tape is torn"):
        load_domain("test_data:fails", "train")
    with pytest.raises(DataError, match="made failed with TypeError"):
        load_domain("test_data:made?colour=red", "train")
    with pytest.raises(DataError, match="the module test_data has no nothing"):
        load_domain("test_data:nothing", "train")


def test_options_that_data_cannot_take_are_refused(tmp_path):
    (tmp_path / "t.txt").write_text("one\ntwo\u2028three\n")
    (tmp_path / "t.csv").write_text("\ufefftext,label\n" + "w" * 200_000 + ",a\nw2,b\nw3,a\n", encoding="utf-8")
    assert load_domain(f"text:{tmp_path / 't.txt'}", "train").size == 2
    texts = load_domain(f"csv:{tmp_path / 't.csv'}?classes=0&limit=1", "train")
    assert (texts.size, texts.samples.labels.tolist(), texts.classes) == (1, [0], ("a", "b"))
    for spec, message in (
        (f"text:{tmp_path / 't.txt'}?split=test", "one file has no splits"),
        (f"csv:{tmp_path / 't.csv'}?split=test", "one file has no splits"),
        (f"text:{tmp_path / 't.txt'}?size=28", "its samples are no images"),
        (f"text:{tmp_path / 't.txt'}?classes=1", "its labels are not known beforehand"),
        ("test_data:made?rotate=30", "its samples are no images"),
        ("test_data:made_without_splits?limit=2", "it has no samples by number to limit"),
        ("test_data:made_without_splits?offset=2", "offset is for tables"),
    ):
        with pytest.raises(UsageError, match=message):
            load_domain(spec, "train")
    assert load_domain("test_data:made_without_splits?active=0-1", "train").active == (0, 1)


@pytest.mark.parametrize("label", ["", "123456789012345678901"])
def test_labels_that_are_none(tmp_path, label):
    (tmp_path / "t.csv").write_text(f"a,label\n1,0\n2,{label}\n3,1\n")
    with pytest.raises(DataError, match="the target 'label' has no label in line 3|is larger than any class"):
        load_domain(f"csv:{tmp_path / 't.csv'}", "train")


@pytest.mark.parametrize("damage", ["flipped", "order", "wide"])
def test_arrays_of_every_kind(tmp_path, damage):
    path = tmp_path / "a.npz"
    kind = {"order": ">f4", "wide": np.longdouble, "flipped": np.float64}[damage]
    np.savez_compressed(path, x=np.arange(4000).astype(kind).reshape(1000, 4), y=np.arange(1000))
    if damage == "flipped":
        content = bytearray(path.read_bytes())
        content[200:260] = bytes(60)
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as arrays"):
            load_domain(f"npz:{path}", "train")
    else:
        assert load_domain(f"npz:{path}", "train").samples.tensors[0][3].tolist() == [12, 13, 14, 15]
