"""Small models of transformers, their folders, and data for them."""

import json

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
    ViTModel,
)

WORDS = ["[PAD]", "[UNK]", "[MASK]", "[BOS]", "[EOS]", *(f"w{n}" for n in range(45))]


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
}


def tokenizer(of_pairs=False):
    """By whole words; one of pairs ends each text with a token, as BERT's does."""
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    if of_pairs:
        words.post_processor = processors.TemplateProcessing(
            "[BOS] $A [EOS]", "[BOS] $A [EOS] $B:1 [EOS]:1", [("[BOS]", 3), ("[EOS]", 4)]
        )
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if of_pairs else [])]
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_input_names=names,
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
        bos_token="[BOS]",
        eos_token="[EOS]",
    )


def bert(**settings):
    torch.manual_seed(0)
    names = {"id2label": {0: "bad", 1: "fine", 2: "good"}, "label2id": {"bad": 0, "fine": 1, "good": 2}}
    return BertForSequenceClassification(BertConfig(**SMALL, **({**names, **settings}))).eval()


def masked(**settings):
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**SMALL, **settings)).eval()


def llama(**settings):
    torch.manual_seed(0)
    tokens = {"bos_token_id": 3, "eos_token_id": 4, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, **tokens, **settings)).eval()


def vit():
    torch.manual_seed(0)
    size = {"image_size": 16, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    return ViTForImageClassification(ViTConfig(**size, intermediate_size=48, num_labels=3)).eval()


def saved(model, folder, **options):
    """As its own library writes it, with what makes its inputs."""
    model.save_pretrained(folder, **options)
    if isinstance(model, (ViTForImageClassification, ViTModel)):
        ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)
    else:
        tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text("# A model")
    return folder


def texts(count=12, seed=0, longest=9):
    draws = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        length = int(torch.randint(3, longest, (), generator=draws))
        found.append(" ".join(f"w{n}" for n in torch.randint(0, 45, (length,), generator=draws).tolist()))
    return found


def reviews(path, labels=("good", "bad", "fine")):
    rows = [{"text": text, "label": labels[n % 3]} for n, text in enumerate(texts())]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return f"hf:{path}"


def corpus(path, seed=0):
    path.write_text("\n".join(texts(seed=seed)) + "\n\n")
    return f"text:{path}"


def pictures(folder):
    """Of two sizes, one of them grey."""
    for number, name in enumerate(("bad", "fine", "good")):
        (folder / name).mkdir(parents=True)
        for n in range(3):
            size, mode = ((20, 24), "L") if n == 0 else ((16, 16), "RGB")
            Image.new(mode, size, (n * 40 + number) if n == 0 else (n * 40, number * 80, 7)).save(
                folder / name / f"{n}.png"
            )
    return f"imagefolder:{folder}"


def encoder(kind="bert"):
    """A model without a head, as an encoder is shared."""
    torch.manual_seed(0)
    if kind == "vit":
        return ViTModel(vit().config, add_pooling_layer=False).eval()
    return BertModel(BertConfig(**SMALL)).eval()
