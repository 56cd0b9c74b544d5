"""Tables as people have them: how files are read, and how columns become inputs."""

import contextlib
import csv
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ewc_finetune.anchor.provenance import read_provenance
from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.data.columns import Column, is_table_record, read_columns
from ewc_finetune.data.encoding import encode
from ewc_finetune.data.sources import load_domain
from ewc_finetune.data.table_files import Frame, NoNumberError, read_table
from ewc_finetune.errors import AnchorError, CheckpointError, DataError, UsageError

MIXED = "size,age,city,price\n1,2,Rome,0.5\n2,,Oslo,1.5\n3,6,Rome,2.5\n6,4,,3.5\n"


@pytest.fixture
def table(tmp_path):
    """Write a text, and return the domain of it with these options."""

    def load(text, options="", split="train", name="t.csv"):
        (tmp_path / name).write_text(text)
        return load_domain(f"table:{tmp_path / name}{'?' if options else ''}{options}", split)

    return load


def inputs_of(domain):
    return next(iter(domain.batches(1000)))[0].tolist()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("t.csv", "a,b c,label\n1,2.5,0\n-3,4e1,1\n"),
        ("t.csv", "\ufeffa;b c;label\r\n1;2.5;0\r\n\r\n-3;4e1;1\r\n"),
        ("t.txt", "a\tb c\tlabel\n1\t2.5\t0\n-3\t4e1\t1"),
        ("t.tsv", 'a\t"b c"\tlabel\n 1 \t"2.5"\t0\n-3\t+40\t1\n'),
        ("t.csv", "a|b c|label\n1|2.5|0\n-3|40|1\n"),
    ],
)
def test_separators_are_found(name, content, table):
    domain = table(content, name=name)
    assert (inputs_of(domain), domain.labels.tolist()) == ([[1, 2.5], [-3, 40]], [0, 1])


@given(
    st.sampled_from(",;\t|"),
    st.lists(st.tuples(*[st.text('ab1.,;\t|\n"\u00e9 ', max_size=6)] * 3), min_size=1, max_size=5),
)
def test_what_is_written_is_read(tmp_path_factory, separator, rows):
    path = tmp_path_factory.mktemp("written") / "t.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, delimiter=separator, quoting=csv.QUOTE_ALL).writerows([("x", "y", "z"), *rows])
    frame = read_table(path)
    assert list(zip(*(column.to_pylist() for column in frame.columns.values()), strict=True)) == rows


def test_a_separator_within_quotes_or_of_the_texts_is_none(table):
    domain = table('text,label\n"a; b, and ""c""\nd",0\ne;f,1\n')
    assert list(domain.samples.texts) == ['a; b, and "c"\nd', "e;f"]
    assert inputs_of(table("label;x\n0;1,5\n1;2,5\n", "decimal=comma")) == [[1.5], [2.5]]


@given(
    st.lists(st.decimals(-(10**9), 10**9, places=2), min_size=1, max_size=5), st.booleans(), st.sampled_from(["", " "])
)
def test_a_comma_as_decimal_point(tmp_path_factory, numbers, grouped, space):
    """With points between thousands or without."""
    path = tmp_path_factory.mktemp("comma") / "t.csv"
    texts = [f"{number:{',' if grouped else ''}.2f}".translate(str.maketrans(",.", ".,")) for number in numbers]
    path.write_text("x;y\n" + "".join(f"{space}{text};{text}\n" for text in texts))
    frame = read_table(path, decimal_comma=True)
    for name in ("x", "y"):
        assert frame.numbers(name).tolist() == [float(number) for number in numbers]


def test_points_of_other_numbers_stay(table):
    assert inputs_of(table("x;z;label\n1.234;0.123;0\n1.5;1,5;1\n", "decimal=comma")) == [
        [pytest.approx(1.234), pytest.approx(0.123)],
        [1.5, 1.5],
    ]
    assert inputs_of(table("x;z;label\n1.234;1.234.567,5;0\n12.000;-1.000;1\n", "decimal=comma")) == [
        [1234, 1234567.5],
        [12000, -1000],
    ]
    assert list(table("text;label\nv. 1.234;0\n1.234;1\n", "decimal=comma").samples.texts) == ["v. 1.234", "1.234"]


def test_targets_with_commas_lead_to_the_decimal_point(table):
    for value in ("1,5", "834,772", "1.834,77"):
        text = f"x;y\n1;{value}\n2;2,5\n"
        with pytest.raises(DataError, match=r"line 2: the target 'y' is .*say decimal=comma; those between thousands"):
            table(text, "target=y")
    assert table("x;y\n1;1,5\n2;2,5\n", 'target=y&labels="1,5","2,5"').labels.tolist() == [0, 1]
    assert table("x;y\n1;1,5\n2;a\n", "target=y").classes == ("1,5", "a")


def test_texts_in_the_place_of_labels_are_refused(table):
    text = "text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(30))
    with pytest.raises(DataError, match="text: 30 of 30 labels are different, such as 'text 0', .* or are text= and"):
        table(text, "text=label&target=text")
    names = ",".join(f"text {n}" for n in range(30))
    assert len(table(text, f"text=label&target=text&labels={names}").classes) == 30
    # Where some samples have one class, they may be classes, and so may 20 of any number.
    assert len(table("text,label\n" + "".join(f"a,c{n % 25}\n" for n in range(30))).classes) == 25
    assert len(table("text,label\n" + "".join(f"a,c{n}\n" for n in range(20))).classes) == 20


def test_without_a_header_columns_have_numbers(table):
    domain = table("7,1,0.5\n8,2,1.5\n", "header=0&target=3&ignore=1")
    assert (inputs_of(domain), domain.labels.tolist()) == ([[1], [2]], [0.5, 1.5])
    with pytest.raises(DataError, match=r"its first line is all numbers \(7, 1, 0.5\).* Say header=0"):
        table("7,1,0.5\n8,2,1.5\n")
    assert table("2024,2025\n8,2\n", "header=1").samples.names == ("2024", "2025")


@pytest.mark.parametrize("ending", ["parquet", "feather", "arrow"])
def test_parquet_and_arrow(ending, tmp_path):
    path, rows = tmp_path / f"t.{ending}", pa.table({
        "x": [1, None, 3], "flag": [True, False, True], "kind": pa.array(["a", "b", "a"]).dictionary_encode(),
        "price": pa.array([1, 2, 3], pa.decimal128(5, 2)),
    })  # fmt: skip
    if ending == "parquet":
        pq.write_table(rows, path)
    elif ending == "feather":
        pyarrow.feather.write_feather(rows, path, compression="zstd")
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, rows.schema) as writer:
            writer.write_table(rows)
    domain = load_domain(f"table:{path}?target=price&onehot=1&missing=9", "train")
    assert inputs_of(domain) == [[1, 1, 1, 0], [9, 0, 0, 1], [3, 1, 1, 0]]
    assert (domain.real_valued, domain.labels.tolist()) == (True, [1, 2, 3])
    with pytest.raises(DataError, match="column 'x' has no value in row 2"):
        load_domain(f"table:{path}?target=price&onehot=1", "train").first()


def test_a_file_that_is_no_table(tmp_path):
    lists = pa.table({"x": [[1], [2]]})
    pq.write_table(lists, tmp_path / "lists.parquet")
    many = 2_000_000  # which take no room where all are alike
    zeros = pa.table({"x": np.zeros(many, np.int8)})
    pq.write_table(zeros, tmp_path / "bomb.parquet", max_rows_per_page=many, write_batch_size=many, row_group_size=many)
    (tmp_path / "junk.parquet").write_bytes(b"PAR1 junk PAR1")
    (tmp_path / "junk.feather").write_bytes(b"ARROW1\0\0" + b"\xff" * 100)
    (tmp_path / "junk.arrow").write_bytes(b"\xff" * 8)
    (tmp_path / "latin.csv").write_bytes("a,b\n1,\u00e9\n".encode("latin-1"))
    (tmp_path / "open.csv").write_bytes(b'a,b\n1,"x\n2,y\n')
    (tmp_path / "late.csv").write_bytes(b"a,b\n" + b"1,2\n" * 40_000 + b"1,\xff\n")
    for name, message in (
        ("lists.parquet", "its column 'x' is list"),
        ("bomb.parquet", "it claims 2,000,000 values in"),
        ("junk.parquet", "cannot be read as a table"),
        ("junk.feather", "cannot be read as a table"),
        ("junk.arrow", "cannot be read as a table"),
        ("latin.csv", "Save it as UTF-8"),
        ("late.csv", "Save it as UTF-8"),
        ("open.csv", "a double quote in its last column, at row 2, is never closed"),
    ):
        with pytest.raises(DataError, match=message):
            read_table(tmp_path / name)


@given(st.integers(0, 60), st.sampled_from(["t.parquet", "t.arrow", "t.feather"]), st.data())
def test_a_damaged_file_is_refused_or_read(tmp_path_factory, kept, name, data):
    path = tmp_path_factory.mktemp("damaged") / name
    rows = pa.table({"x": [1.0, 2.0], "kind": ["a", "b"]})
    if name == "t.parquet":
        pq.write_table(rows, path)
    else:
        pyarrow.feather.write_feather(rows, path, compression="lz4")
    content = bytearray(path.read_bytes())
    for _ in range(3):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: len(content) - kept] if kept > 30 else content)
    with contextlib.suppress(DataError):
        frame = read_table(path)
        assert all(len(column) == frame.rows for column in frame.columns.values())


def test_lines_are_those_of_the_file(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text('a,b\n"1\n",x\n\n\n2,y\n')
    frame = read_table(path)
    assert [frame.where(row) for row in (0, 1)] == ["line 3", "line 6"]
    assert Frame(path, frame.columns).where(1) == "row 2"
    for value in ("inf", "1e39", "1.2.3", "x"):
        path.write_text(f"a,b\n1,x\n{value},y\n")
        with pytest.raises(NoNumberError) as wrong:
            read_table(path).numbers("a")
        assert wrong.value.row == 1


def test_categories_and_missing_values(table):
    asked = "target=price&onehot=city&missing=mean&standardise=1"
    domain = table(MIXED, asked)
    columns = domain.samples.columns(())
    deviation = math.sqrt(3.5)
    assert columns == (
        Column("size", fill=3.0, mean=3.0, std=deviation),
        Column("age", fill=4.0, mean=4.0, std=pytest.approx(math.sqrt(8 / 3))),
        Column("city", ("Oslo", "Rome"), fill=0.0),
    )
    inputs = torch.tensor(inputs_of(domain))
    assert inputs[:, 0].tolist() == pytest.approx([-2 / deviation, -1 / deviation, 0, 3 / deviation])
    assert inputs[:, 1].tolist() == pytest.approx([-2 / math.sqrt(8 / 3), 0, 2 / math.sqrt(8 / 3), 0])
    assert inputs[:, 2:].tolist() == [[0, 1], [1, 0], [0, 1], [0, 0]]
    assert inputs_of(table(MIXED, "target=price&onehot=1&missing=-1"))[1] == [2, -1, 1, 0]
    # A number that is none but a name, on demand.
    assert inputs_of(table("kind,label\n10,0\n20,1\n10,0\n", "onehot=kind")) == [[1, 0], [0, 1], [1, 0]]


def test_columns_that_are_no_inputs(table):
    names = "".join(f"id{n},{n},{n % 2}\n" for n in range(30))
    with pytest.raises(DataError, match=r"'id' has 30 different values in 30 rows.*at most 20 here.* ignore=id"):
        table(f"id,x,label\n{names}", "onehot=1").first()
    # An index without a name is called by its number.
    assert inputs_of(table(",x,label\n0,5,1\n1,6,0\n", "ignore=1")) == [[5], [6]]
    with pytest.raises(DataError, match="column '3' has no values in the training data. Leave it out: ignore=3"):
        table("x,label,\n5,1,\n6,0,\n", "missing=mean").first()
    with pytest.raises(UsageError, match="its samples are texts"):
        table("text,label\na,1\n", "onehot=1")


def test_a_constant_column_does_no_harm(table):
    inputs = torch.tensor(inputs_of(table("a,b,label\n0.1,1,0\n0.1,2,1\n0.1,3,0\n", "standardise=1")))
    assert inputs[:, 0].abs().max() < 1e-6
    assert inputs.isfinite().all()


def test_later_data_is_encoded_as_the_record_says(table):
    recorded = table(MIXED, "target=price&onehot=city&missing=mean&standardise=1").samples.columns(())
    # Other columns, in another order, with other numbers, and nothing asked for again.
    later = table("id,city,price,age,size\nA,Oslo,9,,100\n", "target=price").samples
    assert later.columns(recorded) == recorded
    assert later.encoded(recorded).tensors[0].tolist() == [[pytest.approx(97 / math.sqrt(3.5)), 0, 1, 0]]
    plain = table("city,price,age,size\nOslo,9,5,100\n", "target=price&standardise=0").samples
    assert plain.encoded(plain.columns(recorded)).tensors[0].tolist() == [[100, 5, 1, 0]]
    filled = table("city,price,age,size\n,9,,100\n", "target=price&standardise=0&missing=7").samples
    assert filled.encoded(filled.columns(recorded)).tensors[0].tolist() == [[100, 7, 0, 0]]
    # Without names there is the order.
    unnamed = table("100,4,Rome,9\n", "header=0&target=4").samples
    assert [one.name for one in unnamed.columns(recorded)] == ["1", "2", "3"]
    with pytest.raises(
        DataError, match="has no column 'age', which the model was trained on; beside the target it has"
    ):
        table("size,city,price\n1,Rome,2\n", "target=price").samples.columns(recorded)
    unseen = table("city,price,age,size\nRome,1,1,1\nLima,9,4,3\n", "target=price").samples
    with pytest.raises(DataError, match="line 3: column 'city' is 'Lima', a category that the training data did not"):
        unseen.encoded(unseen.columns(recorded))
    unseen = table("city,price,age,size\nLima,9,4,3\n", "target=price&unseen=zeros").samples
    assert unseen.encoded(unseen.columns(recorded)).tensors[0].tolist() == [[0, 0, 0, 0]]
    texts = table("city,price,age,size\nRome,9,4,big\n", "target=price").samples
    with pytest.raises(DataError, match="line 2: 'big' is no number, and column 'size' is one of numbers"):
        texts.encoded(texts.columns(recorded))


def test_a_part_of_one_file_is_held_out(table):
    text = "x,label\n" + "".join(f"{n},{n % 2}\n" for n in range(50))
    parts = [table(text, f"test=0.2&standardise=1&split={split}") for split in ("train", "test")]
    assert [part.size for part in parts] == [40, 10]
    assert [part.split for part in parts] == ["train", "test"]
    rows = [set(part.samples.rows.tolist()) for part in parts]
    assert rows[0] | rows[1] == set(range(50))
    assert not rows[0] & rows[1]
    # Both by the numbers of the training data, whichever is read, and however little of it.
    assert parts[0].samples.columns(()) == parts[1].samples.columns(())
    assert parts[0].samples.columns(()) == table(text, "test=0.2&standardise=1&limit=4").samples.columns(())
    mean = np.mean(sorted(rows[0]))
    assert parts[0].samples.columns(())[0].mean == pytest.approx(mean)
    assert table(text, "test=0.2", "test").samples.rows.tolist() == parts[1].samples.rows.tolist()
    assert table(text, "test=0.2&seed=1", "test").samples.rows.tolist() != parts[1].samples.rows.tolist()
    assert table(text).split is None
    with pytest.raises(UsageError, match=r"one file has no splits .* hold a part out for it \(test=0.2\)"):
        table(text, "split=test")
    with pytest.raises(DataError, match="test=0.001 of 50 rows leaves a split without any"):
        table(text, "test=0.001")


def test_a_digest_tells_whether_data_is_the_same(table):
    asked = "target=price&test=0.5&first=1"
    digest = table(MIXED, asked).samples.hexdigest()
    assert table(MIXED, asked, name="other.csv").samples.hexdigest() == digest
    assert table(MIXED, asked, "test").samples.hexdigest() != digest
    assert table(MIXED, f"{asked}&unit=2").samples.hexdigest() != digest
    # Whatever the training data has counts, though not all of it is taken.
    last = table(MIXED, "target=price&test=0.5").samples.training[-1]
    lines = MIXED.splitlines()
    lines[last + 1] = "9" + lines[last + 1]
    assert table("\n".join(lines), asked).samples.hexdigest() != digest


def test_numbers_of_classes(table):
    moved = table("x,label\n1,1\n2,3\n", "offset=-1")
    assert (moved.labels.tolist(), moved.count_classes()) == ([0, 2], 3)
    assert next(iter(moved.batches(2)))[1].tolist() == [0, 2]
    with pytest.raises(DataError, match="offset=-2 makes the label 1 a negative one"):
        table("x,label\n1,1\n2,3\n", "offset=-2")
    with pytest.raises(DataError, match="offset= is of numbers of classes, and its labels are none"):
        table("x,y\n1,1.5\n2,3\n", "offset=-1")
    sparse = table("x,label\n1,10\n2,2000\n", "labels=10,2000")
    assert (sparse.labels.tolist(), sparse.classes) == ([0, 1], ("10", "2000"))
    with pytest.raises(DataError, match=r"2 different whole numbers from 10 to 2,000.*gaussian.*labels="):
        table("x,label\n1,10\n2,2000\n").count_classes(dense=True)
    assert table("x,label\n1,10\n2,2000\n").count_classes() == 2001
    assert table("x,label\n1,NA\n2,b\n", "labels=NA,b").labels.tolist() == [0, 1]
    with pytest.raises(DataError, match="line 4: the target 'y' is 'many', and most of its values are numbers"):
        table("x,y\n1,1.5\n2,3\n1,many\n")


def test_targets_in_another_unit(table):
    assert table("x,y\n1,1000\n2,3000\n", "unit=1000").labels.tolist() == [1, 3]
    with pytest.raises(UsageError, match="t.csv: y: unit= is of numbers to predict, and the target has names"):
        table("x,y\n1,a\n2,b\n", "unit=1000")
    with pytest.raises(UsageError, match="unit=0 is not understood; expected a number above 0 such as 1000"):
        table("x,y\n1,1\n2,2\n", "unit=0")


WHOLE = {"name": "a", "mean": 1.5, "std": 2, "fill": 0}


@pytest.mark.parametrize(
    "wrong",
    [
        "a", {}, [{}], [3], [WHOLE, WHOLE], [{"name": 1}], [{"name": "a", "mean": 1.0}], [{"name": "a", "std": 1.0}],
        [WHOLE | {"std": 0}], [WHOLE | {"std": -1.0}], [WHOLE | {"std": 1e-320}], [WHOLE | {"mean": math.nan}],
        [WHOLE | {"fill": math.inf}], [WHOLE | {"mean": True}], [{"name": "a", "categories": "b"}],
        [{"name": "a", "categories": [1]}], [{"name": "a", "categories": ["b", "b"]}],
        [{"name": "a", "categories": list(map(str, range(1001)))}],
        [{"name": "a", "categories": ["b"], "mean": 0.0, "std": 1.0}], [{"name": "a", "categories": ["b"], "fill": 2}],
    ],
)  # fmt: skip
def test_a_record_that_cannot_be(wrong):
    assert not is_table_record({"columns": wrong})
    with pytest.raises(CheckpointError, match="is damaged"):
        ModelMetadata.read({"input": {"columns": wrong}}, "m.pt")
    with pytest.raises(AnchorError, match="in the metadata, input is"):
        read_provenance(json.dumps({"name": "a", "input": {"columns": wrong}}), "a.safetensors")


@pytest.mark.parametrize("unit", [0, -1.0, "1", True, math.nan, math.inf, 1e-320, [1]])
def test_a_unit_that_cannot_be(unit):
    with pytest.raises(CheckpointError, match="is damaged"):
        ModelMetadata.read({"input": {"target_unit": unit}}, "m.pt")
    with pytest.raises(AnchorError, match="in the metadata, input is"):
        read_provenance(json.dumps({"name": "a", "input": {"target_unit": unit}}), "a.safetensors")
    assert is_table_record({"target_unit": 1000.0})
    assert is_table_record({"target_unit": None})


def test_a_record_is_read_as_it_was_written():
    columns = (Column("a", fill=0.0, mean=1.5, std=2.0), Column("b", ("x", "y")), Column("c"))
    document = json.loads(json.dumps({"columns": [column.to_json() for column in columns]}))
    assert is_table_record(document)
    assert read_columns(document) == columns
    assert read_columns({}) == ()


def test_numbers_of_a_record_may_be_of_any_size(tmp_path):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    frame = read_table(tmp_path / "t.csv")
    with pytest.raises(DataError, match="line 2: 'a' has a number beyond those of float32"):
        encode([Column("a", mean=1e300, std=1e-300)], frame, np.array([0]), unseen_zeros=False)


def test_labels_of_texts_may_begin_at_1(tmp_path):
    (tmp_path / "t.csv").write_text('"1","Rates rise","The bank said"\n"3","Cup final","A late goal"\n')
    domain = load_domain(f"table:{tmp_path / 't.csv'}?header=0&text=3&target=1&offset=-1", "train")
    assert domain.labels.tolist() == [0, 2]
    assert [(text, int(label)) for text, label in domain.samples] == [("The bank said", 0), ("A late goal", 2)]
