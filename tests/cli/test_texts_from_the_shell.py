"""From an encoder without a head to a classifier of reviews, then of topics, and what it still knows of reviews."""

import csv
import json

import pytest
from support.transformers_models import encoder, saved, tokenizer

REVIEWS, TOPICS = ("w1", "w2"), ("w11", "w12", "w13")


def sentences(words, count):
    """Sentences of which one word says the class."""
    return [(f"w20 {words[n % len(words)]} w{21 + n % 7} w{30 + n % 5}", n % len(words)) for n in range(count)]


@pytest.fixture
def folder(tmp_path):
    saved(encoder(), tmp_path / "encoder")
    for name, count in (("train", 120), ("dev", 40)):
        rows = [f"{text}\t{label}\n" for text, label in sentences(REVIEWS, count)]
        (tmp_path / f"{name}.tsv").write_text("".join(rows))
    with (tmp_path / "topics.csv").open("w", newline="") as file:
        rows = [(label + 1, "a title", text) for text, label in sentences(TOPICS, 180)]
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)
    return tmp_path


def test_reviews_then_topics_in_five_commands(ewc_ft, folder):
    reviews = "table:train.tsv?header=0&text=1&target=2"
    topics = "table:topics.csv?header=0&text=3&target=1&offset=-1&test=0.2"
    quick = ("--lr", 3e-3, "--batch-size", 20)
    ewc_ft(
        "finetune", "--model", "encoder", "--head", "new", "--data", reviews, "-o", "reviews", *quick, "--epochs", 10
    )
    ewc_ft("consolidate", "reviews", "--data", reviews, "--probe", 40)
    said = ewc_ft(
        *("finetune", "--model", "reviews", "--anchors", "reviews.anchor.safetensors", "--head", "new"),
        *("--data", topics, "-o", "topics", "--lambda", 1, *quick, "--epochs", 20),
    ).stderr
    assert "head classifier: a new one, with 3 outputs in the place of 2" in said
    new = ewc_ft("evaluate", "topics", "--data", topics, "--json").stdout
    dev = "table:dev.tsv?header=0&text=1&target=2"
    old = ewc_ft("evaluate", "topics", "--data", dev, "--head", "reviews.anchor.safetensors", "--json").stdout
    learned, kept = (json.loads(text)["scores"][0]["accuracy"] for text in (new, old))
    assert learned > 0.9
    assert kept > 0.9
    config = json.loads((folder / "topics" / "config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert len(config["id2label"]) == 3


def write_pairs(path, words, count):
    """Write pairs of texts in which the class says which of the two has the first of the words."""
    rows = []
    for n in range(count):
        one, other = words if n % 2 else words[::-1]
        rows.append(f"w20 {one} w{21 + n % 7}\tw{30 + n % 5} {other}\t{n % 2}\n")
    path.write_text("one\tother\tlabel\n" + "".join(rows))


def test_pairs_of_texts_then_others(ewc_ft, tmp_path):
    saved(encoder(), tmp_path / "encoder")
    tokenizer(of_pairs=True).save_pretrained(tmp_path / "encoder")
    for name, words in (("old", REVIEWS), ("new", TOPICS[:2])):
        write_pairs(tmp_path / f"{name}.tsv", words, 40)
    old, new = (f"table:{name}.tsv?text=one,other" for name in ("old", "new"))
    quick = ("--lr", 5e-3, "--batch-size", 10, "--epochs", 6, "--eval-every", 1000)
    ewc_ft("finetune", "--model", "encoder", "--head", "new", "--data", old, "-o", "old", *quick)
    said = ewc_ft("consolidate", "old", "--data", old, "--probe", 20).stderr
    assert "samples of a dictionary of input_ids" in said
    assert "token_type_ids" in said
    held = ("finetune", "--model", "old", "--anchors", "old.anchor.safetensors", "--data", new, "-o", "new", *quick)
    ewc_ft(*held, "--lambda", 1)
    scores = json.loads(ewc_ft("evaluate", "new", "--data", old, "--data", new, "--json").stdout)["scores"]
    assert [score["accuracy"] > 0.9 for score in scores] == [True, True]


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        (
            "consolidate encoder --data table:train.tsv?header=0&text=1&target=2",
            1,
            "encoder is a BertModel, whose outputs are no predictions. ewc-ft finetune --head new makes a classifier",
        ),
        (
            "finetune --model encoder --data table:train.tsv?header=0&text=1&target=2 -o x",
            1,
            "--head new makes a class",
        ),
        ("finetune --model encoder --head new --data train.tsv -o x", 2, "say of what kind it is: table:train.tsv"),
        (
            "finetune --model encoder --head new --data table:topics.csv?header=0&text=3&target=1 --epochs 0 -o x",
            0,
            "a new one, with 4 outputs",
        ),
        ("finetune --model timm:resnet81 --data digits -o x", 2, "timm has no model 'resnet81'. Did you mean"),
    ],
)
def test_what_a_new_user_gets_wrong_on_the_way(command, code, words, ewc_ft, folder):
    assert words in ewc_ft(*command.split(), expect=code).stderr
