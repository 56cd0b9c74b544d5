"""Labels that are names: their numbers are said, can be chosen, and are the first suspect of a score of guesses."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.notes import Notes
from torch import nn

import ewc_finetune as ewc
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.data.sources import load_domain
from ewc_finetune.errors import DataError, UsageError
from ewc_finetune.evaluation.chance import at_chance

ORDER = ("grignolino", "barbera", "barolo")


@pytest.fixture
def wine(tmp_path):
    """A table of 90 wines of three kinds, each known by one of its numbers."""
    with (tmp_path / "wine.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["a", "b", "c", "kind"])
        for i in range(90):
            row = [0.01 * i] * 3
            row[i % 3] += 9.0
            writer.writerow([*row, ORDER[i % 3]])
    return f"csv:{tmp_path / 'wine.csv'}?target=kind"


class Kinds(nn.Linear):
    """Knows the kinds in the order of `ORDER`."""

    def __init__(self):
        super().__init__(3, 3)
        self.weight.data = torch.eye(3)
        self.bias.data.zero_()


@pytest.fixture
def checkpoint(tmp_path):
    torch.save(Kinds().state_dict(), tmp_path / "kinds.pt")
    return {"model": tmp_path / "kinds.pt", "architecture": "test_numbering:Kinds"}


def test_names_are_numbered_aloud_where_the_checkpoint_has_none(wine, checkpoint):
    for verb in (ewc.evaluate, ewc.consolidate):
        notes = Notes()
        verb(**checkpoint, data=wine, progress=notes)
        (said,) = notes.about("numbered in alphabetical order")
        assert "0 barbera, 1 barolo, 2 grignolino" in said
        assert "labels=grignolino,barolo,barbera" in said
        (warning,) = notes.about("warning")
        assert "accuracy 0.0000 on 90 samples cannot be told from guessing one of 3 classes" in warning
        assert "Suspect first the numbers of its classes, in alphabetical order: labels= names them" in warning
    notes = Notes()
    ewc.finetune(**checkpoint, data=wine, epochs=0, eval_on=[], progress=notes)
    assert notes.about("0 barbera, 1 barolo, 2 grignolino")


def test_names_in_the_order_of_the_outputs(wine, checkpoint, tmp_path):
    notes, spec = Notes(), f"{wine}&labels={','.join(ORDER)}"
    (score,) = ewc.evaluate(**checkpoint, data=spec, progress=notes)
    assert score.accuracy == 1
    assert notes.about("numbered in the order of labels=: 0 grignolino, 1 barbera, 2 barolo")
    assert not notes.about("warning")
    anchor = ewc.consolidate(**checkpoint, data=spec)
    assert anchor.provenance.classes == list(ORDER)
    # Who has the names later is not asked to guess, and labels get the numbers of the names.
    notes = Notes()
    ewc.finetune(
        **checkpoint, data=spec, anchors=anchor, epochs=0, eval_on=[], output=tmp_path / "m.pt", progress=notes
    )
    assert not notes.about("numbered")
    assert open_model(tmp_path / "m.pt", checkpoint["architecture"]).metadata.classes == list(ORDER)
    (score,) = ewc.evaluate(tmp_path / "m.pt", wine, architecture=checkpoint["architecture"])
    assert score.accuracy == 1


def named(path, labels):
    """A table whose inputs say the label."""
    rows = "".join(
        f"{'amber green red white'.split().index(label)},{n % 5},{label}\n" for n, label in enumerate(labels)
    )
    path.write_text(f"a,b,label\n{rows}")
    return f"table:{path}"


def test_labels_that_are_names_get_the_numbers_of_the_model(tmp_path):
    """Also where a file has not all of them; some of them beside others are refused, and others alone remarked on."""
    all_three = named(tmp_path / "all.csv", ["amber", "green", "red"] * 40)
    two = named(tmp_path / "two.csv", ["red", "green"] * 20)
    training = {"epochs": 40, "lr": 1e-2, "batch_size": 20}
    done = ewc.finetune("mlp?hidden=16", all_three, output=tmp_path / "m.pt", eval_on={"two": two}, **training)
    assert done.after["two"].accuracy == 1
    assert ewc.evaluate(tmp_path / "m.pt", two)[0].accuracy == 1
    more = named(tmp_path / "more.csv", ["amber", "white"] * 20)
    for call in (ewc.evaluate, ewc.consolidate):
        with pytest.raises(
            DataError, match="'white' is no class of the model's, which are amber, green, red. Leave such"
        ):
            call(tmp_path / "m.pt", more)
    notes = Notes()
    other = named(tmp_path / "other.csv", ["white"] * 20)
    ewc.evaluate(tmp_path / "m.pt", other, progress=notes)
    assert notes.about("its classes are not called what the model's are")
    # Outputs are added behind those that there are, and a new head begins anew.
    longer = {**training, "epochs": 200}
    for head, outputs, scored in (("expand", 4, {"more": more}), ("new", 2, {"more": more, "old": two})):
        done = ewc.finetune(tmp_path / "m.pt", more, head=head, eval_on=scored, **longer)
        assert done.after["more"].accuracy == 1
        assert done.model.head.out_features == outputs


def test_images_get_the_numbers_of_the_model_too(tmp_path):
    for folder, names in (("all", ("cat", "dog", "eel")), ("two", ("dog", "eel"))):
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
            for n in range(4):
                color = {"cat": (250, 0, n), "dog": (0, 250, n), "eel": (0, n, 250)}[name]
                Image.new("RGB", (8, 8), color).save(tmp_path / folder / name / f"{n}.png")
    every, two = (f"imagefolder:{tmp_path / folder}" for folder in ("all", "two"))
    ewc.finetune("mlp?hidden=16", every, output=tmp_path / "m.pt", epochs=40, lr=1e-2, batch_size=4, eval_on=[])
    assert ewc.evaluate(tmp_path / "m.pt", two)[0].accuracy == 1


def test_fresh_weights_and_new_heads_have_no_order_to_guess(wine):
    for model, head in (("mlp", "shared"), (nn.Sequential(Kinds()), "new")):
        notes = Notes()
        ewc.finetune(model, wine, head=head, epochs=0, eval_on=[], progress=notes)
        assert not notes.about("numbered")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("barolo,grignolino,barbara", "labels= does not name 'barbera', .* and no sample is labelled 'barbara'"),
        ("barolo,grignolino", "labels= does not name 'barbera'"),
    ],
)
def test_names_that_do_not_match_are_refused(wine, labels, message):
    with pytest.raises(DataError, match=message):
        load_domain(f"{wine}&labels={labels}", "train")


@pytest.mark.parametrize("labels", ["a,a", "a,,b", '"a'])
def test_names_that_cannot_be_meant(wine, labels):
    with pytest.raises(UsageError, match="expected names in the order of the model's outputs"):
        load_domain(f"{wine}&labels={labels}", "train")


def test_every_kind_of_data_with_names_takes_their_order(tmp_path):
    for name in ("cat", "dog, wild"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / "photos" / name / "0.png")
    order = 'labels="dog, wild",fox,cat'  # a class may have no samples
    folder = load_domain(f"imagefolder:{tmp_path / 'photos'}?{order}", "train")
    assert (folder.labels.tolist(), folder.classes) == ([2, 0], ("dog, wild", "fox", "cat"))
    assert [label for _, label in folder.samples.files] == [2, 0]
    with pytest.raises(DataError, match="does not name 'dog, wild'"):
        load_domain(f"imagefolder:{tmp_path / 'photos'}?labels=cat,dog", "train")
    np.savez(tmp_path / "a.npz", x_train=np.ones((3, 2)), y_train=np.array(["b", "a", "c"]), x_test=np.ones((1, 2)),
             y_test=np.array(["c"]))  # fmt: skip
    assert load_domain(f"npz:{tmp_path / 'a.npz'}", "train").labels.tolist() == [1, 0, 2]
    assert load_domain(f"npz:{tmp_path / 'a.npz'}", "test").labels.tolist() == [2]  # numbered over both
    assert load_domain(f"npz:{tmp_path / 'a.npz'}?labels=c,b,a", "test").labels.tolist() == [0]
    np.savez(tmp_path / "n.npz", x=np.ones((3, 2)), y=np.array([7, 3, 7]))
    assert load_domain(f"npz:{tmp_path / 'n.npz'}?labels=7,3", "train").labels.tolist() == [0, 1, 0]
    (tmp_path / "n.csv").write_text("a,label\n1,7\n2,3\n")
    assert load_domain(f"csv:{tmp_path / 'n.csv'}?labels=7,3&classes=1", "train").samples.tensors[0].tolist() == [[2.0]]
    with pytest.raises(UsageError, match="labels= names the classes in one column; there are 2"):
        load_domain(f"csv:{tmp_path / 'n.csv'}?labels=7,3&target=a,label", "train")
    np.savez(tmp_path / "x.npz", x=np.ones((3, 2)))
    with pytest.raises(UsageError, match="there is no array of labels"):
        load_domain(f"npz:{tmp_path / 'x.npz'}?labels=7,3", "train")
    with pytest.raises(UsageError, match="has no option 'labels'"):
        load_domain("digits?labels=0,1", "train")


def test_names_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    from ewc_finetune.data.hugging_face import of_rows
    from ewc_finetune.data.options import DataOptions

    (tmp_path / "r.jsonl").write_text("\n".join(json.dumps({"text": "w", "label": n}) for n in ("no", "yes", "no")))
    assert load_domain(f"hf:{tmp_path / 'r.jsonl'}?labels=yes,no", "train").labels.tolist() == [1, 0, 1]
    named = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])})
    rows = datasets.Dataset.from_dict({"text": ["a", "b"], "label": [1, 0]}, features=named)
    plain, turned = (of_rows(rows, "rows", DataOptions(labels=labels)) for labels in (None, ("pos", "neg")))
    assert (plain.labels.tolist(), plain.classes, plain.numbering) == ([1, 0], ("neg", "pos"), "as the dataset does")
    assert (turned.labels.tolist(), turned.classes) == ([0, 1], ("pos", "neg"))
    with pytest.raises(UsageError, match="labels of a stream"):
        load_domain(f"hf:{tmp_path / 'r.jsonl'}?labels=yes,no&stream=1", "train")


def test_what_can_be_told_from_guessing():
    assert at_chance(0.0, 90, 3)  # far fewer than guesses would be right: no better, so something is wrong
    assert at_chance(1 / 3, 90, 3)
    assert not at_chance(0.5, 90, 3)
    assert not at_chance(0.0, 29, 3)  # too few to tell
    assert not at_chance(1.0, 60_000, 10)
    assert at_chance(0.101, 60_000, 10)
    assert not at_chance(0.11, 60_000, 10)
    assert at_chance(1.0, 1_000, 1) is False
    # The tail itself: 16 or more of 60 heads of a die with 6 sides come in 3.4% of all trials, 18 in 0.9%.
    assert at_chance(16 / 60, 60, 6)
    assert not at_chance(18 / 60, 60, 6)


def test_images_are_suspected_of_their_numbers_first(tmp_path):
    draws = np.random.default_rng(0)
    images = draws.integers(0, 256, (200, 1, 8, 8), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=draws.integers(0, 10, 200))
    torch.manual_seed(0)
    model, notes = ewc.finetune("cnn", "digits", epochs=0, eval_on=[]).model, Notes()
    ewc.evaluate(model, f"npz:{tmp_path / 'a.npz'}", progress=notes)
    (warning,) = notes.about("warning")
    assert "Suspect first how images go in (from 0 to 1): the data options mean= and std= say otherwise" in warning
    # What a model was trained on here is known; of a domain that it may have forgotten nothing is said.
    notes = Notes()
    ewc.finetune("cnn", f"npz:{tmp_path / 'a.npz'}", epochs=0, eval_on=[], output=tmp_path / "m.pt")
    ewc.evaluate(tmp_path / "m.pt", f"npz:{tmp_path / 'a.npz'}", progress=notes)
    assert not notes.about("warning")
    ewc.consolidate(tmp_path / "m.pt", f"npz:{tmp_path / 'a.npz'}", progress=notes)
    (warning,) = notes.about("warning")
    assert "Suspect first whether this is data that the model was trained for" in warning
