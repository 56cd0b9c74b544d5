"""Files as somebody would make them who changes one, or means harm."""

import os

from safetensors.torch import save_file

from ewc_finetune.storage.checksums import KEY as CHECKSUMS


def save_changed(tensors, path, metadata):
    """Write a safetensors file as somebody would who changes one: the checksums in its metadata are left out."""
    save_file(tensors, path, {name: text for name, text in metadata.items() if name != CHECKSUMS})


class Bomb:
    """What makes a file in the working folder when it is unpickled."""

    def __reduce__(self):
        return os.system, ("touch exploded",)
