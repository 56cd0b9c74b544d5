"""A table of mixed columns to a regression and back, from the shell alone; and what is said of mistakes on the way."""

import json
import math
import random

import numpy as np
import pytest
import torch
from support.transformers_models import bert, saved

import ewc_finetune as ewc
from ewc_finetune.data.columns import read_columns
from ewc_finetune.errors import DataError

CITIES = {"Bonn": 0.5, "Oslo": 2.0, "Rome": 1.0}
ASKED = "target=price&ignore=id&onehot=city&missing=mean&standardise=1&test=0.2"
# What has to be said again: the anchor has the rest.
AGAIN = "target=price&test=0.2"


def write_flats(path, seed, older_is_better=False):
    """Write flats with their prices, in a domain in which age takes from the price, or adds to it."""
    draw, lines = random.Random(seed), ["id\tsize\tage\tcity\tprice"]
    for number in range(400):
        size, age, city = draw.uniform(20, 150), draw.uniform(0, 60), draw.choice(sorted(CITIES))
        price = CITIES[city] + (size - 85) / 40 + (age - 30) / 30 * (1 if older_is_better else -1) + draw.gauss(0, 0.1)
        lines.append(f"A{number}\t{size:.1f}\t{'' if draw.random() < 0.1 else round(age)}\t{city}\t{price:.3f}")
    path.write_text("\n".join(lines))


def scores(result):
    return {score["domain"].partition("?")[0]: score["loss"] for score in json.loads(result.stdout)["scores"]}


def test_a_table_to_a_regression_and_back(ewc_ft, tmp_path):
    write_flats(tmp_path / "flats.tsv", 0)
    write_flats(tmp_path / "castles.tsv", 1, older_is_better=True)
    old, new, training = (
        f"table:flats.tsv?{AGAIN}",
        f"table:castles.tsv?{AGAIN}",
        ("--epochs", 25, "--lr", 3e-3, "--eval-every", 1000),
    )
    said = ewc_ft(
        *("finetune", "--model", "mlp?hidden=32,32", "--data", f"table:flats.tsv?{ASKED}", "-o", "flats.pt", *training)
    ).stderr
    assert "samples of 5, 2 columns standardised, city as one of 3 texts, missing values filled in 3 columns" in said
    assert "mlp?in_features=5&hidden=32,32&num_classes=1" in said
    said = ewc_ft("consolidate", "flats.pt", "--data", old).stderr
    assert f"{old}: left out, for the model was not trained on them: id" in said
    assert f"{old}: its columns become inputs as the model's own did" in said
    assert "exact Fisher of 320 samples" in said
    held = ("finetune", "--anchors", "flats.anchor.safetensors", "--data", new, "--lambda", 30, *training)
    ewc_ft(*held, "-o", "castles.pt", "--eval", old, "--eval", new)
    ewc_ft("finetune", "--model", "flats.pt", "--data", new, "-o", "plain.pt", *training)
    before, kept, plain = (
        scores(ewc_ft("evaluate", model, "--data", old, "--data", new, "--json"))
        for model in ("flats.pt", "castles.pt", "plain.pt")
    )
    assert before["table:flats.tsv"] < 0.96  # half a nat of log(2 pi) and the squared error
    assert kept["table:castles.tsv"] < before["table:castles.tsv"] - 0.3
    assert kept["table:flats.tsv"] < plain["table:flats.tsv"] - 0.1
    # And back: the new domain is consolidated too, and the old one trained on again.
    ewc_ft("consolidate", "castles.pt", "--data", new, "-o", "both.safetensors")
    ewc_ft("finetune", "--anchors", "both.safetensors", "--data", old, "-o", "back.pt", *training)
    back = scores(ewc_ft("evaluate", "back.pt", "--data", old, "--data", new, "--json"))
    assert back["table:flats.tsv"] < kept["table:flats.tsv"]
    assert back["table:castles.tsv"] < before["table:castles.tsv"]
    # The numbers are those of the first training data throughout, whatever came later.
    anchors = [ewc.Anchor.open(tmp_path / name) for name in ("flats.anchor.safetensors", "both.safetensors")]
    columns = [read_columns(anchor.provenance.input) for anchor in anchors]
    assert columns[0] == columns[1]
    assert [one.name for one in columns[0]] == ["size", "age", "city"]
    assert columns[0][2].categories == ("Bonn", "Oslo", "Rome")
    assert anchors[0].provenance.likelihood == "gaussian"


MIXED = "id;age;city;price\na;30;Rome;1.5\nb;40;Oslo;2.5\nc;;Rome;3.5\nd;20;Oslo;4.5\n"


@pytest.fixture
def trained(ewc_ft, tmp_path):
    """A folder with a model of a table."""
    (tmp_path / "t.csv").write_text(MIXED)
    data = "table:t.csv?target=price&ignore=id&onehot=city&missing=mean"
    ewc_ft("finetune", "--model", "mlp?hidden=4", "--data", data, "--epochs", 1, "-o", "m.pt")
    return ewc_ft


@pytest.mark.parametrize(
    ("text", "data", "said"),
    [
        (MIXED, "t.csv", "t.csv is a file; say of what kind it is: table:t.csv"),
        (
            MIXED,
            "table:t.csv?target=prize",
            "there is no column 'prize' for the target. Did you mean 'price'? Known: age, city",
        ),
        (
            MIXED,
            "table:t.csv?target=price",
            "not all values are numbers in columns 'id' ('a' in line 2), 'city' ('Rome' in line 2). Leave out what "
            "says nothing (ignore=id,city), make categories of texts (onehot=id,city)",
        ),
        (
            MIXED,
            "table:t.csv?target=price&ignore=id&onehot=town",
            "there is no column 'town' for the option onehot=. Known: age, city, id, price",
        ),
        (
            MIXED,
            "table:t.csv?target=price&ignore=id&onehot=city",
            "t.csv: column 'age' has no value in line 4. Fill what is missing (missing=mean, or a number: missing=0), "
            "or leave the column out (ignore=age)",
        ),
        (MIXED, "table:t.csv?target=price&ignore=id,city&missing=average", "expected mean, or a number such as 0"),
        (MIXED, "table:t.csv?target=price&split=test", "one file has no splits to choose from; name the file of the"),
        (MIXED, "table:t.csv?ignore=id&onehot=1&missing=0", "has no labels that say how many classes there are. Name"),
        (
            MIXED.replace("2.5", ""),
            "table:t.csv?target=price",
            "the target 'price' has no label in line 3. Leave such rows out, or give them one",
        ),
        (MIXED.replace("2.5", "n.n."), "table:t.csv?target=price", "line 3: the target 'price' is 'n.n.', and most of"),
        (MIXED.replace(".", ","), "table:t.csv?target=age&ignore=id,city", "the target 'age' has no label in line 4"),
        (
            MIXED.replace(".", ","),
            "table:t.csv?target=city&ignore=id,age",
            "'price' ('1,5' in line 2). If a comma is the decimal point, say decimal=comma;",
        ),
        (
            MIXED.replace(".", ","),
            "table:t.csv?target=price&ignore=id,age",
            "line 2: the target 'price' is '1,5'. If a comma is the decimal point, say decimal=comma; those between",
        ),
        (
            "text,label\n" + "".join(f"it is {n},{n % 2}\n" for n in range(30)),
            "table:t.csv?text=label&target=text",
            "30 of 30 labels are different, such as 'it is 0', and hardly name classes. Are they what is to be "
            "predicted (target=NAME), or are text= and target= swapped?",
        ),
        (
            "1,2,3\n4,5,6\n",
            "table:t.csv?target=3",
            "its first line is all numbers (1, 2, 3), so it seems to have no names",
        ),
        (
            "a,y\n1,2,3\n",
            "table:t.csv",
            "row 2: 3 fields, and the first line has 2. The separator was taken to be",
        ),
        (
            "a,y\n1,200000\n2,350000\n",
            "table:t.csv",
            "2 different whole numbers from 200,000 to 350,000, which number no classes from 0. If they are to be "
            "predicted as numbers: --likelihood gaussian; if each is a class: labels= names all of them",
        ),
        ("a,y\n1,-1\n2,1\n", "table:t.csv", "2 different whole numbers from -1 to 1, which number no classes from 0"),
        ("a,b,y\n1,2,0.5\n2,3,1.5\n", "table:t.csv?target=b,y", "Numbers of other kinds go with --likelihood gaussian"),
    ],
)
def test_mistakes_of_a_first_training(text, data, said, ewc_ft, tmp_path):
    (tmp_path / "t.csv").write_text(text)
    wrongly_typed = any(
        word in said for word in ("say of what kind", "there is no column", "expected mean", "no splits")
    )
    finetune = ("finetune", "--model", "mlp?hidden=4", "--data", data, "-o", "m.pt")
    assert said in " ".join(ewc_ft(*finetune, expect=2 if wrongly_typed else 1).stderr.split())


@pytest.mark.parametrize(
    ("text", "data", "said"),
    [
        (
            "age;city;price\n30;Lima;1.5\n",
            "target=price",
            "n.csv, line 2: column 'city' is 'Lima', a category that the training data did not have; it had Oslo, "
            "Rome. Leave such rows out, or let it be none of them (unseen=zeros)",
        ),
        (
            "years;city;price\n30;Rome;1.5\n",
            "target=price",
            "n.csv has no column 'age', which the model was trained on; beside the target it has years, city. Name its",
        ),
        ("age;city;price\nold;Rome;1.5\n", "target=price", "line 2: 'old' is no number, and column 'age' is one of"),
        ("age;city;price\n30;Rome;1.5\n", "ignore=price", "n.csv?ignore=price has no labels, and a score needs them"),
    ],
)
def test_mistakes_with_later_data(text, data, said, trained, tmp_path):
    (tmp_path / "n.csv").write_text(text)
    assert said in " ".join(trained("evaluate", "m.pt", "--data", f"table:n.csv?{data}", expect=1).stderr.split())


def test_what_is_assumed_of_later_data_is_said(trained, tmp_path):
    (tmp_path / "n.csv").write_text("city;age;price\nRome;;1.5\nLima;3;2\n")
    said = trained("evaluate", "m.pt", "--data", "table:n.csv?target=price&unseen=zeros").stderr
    assert "its columns become inputs as the model's own did" in said
    said = trained("evaluate", "m.pt", "--data", "table:n.csv?target=price&unseen=zeros&standardise=1").stderr
    assert (
        "the model's own columns were: city as one of 2 texts, missing values filled in 2 columns; these are: 1 "
        in said
    )
    # A model of somebody else's has no record.
    torch.save(dict(torch.load("m.pt")), "bare.pt")
    (tmp_path / "n.csv").write_text("a;b;c;price\n1;2;3;1.5\n4;5;6;2.5\n")
    data = "table:n.csv?target=price&standardise=1"
    said = trained("evaluate", "bare.pt", "--arch", "mlp?in_features=3&hidden=4&num_classes=1", "--data", data).stderr
    assert "standardised by its own mean and deviation, for nothing is recorded of the model's" in said
    assert "loss" in said


def test_targets_of_another_size_are_remarked_on(ewc_ft, tmp_path):
    (tmp_path / "t.csv").write_text("a,price\n1,200000\n2,350000\n3,280000\n")
    finetune = ("finetune", "--model", "mlp?hidden=4", "--likelihood", "gaussian", "--epochs", 1, "--overwrite")
    said = ewc_ft(*finetune, "--data", "table:t.csv?target=price", "-o", "m.pt").stderr
    assert "its targets deviate by 61,283 from their mean" in said
    assert "unit=100000 divides by that, and is kept with the model" in said
    said = ewc_ft(*finetune, "--data", "table:t.csv?target=price&unit=1000", "-o", "m.pt").stderr
    assert "its targets deviate by 61 from their mean" in said
    assert "unit=100000 divides by that" in said
    assert "deviate" not in ewc_ft(*finetune, "--data", "table:t.csv?target=price&unit=100000", "-o", "m.pt").stderr


def test_the_unit_of_targets_stays_with_the_model(ewc_ft, tmp_path):
    rows = [(n % 17, 200_000 + 10_000 * (n % 17)) for n in range(40)]
    (tmp_path / "t.csv").write_text("a,price\n" + "".join(f"{a},{price}\n" for a, price in rows))
    (tmp_path / "k.csv").write_text("a,price\n" + "".join(f"{a},{price / 1000}\n" for a, price in rows))
    training = ("--likelihood", "gaussian", "--epochs", 1, "--overwrite")
    said, plain = "table:t.csv?target=price&unit=100000", "table:t.csv?target=price"
    ewc_ft("finetune", "--model", "mlp?hidden=4", "--data", said, "--eval", plain, "-o", "m.pt", *training)
    assert "a; targets divided by 100,000" in ewc_ft("inspect", "m.pt").stderr
    notes = ewc_ft("consolidate", "m.pt", "--data", plain).stderr
    assert f"{plain}: its targets are divided by 100,000, as the model's own were; unit= says another" in notes
    held = ("finetune", "--anchors", "m.anchor.safetensors", "--data", plain, "-o", "n.pt", *training)
    said_then = ewc_ft(*held).stderr
    assert "deviate" not in said_then
    assert "another function" not in said_then
    held = (*held[:4], "table:t.csv?target=price&unit=10000", *held[5:])
    assert (
        "m.anchor.safetensors was made with targets divided by 100,000, and here they are divided by 10,000: its "
        "curvature is of another function" in ewc_ft(*held, "--overwrite").stderr
    )
    ewc_ft(*held[:4], plain, *held[5:])
    thousands = "table:k.csv?target=price&unit=100"
    result = ewc_ft("evaluate", "n.pt", "--data", said, "--data", plain, "--data", thousands, "--json")
    as_said, as_recorded, otherwise = (score["loss"] for score in json.loads(result.stdout)["scores"])
    assert as_said == as_recorded == pytest.approx(otherwise)
    assert "its targets are divided by 100; the model's own were by 100,000" in result.stderr
    result = ewc_ft("evaluate", "n.pt", "--data", "table:t.csv?target=price&unit=1", "--json")
    assert json.loads(result.stdout)["scores"][0]["loss"] > 1e6
    assert ewc.Anchor.open("m.anchor.safetensors").provenance.input["target_unit"] == 100_000
    assert "target_unit" not in ewc.consolidate("n.pt", "table:t.csv?target=price&unit=1").provenance.input
    # Arrays and what comes from Python are targets as they are; what is known of the model stays.
    x, y = (np.array(values, dtype=np.float32) for values in zip(*rows, strict=True))
    np.savez(tmp_path / "t.npz", x=x[:, None], y=y / 1e5)
    result = ewc_ft("evaluate", "n.pt", "--data", "npz:t.npz", "--json")
    assert json.loads(result.stdout)["scores"][0]["loss"] == pytest.approx(as_said)
    assert "npz:t.npz: its targets stay as they are; the model's own were divided by 100,000" in result.stderr
    assert ewc.consolidate("n.pt", "npz:t.npz").provenance.input["target_unit"] == 100_000


def test_numbers_of_texts_have_a_unit_too(tmp_path):
    rows = [("w1 w2", 50), ("w3", -10), ("w4", 22.5)]
    (tmp_path / "n.csv").write_text("text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    lines = (json.dumps({"text": text, "label": float(label)}) for text, label in rows)
    (tmp_path / "n.jsonl").write_text("\n".join(lines))
    one = saved(bert(id2label={0: "LABEL_0"}, label2id={"LABEL_0": 0}), tmp_path / "one")
    anchors = [
        ewc.consolidate(one, f"{data}?unit=10", estimator="empirical")
        for data in (f"hf:{tmp_path / 'n.jsonl'}", f"table:{tmp_path / 'n.csv'}")
    ]
    assert [anchor.provenance.input["target_unit"] for anchor in anchors] == [10, 10]
    assert len({anchor.provenance.data["fingerprint"] for anchor in anchors}) == 1
    data = f"hf:{tmp_path / 'n.jsonl'}"
    done = ewc.finetune(one, data, anchors=anchors[0], epochs=0, eval_on=[data, f"{data}?stream=1"])
    said = ewc.evaluate(one, [f"{data}?unit=10", f"{data}?unit=10&stream=1"])
    assert [score.loss for score in (*done.before, *said)] == [pytest.approx(said[0].loss)] * 4


def test_classes_that_are_written_with_decimals_are_remarked_on(ewc_ft, tmp_path):
    (tmp_path / "t.csv").write_text("x,label\n" + "".join(f"{n},{n % 2}.0\n" for n in range(8)))
    finetune = ("finetune", "--model", "mlp?hidden=4", "--epochs", 1, "--overwrite", "-o", "m.pt")
    said = ewc_ft(*finetune, "--data", "table:t.csv").stderr
    assert (
        "its targets are whole numbers that are written with decimals (0.0,1.0), so they are predicted as numbers. If "
        "each is a class, give whole numbers (1 for 1.0), or name them, of a table: labels=0.0,1.0" in said
    )
    assert "decimals" not in ewc_ft("evaluate", "m.pt", "--data", "table:t.csv").stderr
    said = ewc_ft(*finetune, "--data", "table:t.csv?labels=0.0,1.0").stderr
    assert "num_classes=2" in said
    assert "decimals" not in said
    for target in ("{n}.0", "{n}.5"):  # as many as there are rows, or no whole ones
        (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{n},{target.format(n=n % 8)}\n" for n in range(8)))
        assert "decimals" not in ewc_ft(*finetune, "--data", "table:t.csv").stderr


def test_labels_of_classes(ewc_ft, tmp_path):
    rows = "\n".join(f"{n},{1 + n % 3}" for n in range(12))
    (tmp_path / "t.csv").write_text(f"x,label\n{rows}\n")
    finetune = ("finetune", "--model", "mlp?hidden=4", "--epochs", 1, "--overwrite", "-o", "m.pt")
    said = ewc_ft(*finetune, "--data", "table:t.csv").stderr
    assert (
        "its labels begin at 1, and the model gets outputs for those from 0 on, which no sample has; offset=-1" in said
    )
    assert "num_classes=3" in ewc_ft(*finetune, "--data", "table:t.csv?offset=-1").stderr
    said = ewc_ft("evaluate", "m.pt", "--data", "table:t.csv", expect=1).stderr
    assert "found 3. If they are numbered from 1, offset=-1 numbers them from 0" in " ".join(said.split())
    # Fewer classes than the model has outputs.
    ewc_ft("evaluate", "m.pt", "--data", "table:t.csv?offset=-1&classes=1-2")
    (tmp_path / "t.csv").write_text("x,y\n1,0.5\n2,1.5\n")
    one = ("--arch", "mlp?in_features=1&hidden=4&num_classes=3")
    assert (
        "Class labels go with categorical"
        in ewc_ft("evaluate", "m.pt", "--data", "table:t.csv", *one, "--likelihood", "gaussian", expect=1).stderr
    )


def test_one_answer_of_yes_and_no(ewc_ft, tmp_path):
    (tmp_path / "t.csv").write_text("x,label\n1,0\n2,1\n3,1\n")
    data = ("--data", "table:t.csv")
    said = ewc_ft("finetune", "--model", "mlp?hidden=4", *data, "--likelihood", "bernoulli", "-o", "m.pt").stderr
    assert "num_classes=1" in said
    (score,) = json.loads(ewc_ft("evaluate", "m.pt", *data, "--json").stdout)["scores"]
    assert score["accuracy"] in (0, 1 / 3, 2 / 3, 1)


@pytest.mark.parametrize("form", ["table", "arrays"])
def test_a_module_with_one_output_is_a_regression(form, ewc_ft, tmp_path):
    inputs, targets = torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0.5, 1.5, 1.0])
    (tmp_path / "t.csv").write_text("x,y\n1,0.5\n2,1.5\n4,1\n")
    np.savez(tmp_path / "t.npz", x=inputs, y=targets)
    data = "table:t.csv" if form == "table" else "npz:t.npz"
    model = torch.nn.Linear(1, 1)
    anchor = ewc.consolidate(model, data, estimator="empirical")
    errors = targets - model(inputs)[:, 0].detach()
    assert anchor.provenance.likelihood == "gaussian"
    assert anchor.fisher["weight"].item() == pytest.approx((errors * inputs[:, 0]).square().mean().item(), rel=1e-5)
    (score,) = ewc.evaluate(model, data)
    assert score.loss == pytest.approx(0.5 * errors.square().mean().item() + 0.5 * math.log(2 * math.pi), rel=1e-5)
    # Whole numbers may be classes; what a model with one output can be is said.
    (tmp_path / "t.csv").write_text("x,y\n1,5\n2,15\n4,10\n")
    with pytest.raises(DataError, match="A model with one output predicts a number: --likelihood gaussian"):
        ewc.consolidate(model, "table:t.csv")
    assert ewc.consolidate(model, "table:t.csv", likelihood="gaussian").provenance.samples == 3


def test_a_file_without_names_goes_by_the_order(trained, tmp_path):
    (tmp_path / "n.csv").write_text("30;Rome;1.5\n40;Oslo;2.5\n")
    trained("consolidate", "m.pt", "--data", "table:n.csv?header=0&target=3", "-o", "a.safetensors")
    # What is kept has the names that the columns had in training.
    assert [one.name for one in read_columns(ewc.Anchor.open("a.safetensors").provenance.input)] == ["age", "city"]
    (tmp_path / "n.csv").write_text("price;city;age\n1.5;Rome;3\n2.5;Oslo;4\n")
    finetune = ("finetune", "--anchors", "a.safetensors", "--epochs", 1, "--overwrite", "-o", "n.pt")
    assert "of another function" not in trained(*finetune, "--data", "table:n.csv?target=price").stderr
    said = trained(*finetune, "--data", "table:n.csv?target=price&standardise=1").stderr
    assert "a.safetensors was made with other columns, or by other numbers of theirs" in said
