"""ONNX files go in and come out: what onnxruntime makes of them is what was trained, and the graph stays as it was."""

import json
import pickle
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torchvision
from onnx import TensorProto, helper, numpy_helper
from support.models import Small, example, outputs, quiet, trained
from support.notes import Notes
from torch import nn
from torch.utils.data import TensorDataset

import ewc_finetune as ewc
from ewc_finetune.checkpoint.file_format import detect
from ewc_finetune.checkpoint.open import load_checkpoint, open_model
from ewc_finetune.errors import ArchitectureError, CheckpointError


def export(model, path, inputs, dynamo=False, **options):
    with quiet():
        if dynamo:
            batch = ({0: torch.export.Dim("batch")},)
            torch.onnx.export(model, (inputs,), path, dynamo=True, dynamic_shapes=batch, verbose=False, **options)
        else:
            axes = {"x": {0: "batch"}, "y": {0: "batch"}}
            names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": axes}
            torch.onnx.export(model, (inputs,), path, dynamo=False, **names, **options)


def run(path, inputs):
    """What onnxruntime makes of a file."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    return torch.from_numpy(found)


def save(path, nodes, constants, *, x=("batch", 4), y=("batch", 3), kind=TensorProto.FLOAT, opset=17, **options):
    """Write a graph from x to y with these constants, by name."""
    graph = helper.make_graph(
        [helper.make_node(*node[:3], name=f"n{number}", **node[3]) for number, node in enumerate(nodes)],
        "graph",
        [helper.make_tensor_value_info("x", kind, x)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, y)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(name, 1) for name in options.get("domains", ()))]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.save(model, path)
    return model


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def labelled(inputs):
    return TensorDataset(inputs, torch.arange(len(inputs)) % 3)


def train(path, output, inputs, **options):
    """Fine-tune a little, plainly unless there are anchors, and compare the file with the model."""
    options = {"epochs": 2, "lr": 1e-2, "batch_size": 3, "eval_on": [], "overwrite": True, **options}
    done = ewc.finetune(path, labelled(inputs), output=output, **options)
    found = run(output, inputs)
    torch.testing.assert_close(found, outputs(done.model, inputs), atol=1e-4, rtol=1e-4)
    return done


def small():
    return trained(Small(), torch.float32)


def lived_in(model):
    torch.manual_seed(0)
    model.train()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.01)
        model(torch.randn(8, 3, 32, 32))
    return model.eval()


def resnet():
    return lived_in(torchvision.models.resnet18(num_classes=5))


def mobilenet():
    return lived_in(torchvision.models.mobilenet_v3_small(num_classes=5))


@pytest.mark.parametrize("dynamo", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "build", [small, pytest.param(resnet, marks=pytest.mark.slow), pytest.param(mobilenet, marks=pytest.mark.slow)]
)
def test_in_and_out(tmp_path, build, dynamo):
    """Zero steps change no bit of an output; some steps give what the run had; and it can be trained again."""
    model = build()
    inputs = example(model, 6)
    file, output = tmp_path / "m.onnx", tmp_path / "out.onnx"
    export(model, file, inputs[:2], dynamo)
    expected = run(file, inputs)
    loaded = open_model(file)
    assert loaded.format == "onnx"
    torch.testing.assert_close(outputs(loaded.model, inputs), outputs(model, inputs), atol=1e-4, rtol=1e-4)
    ewc.finetune(file, labelled(inputs), epochs=0, output=output, eval_on=[])
    assert torch.equal(run(output, inputs), expected)
    anchor = ewc.consolidate(file, labelled(inputs), output=tmp_path / "a.safetensors")
    assert anchor.provenance.checkpoint["format"] == "onnx"
    train(file, output, inputs, anchors=anchor.path, lambdas=1.0)
    assert not torch.allclose(run(output, inputs), expected, atol=1e-3)
    assert detect(output) == "onnx"
    assert [entry["sha256"] for entry in load_checkpoint(output).metadata.lineage] == [anchor.digest]
    again = ewc.consolidate(output, labelled(inputs), output=tmp_path / "b.safetensors")
    done = train(output, tmp_path / "again.onnx", inputs, anchors=again.path, lambdas=1.0)
    assert len(done.lineage) == 2


def test_the_fisher_is_that_of_the_model_which_was_exported(tmp_path):
    model = small()
    inputs = example(model, 6)
    export(model, tmp_path / "m.onnx", inputs[:2])
    notes = Notes()
    found = ewc.consolidate(tmp_path / "m.onnx", labelled(inputs), progress=notes)
    expected = ewc.consolidate(model, labelled(inputs))
    assert set(found.fisher) == set(expected.fisher)
    for name, fisher in expected.fisher.items():
        torch.testing.assert_close(found.fisher[name], fisher, rtol=1e-3, atol=1e-6)
    assert "gradients: layer rules for 6 parameters" in notes.lines


def without_weights(path):
    model = onnx.load(path)
    for tensor in model.graph.initializer:
        tensor.raw_data = b""
    kept = [entry for entry in model.metadata_props if entry.key != "ewc_ft"]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    return model


def test_the_rest_of_the_file_stays_as_it_was(tmp_path):
    model = small()
    inputs = example(model, 6)
    export(model, tmp_path / "m.onnx", inputs[:2])
    written = onnx.load(tmp_path / "m.onnx")
    written.doc_string = "a model"
    written.metadata_props.add(key="author", value="somebody")
    onnx.save(written, tmp_path / "m.onnx")
    for name in ("a.onnx", "b.onnx"):
        train(tmp_path / "m.onnx", tmp_path / name, inputs)
    assert without_weights(tmp_path / "a.onnx") == without_weights(tmp_path / "m.onnx")
    assert (tmp_path / "a.onnx").read_bytes() == (tmp_path / "b.onnx").read_bytes()
    before, after = (
        {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(tmp_path / name).graph.initializer}
        for name in ("m.onnx", "a.onnx")
    )
    assert {name for name in before if np.array_equal(before[name], after[name])} == {
        "norm.running_mean",
        "norm.running_var",
    }
    done = train(tmp_path / "m.onnx", tmp_path / "c.onnx", inputs, norm_stats="update")
    (mean,) = (t for t in onnx.load(tmp_path / "c.onnx").graph.initializer if t.name == "norm.running_mean")
    assert np.array_equal(numpy_helper.to_array(mean), done.model.get_submodule("norm").running_mean.numpy())
    assert not np.array_equal(numpy_helper.to_array(mean), before["norm.running_mean"])


def test_a_tensor_that_the_exporter_merged_is_two_again_where_it_must_be(tmp_path):
    """A fresh batch norm's bias is as its mean is, and its weight as its variance."""
    torch.manual_seed(0)
    inputs = torch.randn(6, 4)
    file = tmp_path / "m.onnx"
    export(Small().eval(), file, inputs[:2])
    assert "norm.running_mean" not in {tensor.name for tensor in onnx.load(file).graph.initializer}
    expected = run(file, inputs)
    train(file, tmp_path / "zero.onnx", inputs, epochs=0)
    assert torch.equal(run(tmp_path / "zero.onnx", inputs), expected)
    for norm_stats in ("frozen", "update"):
        done = train(file, tmp_path / "o.onnx", inputs, norm_stats=norm_stats, lr=0.1)
        norm = done.model.get_submodule("norm")
        assert norm.bias.any()
        assert bool(norm.running_mean.any()) == (norm_stats == "update")
        onnx.checker.check_model(str(tmp_path / "o.onnx"), full_check=True)
        again = open_model(tmp_path / "o.onnx").model
        torch.testing.assert_close(outputs(again, inputs), outputs(done.model, inputs))


def test_one_tensor_of_several_layers_is_one_parameter(tmp_path):
    file = tmp_path / "m.onnx"
    constants = {"w": numbers(4, 4), "b": numbers(4), "last": numbers(3, 4)}
    layers = [("Gemm", ["x", "w", "b"], ["h"], {"transB": 1}), ("Tanh", ["h"], ["t"], {})]
    layers += [("Gemm", ["t", "w", "b"], ["u"], {"transB": 1}), ("Gemm", ["u", "last"], ["y"], {"transB": 1})]
    save(file, layers, constants)
    loaded = open_model(file)
    assert sum(1 for _ in loaded.model.parameters()) == 3
    assert "what is one tensor in the file is trained as one: w (of 2 layers), b (of 2 layers)" in loaded.remarks[-1]
    train(file, tmp_path / "o.onnx", torch.randn(6, 4))
    # One way here and the other way there is not one parameter.
    save(file, [*layers[:2], ("Gemm", ["t", "w", "b"], ["u"], {}), layers[3]], constants)
    with pytest.raises(ArchitectureError, match=r"'w' is used in several ways at once \(n0.weight, n2.weight\)"):
        open_model(file)


def test_weights_in_other_forms(tmp_path):
    """Turned, multiplied, given by constant nodes and by other names: they go back to where they were."""
    file = tmp_path / "m.onnx"
    save(
        file,
        [
            ("Constant", [], ["held"], {"value": numpy_helper.from_array(numbers(5, 4), "any")}),
            ("Identity", ["b"], ["alias"], {}),
            ("Gemm", ["x", "a", "alias"], ["h"], {"alpha": 0.5, "beta": 2.0}),
            ("Transpose", ["held"], ["turned"], {"perm": [1, 0]}),
            ("MatMul", ["h", "turned"], ["g"], {}),
            ("Add", ["g", "c"], ["i"], {}),
            ("Mul", ["i", "scale"], ["j"], {}),
            ("MatMul", ["j", "last"], ["y"], {}),
        ],
        {
            "a": numbers(4, 4),
            "b": numbers(4),
            "c": numbers(5),
            "scale": np.float32([1, 2, 3, 4, 5]),
            "last": numbers(5, 3),
        },
    )
    loaded = open_model(file)
    names = {name for name, _ in loaded.model.named_parameters()}
    assert names == {"n2.weight", "n2.bias", "initializers.held", "initializers.c", "initializers.last"}
    assert "constants that nothing shows to be weights stay as they are: scale" in loaded.remarks[-1]
    inputs = torch.randn(6, 4)
    train(file, tmp_path / "zero.onnx", inputs, epochs=0)
    assert without_weights(tmp_path / "zero.onnx") == without_weights(file)
    assert torch.equal(run(tmp_path / "zero.onnx", inputs), run(file, inputs))
    anchor = ewc.consolidate(file, labelled(inputs), output=tmp_path / "a.safetensors")
    assert set(anchor.fisher) == names
    train(file, tmp_path / "o.onnx", inputs)


def test_sequences_embeddings_and_layer_norms(tmp_path):
    torch.manual_seed(0)
    model = Tokens().eval()
    tokens = torch.randint(0, 7, (6, 5))
    for dynamo in (False, True):
        export(model, tmp_path / "m.onnx", tokens[:2], dynamo)
        loaded = open_model(tmp_path / "m.onnx")
        assert sum(p.numel() for p in loaded.model.parameters()) == sum(p.numel() for p in model.parameters())
        torch.testing.assert_close(outputs(loaded.model, tokens), outputs(model, tokens))
        train(tmp_path / "m.onnx", tmp_path / "o.onnx", tokens)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.LayerNorm(4)
        self.mix = nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def forward(self, tokens):
        return self.out(nn.functional.gelu(self.mix(self.norm(self.embed(tokens)))).mean(dim=1))


def test_half_precision_comes_back_so(tmp_path):
    torch.manual_seed(0)
    inputs = torch.randn(6, 4).half()
    export(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).half(), tmp_path / "m.onnx", inputs[:2])
    done = ewc.finetune(
        tmp_path / "m.onnx", labelled(inputs), epochs=2, lr=1e-2, output=tmp_path / "o.onnx", eval_on=[]
    )
    torch.testing.assert_close(run(tmp_path / "o.onnx", inputs), outputs(done.model, inputs), atol=5e-3, rtol=5e-3)
    assert {t.data_type for t in onnx.load(tmp_path / "o.onnx").graph.initializer} == {TensorProto.FLOAT16}
    # Half inside, float32 outside, as converters of finished models have it.
    save(
        tmp_path / "c.onnx",
        [
            ("Cast", ["x"], ["h"], {"to": TensorProto.FLOAT16}),
            ("Gemm", ["h", "w"], ["g"], {}),
            ("Cast", ["g"], ["y"], {"to": TensorProto.FLOAT}),
        ],
        {"w": numbers(4, 3).astype(np.float16)},
    )
    before = run(tmp_path / "c.onnx", inputs.float())
    done = ewc.finetune(
        tmp_path / "c.onnx", labelled(inputs.float()), epochs=2, lr=1e-1, output=tmp_path / "d.onnx", eval_on=[]
    )
    found = run(tmp_path / "d.onnx", inputs.float())
    torch.testing.assert_close(found, outputs(done.model, inputs.float()), atol=5e-3, rtol=5e-3)
    assert not torch.allclose(found, before, atol=0.05)


def test_weights_beside_the_file(tmp_path):
    model = small()
    inputs = example(model, 6)
    export(model, tmp_path / "one.onnx", inputs[:2])
    options = {"save_as_external_data": True, "location": "m.onnx.data", "size_threshold": 0}
    onnx.save(onnx.load(tmp_path / "one.onnx"), tmp_path / "m.onnx", **options)
    loaded = open_model(tmp_path / "m.onnx")
    assert "its weights lie in m.onnx.data; a file that is written has them inside" in loaded.remarks[0]
    assert loaded.sha256 != open_model(tmp_path / "one.onnx").sha256
    (tmp_path / "out").mkdir()
    train(tmp_path / "m.onnx", tmp_path / "out" / "m.onnx", inputs)
    data = (tmp_path / "m.onnx.data").read_bytes()
    (tmp_path / "m.onnx.data").write_bytes(data[:20])
    with pytest.raises(CheckpointError, match=r"m.onnx.data does not hold all of the weights that m.onnx has in it"):
        open_model(tmp_path / "m.onnx")
    (tmp_path / "m.onnx.data").unlink()
    with pytest.raises(CheckpointError, match=r"has weights in m.onnx.data, which is not beside it"):
        open_model(tmp_path / "m.onnx")
    for location in ("../m.onnx.data", "/etc/passwd", "a/../../b", "C:\\weights", "..\\b", ""):
        changed = onnx.load(tmp_path / "m.onnx", load_external_data=False)
        for entry in changed.graph.initializer[0].external_data:
            entry.value = location if entry.key == "location" else entry.value
        (tmp_path / "bad.onnx").write_bytes(changed.SerializeToString())
        with pytest.raises(CheckpointError, match=r"made to do harm: its tensor 'first.weight' lies at"):
            open_model(tmp_path / "bad.onnx")


def test_files_that_are_none(tmp_path):
    model = small()
    file = tmp_path / "m.onnx"
    export(model, file, example(model, 2))
    whole = file.read_bytes()
    # Cut anywhere: it is refused, in a sentence of its own where it can be told to be one.
    for end in [*range(1, len(whole), 41), len(whole) - 1]:
        file.write_bytes(whole[:end])
        with pytest.raises(CheckpointError, match=r"m\.onnx"):
            open_model(file)
        if end > 40:
            assert detect(file) == "onnx"
    damaged = onnx.load_from_string(whole)
    damaged.graph.initializer[0].raw_data = damaged.graph.initializer[0].raw_data[:-4]
    file.write_bytes(damaged.SerializeToString())
    with pytest.raises(CheckpointError, match=r"m.onnx.*'?first.weight"):
        open_model(file)


def test_detection(tmp_path):
    """Nothing else is taken for an ONNX file."""
    file = tmp_path / "m"
    generator = np.random.default_rng(0)
    others = [pickle.dumps({"a": 1}, protocol) for protocol in range(6)]
    others += [bytes([8]) + generator.bytes(length) for length in range(200)]
    others += [b"\x08", b"\x08\x07", b"\x08\x07:", b"\x08\x00:\x01", b"\x08\x01\x12\x7f", b"\x08" + b"\xff" * 60]
    others += [b"\x08\x07" + b"\x28\x01" * 1000]
    for content in others:
        file.write_bytes(content)
        assert detect(file) == "torch.save"
    file.write_bytes(b"\x08\x07\x12\x01a\x28\x01:\x05")
    assert detect(file) == "onnx"


def test_operators_that_cannot_be_trained_are_named(tmp_path):
    file = tmp_path / "m.onnx"
    nodes = [("Det", ["x"], ["h"], {}), ("Hardmax", ["h"], ["g"], {}), ("Mine", ["g"], ["y"], {"domain": "my.own"})]
    save(file, nodes, {}, domains=["my.own"])
    with pytest.raises(
        ArchitectureError, match=r"cannot be trained here: Det, Hardmax, my.own.Mine \(opset 17\). Start from [\w ]+$"
    ):
        open_model(file)
    nodes = [
        ("ReduceMean", ["x", "axes"], ["h"], {}),
        ("Gelu", ["h"], ["g"], {}),
        ("GroupNormalization", ["g", "w", "w"], ["y"], {"num_groups": 1}),
    ]
    save(file, nodes, {"axes": np.int64([1]), "w": numbers(4)}, opset=21)
    with pytest.raises(
        ArchitectureError, match=r"here: GroupNormalization \(opset 21\).*dynamo=False, opset_version=17"
    ):
        open_model(file)


@pytest.mark.parametrize("opset", [13, 17, 18, 20, 21, 22])
def test_sets_of_operators(tmp_path, opset):
    """Operators of later sets that say what those of older ones did."""
    torch.manual_seed(0)
    file, inputs = tmp_path / "m.onnx", torch.randn(6, 4)
    later = opset >= 18
    axes = (["h", "axes"], {}) if later else (["h"], {"axes": [1]})
    nodes = [
        ("Gemm", ["x", "w"], ["g"], {}),
        ("Reshape", ["g", "shape"], ["h"], {"allowzero": 1} if opset >= 14 else {}),
        ("ReduceMean", axes[0], ["m"], {"keepdims": 0, **axes[1]}),
        ("Split", ["m"] if later else ["m", "parts"], ["a", "b"], {"axis": 1, **({"num_outputs": 2} if later else {})}),
        ("Identity", ["b"], ["c"], {}),
        ("Pad", ["c", "pads"], ["d"], {}),
        ("Add", ["a", "d"], ["f"], {}),
        ("Gelu", ["f"], ["e"], {}) if opset >= 20 else ("Tanh", ["f"], ["e"], {}),
        ("Gemm", ["e", "last"], ["y"], {}),
    ]
    constants = {"w": numbers(4, 10), "shape": np.int64([-1, 2, 5]), "axes": np.int64([1]), "parts": np.int64([3, 2])}
    save(file, nodes, {**constants, "pads": np.int64([0, 0, 0, 1]), "last": numbers(3, 3)}, opset=opset)
    torch.testing.assert_close(outputs(open_model(file).model, inputs), run(file, inputs))
    train(file, tmp_path / "o.onnx", inputs)


def test_quantized_models_are_refused(tmp_path):
    file = tmp_path / "m.onnx"
    save(
        file,
        [
            ("DynamicQuantizeLinear", ["x"], ["q", "s", "z"], {}),
            ("MatMulInteger", ["q", "w"], ["i"], {}),
            ("Cast", ["i"], ["y"], {"to": TensorProto.FLOAT}),
        ],
        {"w": np.ones((4, 3), np.int8)},
    )
    with pytest.raises(
        ArchitectureError, match=r"is quantized \(DynamicQuantizeLinear, MatMulInteger\).*before it was quantized"
    ):
        open_model(file)


def test_what_no_graph_can_be_trained_with(tmp_path):
    model = small()
    file = tmp_path / "m.onnx"
    with quiet():
        torch.onnx.export(model, (torch.randn(3, 4),), file, dynamo=False, input_names=["x"])
    with pytest.raises(ArchitectureError, match=r'batches of exactly 3. Export it again.*\{"x": \{0: "batch"\}\}'):
        open_model(file)
    export(Small(), file, torch.randn(3, 4), training=torch.onnx.TrainingMode.TRAINING)
    with pytest.raises(ArchitectureError, match=r"was exported in training mode: \S+ acts at every call"):
        open_model(file)
    save(file, [("Relu", ["x"], ["y"], {})], {}, y=("batch", 4))
    with pytest.raises(ArchitectureError, match="has no parameters: nothing in its graph shows"):
        open_model(file)
    written = save(file, [("Gemm", ["x", "w"], ["y"], {})], {"w": numbers(4, 3)})
    written.graph.input.append(helper.make_tensor_value_info("mask", TensorProto.FLOAT, ["batch"]))
    onnx.save(written, file)
    with pytest.raises(ArchitectureError, match=r"has 2 inputs \(x, mask\); ewc-ft trains models of one input"):
        open_model(file)
    save(file, [("Gemm", ["x", "w"], ["y"], {})], {"w": numbers(4, 3)})
    with pytest.raises(ArchitectureError, match="which has its own program; leave --arch away"):
        open_model(file, "mlp")


def test_probabilities_are_no_logits(tmp_path):
    save(tmp_path / "m.onnx", [("Gemm", ["x", "w"], ["h"], {}), ("Softmax", ["h"], ["y"], {})], {"w": numbers(4, 3)})
    assert "it ends in Softmax, so its outputs are probabilities" in open_model(tmp_path / "m.onnx").remarks[-1]


def test_dropout_in_the_graph_stays_off(tmp_path):
    file = tmp_path / "m.onnx"
    save(
        file,
        [("Dropout", ["x", "p"], ["h"], {}), ("Gemm", ["h", "w"], ["y"], {})],
        {"w": numbers(4, 3), "p": np.float32(0.5)},
    )
    model = open_model(file).model.train()
    inputs = torch.randn(6, 4)
    torch.testing.assert_close(outputs(model, inputs), run(file, inputs))


def test_names_are_no_code(tmp_path, monkeypatch):
    """The names of nodes stand in code that torch.fx makes and runs."""
    monkeypatch.chdir(tmp_path)
    written = save("m.onnx", [("Gemm", ["x", "w"], ["h"], {}), ("Relu", ["h"], ["y"], {})], {"w": numbers(4, 3)})
    written.graph.node[0].name = 'a"), __import__("os").system("touch exploded"), ("'
    written.graph.node[1].name = "forward"
    onnx.save(written, "m.onnx")
    inputs = torch.randn(6, 4)
    torch.testing.assert_close(outputs(open_model("m.onnx").model, inputs), run("m.onnx", inputs))
    assert not (tmp_path / "exploded").exists()
    # Nor is one node taken for another, or for what goes in.
    constants = {"w": numbers(4, 4), "v": numbers(4, 4, seed=1), "u": numbers(4, 3)}
    nodes = [("Gemm", ["x", "w"], ["h"], {}), ("Gemm", ["h", "v"], ["g"], {}), ("Add", ["g", "x"], ["i"], {})]
    written = save("m.onnx", [*nodes, ("Gemm", ["i", "u"], ["y"], {})], constants)
    for names in (("x", "x.", "x_1", "onnx_initializer_0"), ("w", "w.", "w_1", "v"), ("a.b", "a/b", "a b", "")):
        for node, name in zip(written.graph.node, names, strict=True):
            node.name = name
        onnx.save(written, "m.onnx")
        torch.testing.assert_close(outputs(open_model("m.onnx").model, inputs), run("m.onnx", inputs))


@pytest.mark.parametrize("missing", ["onnx", "onnx2torch"])
def test_what_to_install_is_said(tmp_path, monkeypatch, missing):
    save(tmp_path / "m.onnx", [("Gemm", ["x", "w"], ["y"], {})], {"w": numbers(4, 3)})
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(CheckpointError, match=r"not installed: pip install 'ewc-finetune\[onnx\]'"):
        open_model(tmp_path / "m.onnx")


@pytest.mark.parametrize("head", ["new", "expand"])
def test_a_head_with_more_outputs(tmp_path, head):
    model = small()
    export(model, tmp_path / "m.onnx", example(model, 2))
    inputs = torch.randn(10, 4)
    anchor = ewc.consolidate(tmp_path / "m.onnx", labelled(inputs), output=tmp_path / "a.safetensors")
    data = TensorDataset(inputs, torch.arange(10) % 5)
    options = {"anchors": anchor.path, "lambdas": 1.0, "head": head, "epochs": 1, "eval_on": [], "lr": 0.1}
    done = ewc.finetune(tmp_path / "m.onnx", data, output=tmp_path / "o.onnx", **options)
    onnx.checker.check_model(str(tmp_path / "o.onnx"), full_check=True)
    found = run(tmp_path / "o.onnx", inputs)
    assert found.shape == (10, 5)
    torch.testing.assert_close(found, outputs(done.model, inputs), atol=1e-4, rtol=1e-4)
    assert open_model(tmp_path / "o.onnx").metadata.head == done.head


def test_from_the_command_line(ewc_ft, tmp_path):
    model = trained(nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10)), torch.float32)
    export(model, tmp_path / "m.onnx", torch.randn(2, 64))
    found = json.loads(ewc_ft("inspect", "m.onnx", "--json").stdout)
    assert found["format"] == "onnx"
    assert found["normalisation"] == ["1"]
    assert found["unsafe"] == []
    assert "format         onnx" in ewc_ft("inspect", "m.onnx").stderr
    ewc_ft("consolidate", "m.onnx", "--data", "digits?limit=40")
    refused = ewc_ft("finetune", "--anchors", "m.anchor.safetensors", "--data", "digits?limit=40", expect=1)
    assert "in the format onnx, whose program it does not have" in refused.stderr
    options = ("--model", "m.onnx", "--data", "digits?limit=40", "--epochs", "1", "--json")
    done = json.loads(ewc_ft("finetune", "--anchors", "m.anchor.safetensors", *options).stdout)
    assert done["checkpoint"] == "m-digits-limit-40.onnx"
    assert (tmp_path / "m-digits-limit-40.run").is_dir()
    run(tmp_path / done["checkpoint"], torch.randn(2, 64))
