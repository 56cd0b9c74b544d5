"""Model folders of transformers go in and come out, and their own tokenizers and processors make the inputs."""

import contextlib
import json
import math
import shutil
from pathlib import Path

import datasets
import pytest
import safetensors.torch
import torch
import transformers
from PIL import Image
from support.files import Bomb
from support.transformers_models import (
    SMALL,
    WORDS,
    bert,
    corpus,
    llama,
    masked,
    pictures,
    reviews,
    saved,
    texts,
    tokenizer,
    vit,
)
from torch.utils.data import TensorDataset
from transformers import (
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    ViTImageProcessor,
)
from transformers.utils import logging

import ewc_finetune as ewc
from ewc_finetune.checkpoint.location import fetch, locate
from ewc_finetune.checkpoint.open import open_model
from ewc_finetune.commands.consolidate import default_output
from ewc_finetune.data.domain import as_domain
from ewc_finetune.data.preprocessing import preprocessed
from ewc_finetune.data.sources import load_domain
from ewc_finetune.errors import (
    AnchorError,
    ArchitectureError,
    CheckpointError,
    DataError,
    HubError,
    StorageError,
    UsageError,
)
from ewc_finetune.hub.client import UnreachableError
from ewc_finetune.hub.repository import look_up
from ewc_finetune.likelihood.base import IGNORED
from ewc_finetune.likelihood.categorical import PerToken


@pytest.fixture(autouse=True)
def _silent():
    """No bars of transformers between the dots; it takes those of huggingface_hub away too, for good."""
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


# A model, its data, and an input for it.
KINDS = {
    "bert": (bert, lambda folder: reviews(folder / "r.jsonl"), {"input_ids": torch.arange(5, 15).view(2, 5)}),
    "masked": (masked, lambda folder: corpus(folder / "c.txt"), {"input_ids": torch.arange(5, 15).view(2, 5)}),
    "llama": (llama, lambda folder: corpus(folder / "c.txt"), {"input_ids": torch.arange(5, 15).view(2, 5)}),
    "vit": (
        vit,
        lambda folder: pictures(folder / "p"),
        {"pixel_values": torch.linspace(-1, 1, 1536).view(2, 3, 16, 16)},
    ),
}


def logits(model, inputs):
    with torch.no_grad():
        return model.eval()(**inputs).logits


@pytest.mark.parametrize("kind", KINDS)
def test_in_and_out(tmp_path, kind):
    """Zero steps change nothing; some steps give what the run had, read by transformers itself."""
    build, data, inputs = KINDS[kind]
    model = build()
    folder, data = saved(model, tmp_path / "m"), data(tmp_path)
    loaded = open_model(folder)
    assert (loaded.format, loaded.metadata.architecture) == ("hugging face", f"transformers:{type(model).__name__}")
    torch.testing.assert_close(logits(loaded.model, inputs), logits(model, inputs))
    ewc.finetune(folder, data, epochs=0, output=tmp_path / "same", eval_on=[])
    again = type(model).from_pretrained(tmp_path / "same")
    assert torch.equal(logits(again, inputs), logits(type(model).from_pretrained(folder), inputs))
    names = sorted(path.name for path in folder.iterdir())
    assert sorted(path.name for path in (tmp_path / "same").iterdir()) == names
    for name in set(names) - {"model.safetensors"}:
        assert (tmp_path / "same" / name).read_bytes() == (folder / name).read_bytes()
    anchor = ewc.consolidate(folder, data, output=tmp_path / "a.safetensors", batch_size=5)
    assert anchor.provenance.checkpoint["format"] == "hugging face"
    assert anchor.provenance.likelihood == ("categorical" if kind in ("bert", "vit") else "per-token")
    options = {"anchors": anchor.path, "lambdas": 1.0, "epochs": 1, "lr": 1e-2, "eval_on": [], "batch_size": 5}
    done = ewc.finetune(folder, data, output=tmp_path / "new", **options)
    again = type(model).from_pretrained(tmp_path / "new")
    torch.testing.assert_close(logits(again, inputs), logits(done.model, inputs))
    assert not torch.allclose(logits(again, inputs), logits(model, inputs), atol=1e-3)
    assert [entry["sha256"] for entry in open_model(tmp_path / "new").metadata.lineage] == [anchor.digest]
    with pytest.raises(AnchorError, match="Name the checkpoint too: --model m"):
        ewc.finetune(None, data, anchors=anchor)


def test_the_command_line(ewc_ft, tmp_path):
    saved(llama(), tmp_path / "m")
    corpus(tmp_path / "c.txt")
    ewc_ft("consolidate", "m", "--data", "text:c.txt")
    ewc_ft("finetune", "--model", "m", "--anchors", "m.anchor.safetensors", "--data", "text:c.txt", "--epochs", 1)
    assert (tmp_path / "m-text-c-txt" / "tokenizer.json").is_file()
    result = ewc_ft("evaluate", "m-text-c-txt", "--data", "text:c.txt", "--json")
    (score,) = json.loads(result.stdout)["scores"]
    tokens = sum(len(line.split()) - 1 for line in texts())
    assert score["perplexity"] == pytest.approx(math.exp(score["loss"] * 12 / tokens))
    assert "perplexity" in ewc_ft("evaluate", "m", "--data", "text:c.txt").output
    found = ewc_ft("inspect", "m").output
    assert "transformers:LlamaForCausalLM" in found
    assert "hugging face" in found


def test_tied_weights_and_shards_and_half_precision(tmp_path):
    model = llama(tie_word_embeddings=True).to(torch.bfloat16)
    folder = saved(model, tmp_path / "m", max_shard_size="20KB")
    data = corpus(tmp_path / "c.txt")
    done = ewc.finetune(folder, data, lr=0.1, epochs=1, output=tmp_path / "out", eval_on=[])
    assert done.model.lm_head.weight is done.model.model.embed_tokens.weight
    index = json.loads((folder / "model.safetensors.index.json").read_bytes())
    assert json.loads((tmp_path / "out" / "model.safetensors.index.json").read_bytes()) == index
    again = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    inputs = KINDS["llama"][2]
    assert torch.equal(logits(again, inputs), logits(done.model, inputs))
    # The digest is of the weights, not of the index alone.
    assert open_model(folder).sha256 != open_model(tmp_path / "out").sha256


def test_a_state_dict_in_a_folder(tmp_path):
    folder = saved(bert(), tmp_path / "m")
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    ewc.finetune(folder, reviews(tmp_path / "r.jsonl"), epochs=0, output=tmp_path / "out", eval_on=[])
    again = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again, KINDS["bert"][2]), logits(bert(), KINDS["bert"][2]))


def test_no_code_of_a_folder_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = saved(bert(), tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({"weight": Bomb()}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="asks for more than tensors"):
        open_model(folder)
    (folder / "evil.py").write_text("open('exploded', 'w')")
    config = json.loads((folder / "config.json").read_bytes())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Config"}, "architectures": ["Evil"]}
    (folder / "config.json").write_text(json.dumps(config))
    torch.save({"weight": torch.ones(2)}, folder / "pytorch_model.bin")
    with pytest.raises(ArchitectureError, match="code that comes with a model is not run"):
        open_model(folder)
    config["architectures"] = ["BertForSequenceClassification"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArchitectureError, match="brings a model class of its own as code, which is not run"):
        open_model(folder)
    assert not (tmp_path / "exploded").exists()


def changed(folder, **settings):
    config = json.loads((folder / "config.json").read_bytes()) | settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_folders_that_are_no_models_to_train(tmp_path):
    folder = saved(bert(), tmp_path / "m")
    fresh = lambda name: Path(shutil.copytree(folder, tmp_path / name))  # noqa: E731
    with pytest.raises(CheckpointError, match="is a folder without a config.json"):
        open_model(tmp_path)
    with pytest.raises(
        ArchitectureError, match=r"dense.bias has shape \(48,\) in the weights and \(40,\).*; and \d+ more"
    ):
        open_model(changed(fresh("wrong"), intermediate_size=40, num_hidden_layers=3))
    with pytest.raises(CheckpointError, match=r"is quantized \(gptq\).*Use the model from before quantization"):
        open_model(changed(fresh("gptq"), quantization_config={"quant_method": "gptq", "bits": 4}))
    with pytest.raises(ArchitectureError, match=r"does not say what class .*--arch transformers:Bert"):
        open_model(changed(fresh("none"), architectures=None))
    with pytest.raises(ArchitectureError, match="which transformers .* does not have"):
        open_model(changed(fresh("new"), architectures=["BertForTelepathy"]))
    with pytest.raises(ArchitectureError, match="is a model of transformers, and --arch mlp is none"):
        open_model(folder, "mlp")
    (empty := fresh("empty")).joinpath("model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="has no weights: expected one of model.safetensors"):
        open_model(empty)
    (empty / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is an adapter, not a model. Merge it first"):
        open_model(empty)
    (cut := fresh("cut")).joinpath("config.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read as JSON"):
        open_model(cut)
    state = {name: t.to(torch.int8) for name, t in bert().state_dict().items()}
    safetensors.torch.save_file(state, (whole := fresh("int8")) / "model.safetensors")
    with pytest.raises(CheckpointError, match="is torch.int8; quantized and integer weights cannot be trained"):
        open_model(whole)
    assert isinstance(open_model(folder, "transformers:auto").model, BertForSequenceClassification)


def test_what_else_is_in_the_weights_file_stays(tmp_path):
    folder = saved(bert(), tmp_path / "m")
    state = {
        **safetensors.torch.load_file(folder / "model.safetensors"),
        "bert.embeddings.position_ids": torch.arange(24),
    }
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt", "author": "me"})
    for name in ("optimizer.pt", "tf_model.h5", "trainer_state.json"):
        (folder / name).write_text("of the model before")
    done = ewc.finetune(folder, reviews(tmp_path / "r.jsonl"), epochs=1, output=tmp_path / "out", eval_on=[])
    written = safetensors.torch.load_file(done.output / "model.safetensors")
    assert set(written) == set(state)
    assert torch.equal(written["bert.embeddings.position_ids"], torch.arange(24))
    assert not any((done.output / name).exists() for name in ("optimizer.pt", "tf_model.h5", "trainer_state.json"))
    assert "position_ids: none of" in " ".join(open_model(folder).remarks)


def test_folders_are_written_whole_or_not_at_all(tmp_path, monkeypatch):
    folder, data = saved(bert(), tmp_path / "m"), reviews(tmp_path / "r.jsonl")
    options = {"epochs": 0, "eval_on": []}
    ewc.finetune(folder, data, output=tmp_path / "out", **options)
    with pytest.raises(StorageError, match="exists"):
        ewc.finetune(folder, data, output=tmp_path / "out", **options)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("ewc_finetune.storage.lazy_tensors.save_file", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ewc.finetune(folder, data, output=tmp_path / "out", overwrite=True, **options)
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
    ewc.finetune(folder, data, output=tmp_path / "out", overwrite=True, **options)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    ewc.finetune(folder, data, output=tmp_path / "link", overwrite=True, **options)
    assert (tmp_path / "link").is_symlink()
    (tmp_path / "out" / ".git").mkdir()
    (tmp_path / "out" / ".git" / "HEAD").write_text("main")
    with pytest.raises(StorageError, match=r"\.git/HEAD in it is no part of this model, and would be lost"):
        ewc.finetune(folder, data, output=tmp_path / "out", overwrite=True, **options)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageError, match="is a link to what is not there"):
        ewc.finetune(folder, data, output=tmp_path / "nowhere", overwrite=True, **options)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(StorageError, match="is there and is no model folder"):
        ewc.finetune(folder, data, output=tmp_path / "mine", overwrite=True, **options)
    with pytest.raises(StorageError, match="is one of the inputs"):
        ewc.finetune(folder, data, output=folder, overwrite=True, **options)
    assert (tmp_path / "mine" / "thesis.tex").exists()


def test_a_model_on_the_hub(tmp_path, monkeypatch):
    """From the cache, as it is without a connection."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(UnreachableError, match="hf:org/name is not in the cache, and HF_HUB_OFFLINE is set"):
        open_model("hf:org/name")
    cached = tmp_path / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    saved(bert(), cached / "snapshots" / ("0" * 40))
    loaded = open_model("hf:org/name")
    assert loaded.file == loaded.label == f"hf:org/name@{'0' * 40}"
    data = reviews(tmp_path / "r.jsonl")
    monkeypatch.chdir(tmp_path)
    assert str(default_output("hf:org/name@v1", "digits")) == "name.anchor.safetensors"
    ewc.finetune("hf:org/name", data, epochs=0, output=tmp_path / "out", eval_on=[])
    assert (tmp_path / "out" / "model.safetensors").is_file()


# What the model's own tokenizer or processor makes of samples.


def batch_of(spec, model, folder, size=3):
    loaded = open_model(folder)
    domain = preprocessed(load_domain(spec, "train"), loaded.task, loaded.model, loaded.label)
    return next(iter(domain.batches(size)))


def test_a_causal_model_predicts_the_next_token(tmp_path):
    folder = saved(llama(), tmp_path / "m")
    inputs, labels = batch_of(corpus(tmp_path / "c.txt"), llama, folder)
    for row, text in enumerate(texts()[:3]):
        ids = [WORDS.index(word) for word in text.split()]
        assert inputs["input_ids"][row].tolist() == ids + [0] * (labels.shape[1] - len(ids))
        assert inputs["attention_mask"][row].sum() == len(ids)
        assert labels[row].tolist() == ids[1:] + [IGNORED] * (labels.shape[1] - len(ids) + 1)
    inputs, _ = batch_of(f"{corpus(tmp_path / 'c.txt')}?length=3", llama, folder)
    assert inputs["input_ids"].shape == (3, 3)
    inputs, labels = batch_of(f"{corpus(tmp_path / 'c.txt')}?pack=7", llama, folder, 100)
    stream = [token for text in texts() for token in [*(WORDS.index(word) for word in text.split()), 4]]
    assert inputs["input_ids"].flatten().tolist() == stream[: len(stream) // 7 * 7]
    assert torch.equal(labels[:, :-1], inputs["input_ids"][:, 1:])


def test_a_masked_model_guesses_what_was_masked(tmp_path):
    folder = saved(masked(), tmp_path / "m")
    (tmp_path / "c.txt").write_text("\n".join(texts(200, longest=20)))
    inputs, labels = batch_of(f"text:{tmp_path / 'c.txt'}", masked, folder, 200)
    guessed = labels != IGNORED
    whole = [[WORDS.index(word) for word in text.split()] for text in texts(200, longest=20)]
    for row, ids in enumerate(whole):
        assert all(label in (IGNORED, token) for label, token in zip(labels[row].tolist(), ids, strict=False))
        kept = [t for t, g in zip(inputs["input_ids"][row].tolist(), guessed[row].tolist(), strict=True) if not g]
        assert kept[: len(ids) - int(guessed[row].sum())] == [
            t for t, g in zip(ids, guessed[row].tolist(), strict=False) if not g
        ]
    assert guessed.sum() / sum(map(len, whole)) == pytest.approx(0.15, abs=0.02)
    assert (inputs["input_ids"][guessed] == 2).float().mean() == pytest.approx(0.8, abs=0.07)
    again, _ = batch_of(f"text:{tmp_path / 'c.txt'}", masked, folder, 7)
    assert torch.equal(again["input_ids"], inputs["input_ids"][:7, : again["input_ids"].shape[1]])


def test_padding_has_no_part_in_the_fisher(tmp_path):
    """Whatever a text shares its batch with; the same texts have one fingerprint however they are batched."""
    folder, data = saved(llama(), tmp_path / "m"), corpus(tmp_path / "c.txt")
    for estimator in ("sampled", "empirical"):
        alone, together = (ewc.consolidate(folder, data, batch_size=size, estimator=estimator) for size in (1, 12))
        for name, value in alone.fisher.items():
            torch.testing.assert_close(together.fisher[name], value, rtol=1e-3, atol=1e-3 * float(value.max()))
    assert alone.provenance.data["fingerprint"] == together.provenance.data["fingerprint"]
    # By hand, a text at a time.
    model, total = llama(), {}
    for text in texts():
        ids = torch.tensor([[WORDS.index(word) for word in text.split()]])
        loss = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1], ids[0, 1:], reduction="sum")
        for (name, _), g in zip(
            model.named_parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            total[name] = total.get(name, 0) + g.square() / 12
    for name, value in total.items():
        torch.testing.assert_close(together.fisher[name], value, rtol=1e-3, atol=1e-3 * float(value.max()))


@pytest.mark.parametrize("estimator", ["exact", "sampled", "predicted", "empirical"])
def test_tokens_that_do_not_count_have_no_part_in_any_estimator(estimator):
    outputs = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets = torch.tensor([[1, 2, IGNORED, 0], [IGNORED, IGNORED, 3, IGNORED]])
    fisher = PerToken().output_fisher(outputs, targets, estimator, torch.Generator().manual_seed(0))
    vectors = fisher.vectors(slice(None))
    assert not vectors[:, targets == IGNORED].any()
    assert vectors[:, targets != IGNORED].any(dim=-1).any(dim=0).all()
    torch.testing.assert_close(fisher.squares(), vectors.square().sum(dim=0))
    if estimator == "sampled":  # what does not count takes no random numbers
        alone = PerToken().output_fisher(outputs[:, :2], targets[:, :2], estimator, torch.Generator().manual_seed(0))
        assert torch.equal(alone.vectors(slice(None))[:, 0], vectors[:, 0, :2])
        return
    whole = PerToken().output_fisher(outputs, targets.clamp(min=0), estimator, torch.Generator().manual_seed(0))
    assert torch.equal(whole.vectors(slice(None))[:, targets != IGNORED], vectors[:, targets != IGNORED])


def test_a_model_consolidated_on_its_own_samples(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("transformers.generation.utils.logger.warning_once", lambda *message: said.append(message))
    folder = saved(llama(), tmp_path / "m")
    loaded = open_model(folder)
    domain = preprocessed(load_domain("generate:300?length=6", "train"), loaded.task, loaded.model, loaded.label)
    ids = [domain.samples[n][0] for n in range(300)]
    assert all(sample[0] == 3 and 1 < len(sample) <= 6 and 4 not in sample[1:-1] for sample in ids)
    # Drawn from the model's own distribution.
    p = logits(llama(), {"input_ids": torch.tensor([[3]])})[0, 0].softmax(0)
    drawn = torch.bincount(torch.tensor([sample[1] for sample in ids]), minlength=50) / 300
    assert (drawn - p).abs().max() < 5 * (p.max() / 300).sqrt()
    one, two = (ewc.consolidate(folder, "generate:20?length=6") for _ in range(2))
    assert one.provenance.data["fingerprint"] == two.provenance.data["fingerprint"]
    assert one.provenance.samples == 20
    assert all(torch.equal(one.fisher[name], two.fisher[name]) for name in one.fisher)
    assert not said
    with pytest.raises(UsageError, match="a text classification generates nothing"):
        ewc.consolidate(saved(bert(), tmp_path / "b"), "generate:20")
    with pytest.raises(DataError, match="is no language model or text classifier of transformers"):
        ewc.consolidate(torch.nn.Linear(2, 2), "generate:20")
    with pytest.raises(UsageError, match="say how many samples to generate"):
        load_domain("generate:many", "train")


def test_labels_that_are_names_get_the_models_numbers(tmp_path):
    folder = saved(bert(), tmp_path / "m")
    (tmp_path / "r.csv").write_text("text,label\nw1 w2,good\nw3,bad\nw4 w5,good\n")
    for spec in (f"csv:{tmp_path / 'r.csv'}", f"hf:{tmp_path / 'r.csv'}"):
        inputs, labels = batch_of(spec, bert, folder)
        assert labels.tolist() == [2, 0, 2]
        assert inputs["input_ids"].tolist() == [[6, 7], [8, 0], [9, 10]]


def test_several_labels_and_numbers(tmp_path):
    many = saved(bert(problem_type="multi_label_classification"), tmp_path / "many")
    (tmp_path / "m.csv").write_text("text,a,b,c\nw1 w2,1,0,1\nw3,0,0,1\nw4,1,1,0\n")
    anchor = ewc.consolidate(many, f"csv:{tmp_path / 'm.csv'}?target=a,b,c", estimator="empirical")
    assert anchor.provenance.likelihood == "bernoulli"
    one = saved(bert(id2label={0: "LABEL_0"}, label2id={"LABEL_0": 0}), tmp_path / "one")
    (tmp_path / "n.csv").write_text("text,label\nw1 w2,0.5\nw3,-1\nw4,2.25\n")
    anchor = ewc.consolidate(one, f"csv:{tmp_path / 'n.csv'}", estimator="empirical")
    assert anchor.provenance.likelihood == "gaussian"


def test_images_of_any_size_go_through_the_processor(tmp_path):
    folder = saved(vit(), tmp_path / "m")
    inputs, labels = batch_of(pictures(tmp_path / "p"), vit, folder, 9)
    assert inputs.shape == (9, 3, 16, 16)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    processor = ViTImageProcessor.from_pretrained(folder)
    picture = Image.open(tmp_path / "p" / "good" / "1.png")
    torch.testing.assert_close(inputs[7], processor(picture, return_tensors="pt")["pixel_values"][0])
    # Numbers that are no bytes are somebody's inputs already.
    loaded = open_model(folder)
    own = as_domain(TensorDataset(torch.randn(2, 3, 16, 16), torch.tensor([0, 1])))
    assert preprocessed(own, loaded.task, loaded.model, "m") is own
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(DataError, match="has no image processor"):
        ewc.consolidate(folder, f"imagefolder:{tmp_path / 'p'}")


def test_streams_are_read_as_they_come(tmp_path):
    folder, data = saved(bert(), tmp_path / "m"), reviews(tmp_path / "r.jsonl", labels=(0, 1, 2))
    whole, streamed = (ewc.consolidate(folder, spec, batch_size=5) for spec in (data, f"{data}?stream=1"))
    assert streamed.provenance.data["size"] is None
    assert streamed.provenance.samples == 12
    assert whole.provenance.data["fingerprint"] == streamed.provenance.data["fingerprint"]
    for name, value in whole.fisher.items():
        torch.testing.assert_close(streamed.fisher[name], value)
    assert load_domain(f"{data}?stream=1&limit=7", "train").remarks == ("limit=7 takes the first 7 of a stream",)
    done = ewc.finetune(folder, f"{data}?stream=1&limit=7", epochs=2, batch_size=4, eval_on=[f"{data}?stream=1"])
    assert done.steps == 4
    assert done.after[0].samples == 12


def test_splits_of_a_dataset(tmp_path):
    (tmp_path / "d").mkdir()
    for name, count in (("train", 9), ("validation", 3)):
        rows = [json.dumps({"sentence": text, "stars": n % 3}) for n, text in enumerate(texts(count))]
        (tmp_path / "d" / f"{name}.jsonl").write_text("\n".join(rows))
    spec = f"hf:{tmp_path / 'd'}"
    assert load_domain(f"{spec}?target=stars", "train").size == 9
    assert load_domain(f"{spec}?target=stars", "test").size == 3
    with pytest.raises(UsageError, match=r"no column 'star' for the target. Did you mean 'stars'\?"):
        load_domain(f"{spec}?target=star", "train")
    with pytest.raises(UsageError, match="no column 'body' for the text"):
        load_domain(f"{spec}?text=body", "train")
    with pytest.raises(DataError, match="cannot be loaded .*Expected a dataset on the Hub"):
        load_domain(f"hf:{tmp_path}/nothing", "train")


def test_texts_need_a_tokenizer(tmp_path):
    corpus(tmp_path / "c.txt")
    with pytest.raises(DataError, match=r"has texts, and Linear is no language model"):
        ewc.consolidate(torch.nn.Linear(2, 2), f"text:{tmp_path / 'c.txt'}")
    folder = saved(llama(), tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(DataError, match="has no tokenizer that can be read"):
        ewc.consolidate(folder, f"text:{tmp_path / 'c.txt'}")
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(DataError, match="has no texts"):
        load_domain(f"text:{tmp_path / 'empty.txt'}", "train")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="it is not UTF-8"):
        load_domain(f"text:{tmp_path / 'bytes.txt'}", "train")


def test_without_transformers_it_is_said_how_to_get_it(tmp_path, monkeypatch):
    folder = saved(bert(), tmp_path / "m")
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'ewc-finetune\[transformers\]'"):
        open_model(folder)
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'ewc-finetune\[transformers\]'"):
        load_domain(reviews(tmp_path / "r.jsonl"), "train")


def test_datasets_of_images(tmp_path):
    folder = saved(vit(), tmp_path / "m")
    pictures(tmp_path / "p")
    names = sorted((tmp_path / "p").rglob("*.png"))
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y", "z"])})
    rows = {"image": [Image.open(name).copy() for name in names], "label": [n % 3 for n in range(9)]}
    found = datasets.Dataset.from_dict(rows, features=features)
    found.to_parquet(tmp_path / "p.parquet")
    inputs, labels = batch_of(f"hf:{tmp_path / 'p.parquet'}", vit, folder, 9)
    expected, _ = batch_of(f"imagefolder:{tmp_path / 'p'}", vit, folder, 9)
    assert labels.tolist() == rows["label"]
    torch.testing.assert_close(inputs, expected)
    assert load_domain(f"hf:{tmp_path / 'p.parquet'}", "train").classes == ("x", "y", "z")
    one, two = (ewc.consolidate(folder, data) for data in (found, f"hf:{tmp_path / 'p.parquet'}"))
    assert one.provenance.data["fingerprint"] == two.provenance.data["fingerprint"]


def test_datasets_as_they_are_loaded(tmp_path):
    """From Python: of texts, streams, or tokenized already."""
    folder, spec = saved(bert(), tmp_path / "m"), reviews(tmp_path / "r.jsonl", labels=(0, 1, 2))
    found = datasets.load_dataset("json", data_files=spec.removeprefix("hf:"))["train"]
    whole = ewc.consolidate(folder, spec).provenance.data["fingerprint"]
    tokens = found.map(lambda row: tokenizer()(row["text"])).remove_columns("text").with_format("torch")
    for data in (found, found.to_iterable_dataset()):
        assert ewc.consolidate(folder, data).provenance.data["fingerprint"] == whole
    scores = ewc.evaluate(folder, {"rows": found, "spec": spec})
    assert scores[0].loss == scores[1].loss
    one = tokens.select([0]).remove_columns(set(tokens.column_names) - {"input_ids", "attention_mask", "label"})
    assert ewc.evaluate(folder, one)[0].samples == 1


@pytest.mark.parametrize("head", ["new", "expand"])
def test_a_classifier_for_other_classes(tmp_path, head):
    """The config says how many there are, and what they are called."""
    folder = saved(bert(), tmp_path / "m")
    anchor = ewc.consolidate(folder, reviews(tmp_path / "r.jsonl"), output=tmp_path / "a.safetensors")
    assert anchor.provenance.versions["transformers"] == transformers.__version__
    data = reviews(tmp_path / "n.jsonl", labels=("cheap", "dear", "free") if head == "new" else (3, 4, 0))
    options = {"anchors": anchor, "head": head, "epochs": 1, "eval_on": [], "output": tmp_path / "out"}
    done = ewc.finetune(folder, data, **options)
    again = BertForSequenceClassification.from_pretrained(tmp_path / "out")
    assert torch.equal(logits(again, KINDS["bert"][2]), logits(done.model, KINDS["bert"][2]))
    names = ["cheap", "dear", "free"] if head == "new" else ["bad", "fine", "good", "LABEL_3", "LABEL_4"]
    assert list(again.config.id2label.values()) == names
    assert open_model(tmp_path / "out").model.classifier.out_features == len(names)


def test_modules_that_transformers_loaded(tmp_path):
    """Know where their tokenizer is."""
    folder, data = saved(llama(), tmp_path / "m"), corpus(tmp_path / "c.txt")
    (expected,) = ewc.evaluate(folder, data)
    assert ewc.evaluate(LlamaForCausalLM.from_pretrained(folder), data) == [expected]
    done = ewc.finetune(folder, data, epochs=0, eval_on=[])
    assert ewc.evaluate(done.model, data) == [expected]
    assert ewc.consolidate(done.model, data).provenance.name == "c"
    with pytest.raises(DataError, match="Name its folder"):
        ewc.evaluate(llama(), data, likelihood="per-token")
    lost = LlamaForCausalLM.from_pretrained(shutil.copytree(folder, tmp_path / "lost"))
    shutil.rmtree(tmp_path / "lost")
    with pytest.raises(DataError, match="Name its folder"):
        ewc.evaluate(lost, data)


def test_what_generates_is_the_model_alone(tmp_path):
    """Not what somebody set it to for its users."""
    folder = saved(llama(), tmp_path / "m")
    (folder / "generation_config.json").write_text(
        json.dumps({"do_sample": True, "temperature": 0.05, "top_p": 0.1, "max_new_tokens": 2, "suppress_tokens": [7]})
    )
    plain = ewc.consolidate(saved(llama(), tmp_path / "plain"), "generate:10?length=6")
    cold = ewc.consolidate(folder, "generate:10?length=6")
    assert cold.provenance.data["fingerprint"] == plain.provenance.data["fingerprint"]
    with pytest.raises(UsageError, match="samples of one token say nothing"):
        ewc.consolidate(folder, "generate:10?length=1")


def test_some_of_the_samples(tmp_path):
    folder = saved(bert(), tmp_path / "m")
    data = reviews(tmp_path / "r.jsonl", labels=(0, 1, 2))
    _, labels = batch_of(f"{data}?classes=1-2&first=5", bert, folder, 9)
    assert labels.tolist() == [1, 2, 1, 2, 1]
    pixels, _ = batch_of(f"{pictures(tmp_path / 'p')}?limit=2", vit, saved(vit(), tmp_path / "v"), 9)
    assert pixels.shape == (2, 3, 16, 16)
    found = ewc.consolidate(saved(llama(), tmp_path / "l"), f"{corpus(tmp_path / 'c.txt')}?limit=3")
    assert found.provenance.samples == 3


def test_a_models_own_image_processor_comes_before_what_data_say(tmp_path):
    folder, data = saved(vit(), tmp_path / "v"), str(pictures(tmp_path / "p"))
    sign = "&" if "?" in data else "?"
    with pytest.raises(UsageError, match=r"the image processor of .* says how images are normalised"):
        ewc.evaluate(folder, f"{data}{sign}mean=0.5&std=0.5")
    anchor = ewc.consolidate(folder, data, curvature="identity")
    assert not {"mean", "std", "resize", "crop"} & anchor.provenance.input.keys()


def test_texts_of_any_length(tmp_path):
    """An empty one, of which there is nothing to predict."""
    (tmp_path / "t.csv").write_text('text,label\n"",0\nw1 w2 w3,1\n')
    for name, build in (("llama", llama), ("masked", masked), ("bert", bert)):
        anchor = ewc.consolidate(saved(build(), tmp_path / name), f"csv:{tmp_path / 't.csv'}", estimator="empirical")
        assert anchor.provenance.samples == 2
    (tmp_path / "n.jsonl").write_text('{"text": null}\n{"text": "w1"}')
    for option in ("", "?stream=1"):
        with pytest.raises(DataError, match="sample 0 is a NoneType where a text should be"):
            ewc.consolidate(tmp_path / "llama", f"hf:{tmp_path / 'n.jsonl'}{option}")
    words = tokenizer()
    words.mask_token = None
    words.save_pretrained(tmp_path / "masked")
    with pytest.raises(DataError, match="has no mask token"):
        ewc.consolidate(tmp_path / "masked", f"csv:{tmp_path / 't.csv'}")


@pytest.mark.parametrize("padding", [None, 7])
def test_classifiers_that_look_at_the_last_token(tmp_path, padding):
    """Whatever their tokenizer fills texts up with."""
    torch.manual_seed(0)
    tokens = {"pad_token_id": padding, "num_key_value_heads": 1, "num_labels": 3}
    folder = saved(transformers.LlamaForSequenceClassification(LlamaConfig(**SMALL, **tokens)).eval(), tmp_path / "m")
    data = reviews(tmp_path / "r.jsonl", labels=(0, 1, 2))
    alone, together = (ewc.evaluate(folder, data, batch_size=size)[0].loss for size in (1, 12))
    assert alone == pytest.approx(together, rel=1e-5)


def test_code_of_a_folder_is_not_even_asked_for(tmp_path, monkeypatch):
    def asked(*_):
        raise AssertionError("the user was asked")

    monkeypatch.setattr("builtins.input", asked)
    folder = saved(llama(), tmp_path / "m")
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'exploded')!r}, 'w')")
    tokens = json.loads((folder / "tokenizer_config.json").read_bytes())
    tokens["auto_map"] = {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    changed(folder, auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"})
    data = corpus(tmp_path / "c.txt")
    with contextlib.suppress(DataError):
        assert ewc.consolidate(folder, data).provenance.samples == 12
    changed(folder, model_type="evil")
    with pytest.raises(ArchitectureError, match="as code, which is not run"):
        ewc.consolidate(folder, data)
    assert not (tmp_path / "exploded").exists()


def test_folders_within_travel_along(tmp_path):
    folder = saved(bert(), tmp_path / "m")
    for name in ("1_Pooling/config.json", "checkpoint-5/config.json", ".git/HEAD", "onnx/model.onnx"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("{}")
    ewc.finetune(folder, reviews(tmp_path / "r.jsonl"), epochs=0, output=tmp_path / "out", eval_on=[])
    assert [path.name for path in sorted((tmp_path / "out").iterdir()) if path.is_dir()] == ["1_Pooling"]


def test_weights_that_are_put_together_and_do_not_fit(tmp_path):
    """Experts lie apart in the file: what differs is told by the names there."""
    config = transformers.MixtralConfig(**SMALL, num_key_value_heads=1, num_local_experts=2)
    torch.manual_seed(0)
    folder = saved(transformers.MixtralForCausalLM(config).eval(), tmp_path / "m")
    data = corpus(tmp_path / "c.txt")
    done = ewc.finetune(folder, data, epochs=1, output=tmp_path / "out", eval_on=[])
    again = transformers.MixtralForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(logits(again, KINDS["llama"][2]), logits(done.model, KINDS["llama"][2]))
    state = safetensors.torch.load_file(folder / "model.safetensors")
    experts = [name for name in state if "experts.0" in name]
    for name in experts[:2]:
        state[name] = state[name][:-1]
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ArchitectureError, match=r"experts.0.* has shape .*; .*experts.0.* has shape"):
        open_model(folder)
    state = {name: t.to(torch.float8_e4m3fn) if name in experts else t for name, t in state.items()}
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="is torch.float8_e4m3fn; quantized weights cannot be trained"):
        open_model(folder)


def test_images_for_a_model_of_texts(tmp_path):
    data = pictures(tmp_path / "p")
    with pytest.raises(DataError, match="has images, and .* is a text classification, which takes texts"):
        ewc.consolidate(saved(bert(), tmp_path / "m"), data)
    (tmp_path / "e.jsonl").write_text("")
    with pytest.raises(DataError, match="e.jsonl, which .* names, is empty"):
        load_domain(f"hf:{tmp_path / 'e.jsonl'}", "train")
    (tmp_path / "r.csv").write_text("review,stars\ngood,3\n")
    with pytest.raises(DataError, match=r"column 'review' \('good' in line 2\).* text of each row \(.*text=COLUMN\)"):
        load_domain(f"csv:{tmp_path / 'r.csv'}", "train").first()
    with pytest.raises(UsageError, match=r"is a file; say of what kind it is: table:/"):
        load_domain(str(tmp_path / "r.csv"), "train")


@pytest.mark.parametrize("form", ["expand", "reduce"])
def test_padding_has_no_part_in_the_factors(tmp_path, form):
    folder, data = saved(llama(), tmp_path / "m"), corpus(tmp_path / "c.txt")
    options = {"curvature": "kfac", "kfac_rank": "full", "kfac_form": form, "estimator": "sampled"}
    alone, together = (ewc.consolidate(folder, data, batch_size=size, **options) for size in (1, 12))
    for layer, block in alone.blocks.items():
        other = together.blocks[layer]
        for one, two in ((block.input, other.input), (block.output, other.output)):
            torch.testing.assert_close(one.matrix(), two.matrix(), rtol=1e-3, atol=1e-4 * float(one.matrix().max()))


def test_what_is_downloaded(hub):
    """Folders within travel along; weights of other kinds would be for nothing."""
    names = ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "1_Pooling/config.json"]
    names += ["onnx/model.onnx", "2_Dense/model.safetensors"]
    hub.create("org/name")
    commit = hub.put("org/name", dict.fromkeys(names, b"x")).oid
    repository = look_up(locate("hf:org/name@main"))
    folder, _ = fetch(repository)
    assert str(repository.address.at(repository.commit)) == f"hf:org/name@{commit}"
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {".gitattributes", "config.json", "model.safetensors", "1_Pooling/config.json"}


def test_a_model_on_the_hub_is_used_at_its_commit(hub, tmp_path, monkeypatch):
    """And that is what the run says, so that it can be repeated."""
    monkeypatch.chdir(tmp_path)
    hub.create("org/name")
    files = {path.name: path for path in saved(bert(), tmp_path / "m").iterdir()}
    commit = hub.put("org/name", files).oid
    data = reviews(tmp_path / "r.jsonl")
    for name in ("hf:org/name", "hf://org/name"):
        ewc.finetune(name, data, epochs=0, output="out", eval_on=[], overwrite=True)
        document = json.loads((tmp_path / "out.run" / "run.json").read_text())
        assert document["options"]["model"].partition("@")[2] == commit
        assert document["found"]["model"] == f"hf:org/name@{commit}"
    hub.stop()
    for name in ("hf:org/name", "hf://org/name"):
        assert open_model(name).file == f"hf:org/name@{commit}"


def test_models_on_the_hub_that_cannot_be_had(hub, tmp_path):
    hub.create("org/name")
    hub.put("org/name", {path.name: path for path in saved(bert(), tmp_path / "m").iterdir()})
    with pytest.raises(HubError, match=r"there is no repository org/none on the Hub"):
        open_model("hf:org/none")
    with pytest.raises(UsageError, match="names no model on the Hub; expected hf:ORG/NAME"):
        open_model("hf:/org/name")
    hub.corrupt(r"filename=model\.safetensors")
    with pytest.raises(HubError, match="is not what the Hub promised"):
        open_model("hf:org/name")
    hub.clear()
    open_model("hf:org/name")
    config = next((tmp_path / "huggingface").rglob("config.json")).resolve()
    config.write_bytes(config.read_bytes().replace(b"gelu", b"relu"))
    with pytest.raises(HubError, match=r"config.json is not what the Hub promised: its git hash is"):
        open_model("hf:org/name")
