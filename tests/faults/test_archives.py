"""Archives that would run code, write files, or give foreign memory for weights: refused, with nothing run."""

import json
import warnings
import zipfile

import archives
import pytest
import torch
from torch import nn

from ewc_finetune.checkpoint.checkpoint import ModelMetadata
from ewc_finetune.checkpoint.open import load_checkpoint, open_model
from ewc_finetune.errors import CheckpointError


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    return archives.export(tmp_path_factory.mktemp("exported") / "m.pt2")


@pytest.mark.parametrize("kind", archives.HOSTILE_EXPORTS)
@pytest.mark.parametrize("ending", ["pt2", "pt"])
def test_hostile_exports_are_refused(tmp_path, ewc_ft, exported, kind, ending):
    mark = tmp_path / "exploded"
    members = archives.HOSTILE_EXPORTS[kind](archives.members_of(exported), mark)
    path = archives.write_members(tmp_path / f"m.{ending}", members)
    refused = ewc_ft("inspect", path.name, expect=1)
    assert "--trust-code" in refused.stderr or "is not an exported program that can be read" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert not mark.exists()


def test_the_harm_is_real(tmp_path, exported):
    """Torch itself runs what the archives bring."""
    mark = tmp_path / "exploded"
    members = archives.HOSTILE_EXPORTS["guards"](archives.members_of(exported), mark)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(Exception):  # noqa: B017, PT011 - after what it ran
            torch.export.load(archives.write_members(tmp_path / "m.pt2", members)).module()(torch.randn(2, 1, 6, 6))
    assert mark.exists()


def test_those_who_trust_it_may_load_it(tmp_path, exported):
    members = archives.members_of(exported)
    members["m/data/weights/unknown"] = b"x"
    path = archives.write_members(tmp_path / "m.pt2", members)
    with pytest.raises(CheckpointError, match=r"its archive has 'data/weights/unknown'.*--trust-code"):
        open_model(path)
    model, inputs = open_model(path, trust_code=True).model, torch.randn(3, 1, 6, 6)
    torch.testing.assert_close(model(inputs), open_model(exported).model(inputs))


def test_a_program_is_read_as_torch_reads_it(tmp_path, exported):
    checkpoint = load_checkpoint(exported)
    model, _ = checkpoint.build(None)
    inputs = torch.randn(5, 1, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.load(exported)
        assert torch.equal(model(inputs), program.module()(inputs))
        assert set(model.state_dict()) == set(program.state_dict)
        state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
        checkpoint.write(tmp_path / "w.pt2", tmp_path / "w.pt2", state, ModelMetadata(architecture="x"))
        checkpoint.write(tmp_path / "again.pt2", tmp_path / "again.pt2", state, ModelMetadata(architecture="x"))
        written = torch.export.load(tmp_path / "w.pt2")
    for name, tensor in written.state_dict.items():
        assert torch.equal(tensor, state[name])
    assert (tmp_path / "w.pt2").read_bytes() == (tmp_path / "again.pt2").read_bytes()
    assert load_checkpoint(tmp_path / "w.pt2").metadata.architecture == "x"
    before, after = archives.members_of(exported), archives.members_of(tmp_path / "w.pt2")
    changed = {name for name in after if after[name] != before.get(name)}
    assert changed == {n for n in before if "weights/weight_" in n} | {"m/extra/ewc_ft.json"}


class Tied(nn.Module):
    """Uses one weight twice, returns a dictionary, changes a buffer and takes a square root of a size."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(36, 36)
        self.second = nn.Linear(36, 36)
        self.second.weight = self.first.weight
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        flat = x.flatten(1)
        first, second = flat.reshape(flat.shape[0], 2, -1).unbind(1)
        return {"logits": self.second(self.first(flat).tanh()) / flat.shape[0], "more": (first, [second, None])}


def test_the_hard_parts_of_a_program(tmp_path):
    reference = Tied()
    model = open_model(archives.export(tmp_path / "m.pt2", reference)).model
    inputs = torch.randn(3, 1, 6, 6)
    reference.calls.zero_()
    for _ in range(2):
        found, expected = model(inputs), reference(inputs)
        assert torch.equal(found["logits"], expected["logits"])
        assert torch.equal(found["more"][0], expected["more"][0])
        assert found["more"][1][1] is None
    assert model.calls == reference.calls == 2
    assert len(list(model.parameters())) == 3  # torch's own module has a fourth, which is not trained
    found["logits"].sum().backward()
    expected["logits"].sum().backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).grad, parameter.grad)


@pytest.mark.parametrize("kind", archives.HOSTILE_SCRIPTS)
def test_hostile_scripts_are_refused(tmp_path, ewc_ft, kind):
    mark = tmp_path / "exploded"
    archives.script(tmp_path / "m.pt", archives.HOSTILE_SCRIPTS[kind](str(mark)))
    refused = ewc_ft("inspect", "m.pt", expect=1)
    assert "may do more than compute" in refused.stderr
    assert "--trust-code" in refused.stderr
    ewc_ft("inspect", "m.pt", "--trust-code")
    assert not mark.exists()


def test_a_script_that_writes_when_it_is_loaded_is_refused(tmp_path):
    mark = tmp_path / "exploded"
    archives.script(tmp_path / "m.pt", archives.SavesOnLoad(str(mark)))
    mark.unlink(missing_ok=True)
    with pytest.raises(CheckpointError, match="it defines __getstate__, which runs as it is loaded"):
        load_checkpoint(tmp_path / "m.pt")
    assert not mark.exists()
    load_checkpoint(tmp_path / "m.pt", trust_code=True)
    assert mark.exists()


@pytest.mark.parametrize("statement", archives.HOSTILE_STATEMENTS)
def test_code_that_torch_does_not_write_is_refused(tmp_path, statement):
    mark = tmp_path / "exploded"
    members = archives.members_of(archives.script(tmp_path / "plain.pt", archives.Plain("m")))
    (code,) = (name for name in members if name.endswith("archives.py"))
    text = members[code].decode()
    line = next(line for line in text.split("\n") if line.startswith("    last = "))
    changed = text.replace(line, "    " + statement.replace("MARK", str(mark)) + "\n" + line)
    path = archives.write_members(tmp_path / "m.pt", {**members, code: changed.encode()})
    with pytest.raises(CheckpointError, match="may do more than compute"):
        load_checkpoint(path)
    assert not mark.exists()
    open_model(archives.write_members(path, members))


@pytest.mark.parametrize("name", ["model.json", "code/../x.py", "tensors.json"])
def test_scripts_with_other_members_are_refused(tmp_path, name):
    members = archives.members_of(archives.script(tmp_path / "plain.pt", archives.Plain("m")))
    with pytest.raises(CheckpointError, match=r"may do more than compute|made to do harm"):
        load_checkpoint(archives.write_members(tmp_path / "m.pt", {**members, f"plain/{name}": b"{}"}))


@pytest.mark.parametrize("kind", ["state dict", "script", "export"])
@pytest.mark.parametrize("size", [0, 4, -4])
def test_records_of_another_length_are_refused(tmp_path, exported, kind, size):
    if kind == "state dict":
        torch.save(archives.Net().state_dict(), tmp_path / "m.pt")
    elif kind == "script":
        archives.script(tmp_path / "m.pt", archives.Plain("m"))
    path = exported if kind == "export" else tmp_path / "m.pt"
    members = archives.members_of(path)
    name = next(n for n in members if n.endswith(("data/0", "weights/weight_0")))
    members[name] = members[name][:size]
    short = archives.write_members(tmp_path / "short.pt", members)
    with pytest.raises(CheckpointError, match=r"there is a record of|has not enough in its record of"):
        load_checkpoint(short)


def test_a_missing_record_is_refused(tmp_path, exported):
    torch.save(archives.Net().state_dict(), tmp_path / "m.pt")
    for path, missing, message in (
        (tmp_path / "m.pt", "data/3", "there is no record for it, data/3"),
        (exported, "weight_2", "it has no data/weights/weight_2"),
    ):
        members = {n: c for n, c in archives.members_of(path).items() if not n.endswith(missing)}
        with pytest.raises(CheckpointError, match=message):
            load_checkpoint(archives.write_members(tmp_path / "x.pt", members))


def test_archives_that_can_be_read_in_two_ways_are_refused(tmp_path):
    torch.save(archives.Net().state_dict(), tmp_path / "m.pt")
    whole = (tmp_path / "m.pt").read_bytes()
    other = archives.write_members(tmp_path / "other.pt", archives.members_of(tmp_path / "m.pt")).read_bytes()
    with_comment = other[:-2] + b"\x05\x00other"
    for content in (whole + b"x", whole + other, b"x" * 8 + whole, with_comment, whole[:-1], whole + whole[-22:]):
        (tmp_path / "x.pt").write_bytes(b"PK\x03\x04" + content[4:])
        with pytest.raises(CheckpointError, match=r"is a damaged archive|made to do harm"):
            load_checkpoint(tmp_path / "x.pt")
    with warnings.catch_warnings(), zipfile.ZipFile(tmp_path / "m.pt", "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("m/data.pkl", b"other")
    with pytest.raises(CheckpointError, match=r"has 2 members 'm/data.pkl'"):
        load_checkpoint(tmp_path / "m.pt")


def test_a_member_of_two_sizes_is_refused(tmp_path):
    """Torch's parser would take what lies behind the smaller one too, which nobody has looked at."""
    path = archives.script(tmp_path / "plain.pt", archives.Plain("m"))
    members = archives.members_of(path)
    archives.write_members(tmp_path / "m.pt", members)
    content = bytearray((tmp_path / "m.pt").read_bytes())
    name = next(name for name in members if name.endswith("archives.py"))
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(name.encode()))
    size = int.from_bytes(content[entry + 20 : entry + 24], "little")
    content[entry + 20 : entry + 24] = (size - 7).to_bytes(4, "little")
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the headers of 'plain/code/__torch__/archives.py\S*' differ"):
        load_checkpoint(tmp_path / "m.pt")


def test_a_tensor_that_is_said_to_be_a_folder_is_refused(tmp_path):
    """Torch's parser reads nothing of a folder: the tensor would be what lies in memory."""
    torch.save(archives.Net().state_dict(), tmp_path / "m.pt")
    content = bytearray((tmp_path / "m.pt").read_bytes())
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"m/data/0"))
    content[entry + 38] |= 0x10
    (tmp_path / "m.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"the headers of 'm/data/0' differ"):
        load_checkpoint(tmp_path / "m.pt")


def test_names_that_differ_in_case_alone_are_refused(tmp_path):
    torch.save(archives.Net().state_dict(), tmp_path / "m.pt")
    members = archives.members_of(tmp_path / "m.pt")
    archives.write_members(tmp_path / "x.pt", {**members, "m/DATA.pkl": members["m/data.pkl"]})
    with pytest.raises(CheckpointError, match=r"has 2 members 'm/data.pkl'"):
        load_checkpoint(tmp_path / "x.pt")


def test_a_text_that_a_program_could_print_is_printable(tmp_path):
    path = archives.script(tmp_path / "m.pt", archives.Plain("\x1b[2J"))
    with pytest.raises(CheckpointError, match=r"it has the text '\\x1b\[2J'"):
        load_checkpoint(path)


def test_archives_without_checksums_are_taken(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(archives.Net().state_dict(), tmp_path / "m.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert load_checkpoint(tmp_path / "m.pt").state["last.bias"].shape == (2,)


def test_programs_that_are_none(tmp_path, exported):
    members = archives.members_of(exported)
    (graph,) = (name for name in members if name.endswith("models/model.json"))
    document = json.loads(members[graph])
    for change in (
        {"graph_module": None},
        {"schema_version": {"major": 9, "minor": 0}},
        {"graph_module": {**document["graph_module"], "signature": []}},
        {"graph_module": {**document["graph_module"], "graph": {"nodes": [{}]}}},
    ):
        changed = json.dumps({**document, **change}).encode()
        with pytest.raises(CheckpointError, match=r"is not an exported program|may run code"):
            load_checkpoint(archives.write_members(tmp_path / "x.pt2", {**members, graph: changed}))


def test_damaged_inputs_of_a_trace_are_not_read(tmp_path):
    members = archives.members_of(archives.script(tmp_path / "m.pt", archives.Plain("m")))
    path = archives.write_members(tmp_path / "x.pt", {**members, "m/traced_inputs.pkl": b"\xffno pickle"})
    assert load_checkpoint(path).format == "torchscript"
