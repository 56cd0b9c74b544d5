"""How to use a published anchor: commands and code that can be copied."""

from __future__ import annotations

from ewc_finetune.anchor.provenance import Provenance
from ewc_finetune.checkpoint.architecture import BUILTIN, TRANSFORMERS
from ewc_finetune.checkpoint.formats.exported import Exported
from ewc_finetune.checkpoint.formats.onnx.file import Onnx
from ewc_finetune.checkpoint.formats.pickled import Pickled
from ewc_finetune.checkpoint.formats.safetensors_file import SafetensorsFile
from ewc_finetune.checkpoint.formats.sharded import Sharded
from ewc_finetune.checkpoint.formats.state_dict import StateDict
from ewc_finetune.checkpoint.formats.torchscript import TorchScript
from ewc_finetune.checkpoint.formats.transformers_folder import HuggingFace
from ewc_finetune.choices import DEFAULT_LAMBDA
from ewc_finetune.model_card.published import Published
from ewc_finetune.model_card.text import FILE_NAME, code, without_folders

# Formats whose program is not in an anchor: how their files end, and the extra of this package that they need.
_PROGRAMS = {
    HuggingFace.format: (HuggingFace.ending, "[transformers]"),
    Onnx.format: (Onnx.ending, "[onnx]"),
    TorchScript.format: (TorchScript.ending, ""),
    Exported.format: (Exported.ending, ""),
    Pickled.format: (Pickled.ending, ""),
}
# What is trained from an anchor that was made of shards is one file.
_SAFETENSORS = (SafetensorsFile.format, Sharded.format)


def usage(origin: Provenance, place: Published) -> str:
    """Return the commands that use the anchor, to be copied as they are but for what is in capitals."""
    kind = origin.checkpoint.get("format") or ""
    plain = SafetensorsFile.ending if kind in _SAFETENSORS else StateDict.ending
    ending, extra = _PROGRAMS.get(kind, (plain, ""))
    options, hint = _model_options(origin, place)
    package = f"'ewc-finetune{extra}'" if extra else "ewc-finetune"
    return f"""### How to use it

```sh
pip install {package}
ewc-ft finetune --anchors {place.address}{options} --data NEW_DATA --output adapted{ending}
```

`NEW_DATA` is what to learn, such as {_example(origin)}.{hint} `--lambda` says how hard the anchor pulls \
({DEFAULT_LAMBDA[origin.curvature]:g} unless given; `auto` looks for a value), and `ewc-ft finetune --help-all` lists \
the rest.

From Python, on a `torch.nn.Module` that has the weights to start from, and a dataset or loader:

```python
import ewc_finetune

anchor = ewc_finetune.Anchor.open("{place.address}")
ewc_finetune.finetune(model, new_data, anchors=anchor)  # in place
```"""


def _model_options(origin: Provenance, place: Published) -> tuple[str, str]:
    """Return the options that say what the model is, and a sentence on what that takes."""
    architecture = origin.checkpoint.get("architecture")
    if origin.checkpoint.get("format") in _PROGRAMS:
        hint = " `--model` is the model that the anchor was made from, whose program is not in the anchor."
        return f" --model {_model(origin, place)}", hint
    if not architecture:
        return " --arch PACKAGE.MODULE:CLASS", " `--arch` is the class of the model, which the anchor does not name."
    if architecture.partition("?")[0] in BUILTIN or architecture.startswith(("torchvision:", TRANSFORMERS)):
        return "", ""
    return "", f" The class {code(without_folders(architecture).partition('?')[0])} has to be on the Python path."


def _model(origin: Provenance, place: Published) -> str:
    """Return what to write behind `--model`: nothing of it may be more than a name to a shell."""
    base, revision = place.base
    if base and origin.checkpoint.get("format") == HuggingFace.format:
        return f"hf:{base}" + (f"@{revision}" if revision else "")
    file = origin.checkpoint.get("file") or ""
    return file if FILE_NAME.fullmatch(file) else "MODEL"


def _example(origin: Provenance) -> str:
    if origin.likelihood == "per-token":
        return "`text:new.txt` or `hf:ORG/DATASET`"
    if len(origin.input.get("shape", [])) == 3:
        return "`imagefolder:photos/` or `npz:new.npz`"
    return "`table:new.csv?target=label` or `hf:ORG/DATASET`"
