"""Files as somebody would make them who changes one, or means harm."""

import json
import os

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from ewc_finetune.storage.checksums import KEY as CHECKSUMS


def save_changed(tensors, path, metadata):
    """Write a safetensors file as somebody would who changes one: the checksums in its metadata are left out."""
    save_file(tensors, path, {name: text for name, text in metadata.items() if name != CHECKSUMS})


def metadata_of(path):
    with safe_open(path, "pt") as file:
        return file.metadata()


def record_of(path):
    """What an anchor file says of itself, as it stands in there."""
    return json.loads(metadata_of(path)["anchor"])


def change_anchor(path, change, output=None):
    """Write an anchor file, there or elsewhere, after `change(record, tensors)`; return where it is."""
    tensors, record = load_file(path), record_of(path)
    change(record, tensors)
    save_changed(tensors, output or path, metadata_of(path) | {"anchor": json.dumps(record)})
    return output or path


class Bomb:
    """What makes a file in the working folder when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch exploded",)
