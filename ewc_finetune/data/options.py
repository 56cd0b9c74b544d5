"""What may stand behind the question mark of a data spec; every option applies to every kind of data."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2 import functional as image_ops

from ewc_finetune.choices import SPLITS, Split
from ewc_finetune.data.numbering import read_names
from ewc_finetune.data.transform import IMAGENET_MEAN, IMAGENET_STD, INTERPOLATIONS, Transform
from ewc_finetune.errors import UsageError, suggest
from ewc_finetune.specs.query import Address

# What may be done to images at random: mirrored, moved a little, and by RandAugment (Cubuk et al. 2020).
AUGMENTATIONS = ("flip", "crop", "rand")
# The most classes of one range; a range of more is taken for a slip of the finger.
_MANY_CLASSES = 1_000_000
# The same of how often a sample is taken.
_MOST_OFTEN = 1000


@dataclass(frozen=True)
class DataOptions:
    """The options of a data spec, read and checked.

    Attributes:
        split: `train` or `test`; None where the spec doesn't say.
        classes: Labels to keep; all unless given.
        first: Keep the first so many, after `classes`.
        limit: Keep a draw of so many, after `first`: an even one, where samples have classes (`draw_evenly`).
        transform: What is said of images' size and numbers, each by an option of its own: `size`, `resize`, `crop`,
            `interpolation`, `mean`, `std`.
        channels: 1 for grey, 3 for colour.
        rotate: Turn images by so many degrees, counterclockwise.
        permute: Shuffle the pixels of every image alike, by this seed.
        augment: What is done to images at random each time that they are trained on: `flip`, `crop`, `rand`.
        weight: Take each sample so often in an epoch, in the mean, where data is trained on, mixed with others or not.
        offset: Add so much to every label, after `classes`, where the model numbers these classes after others.
        active: The model's outputs that count for this data, in the numbers that labels have then; all unless given.
        text: The column of the texts, or the two whose texts are pairs.
        inputs: The array of the inputs; several are a dictionary by their names.
        target: The column or array of the targets; several columns are joined by commas.
        labels: Names of the model's outputs, in their order, which labels are then numbered by.
        length: How many tokens to keep of each text, or to generate.
        pack: Join the texts and cut them into samples of so many tokens.
        config: The configuration of a dataset on the Hub.
        revision: The revision of a dataset on the Hub.
        stream: Whether to read the samples as they come.
        prompts: A file of requests, one to a line, which what is generated answers.
        seed: The seed of what is generated, or held out.
        header: Whether the first line of a table has the names of its columns; it has, unless given.
        ignore: Columns of a table to leave out.
        onehot: Columns of a table that are categories; true for all whose values are not numbers.
        missing: What stands for numbers that are missing in a table: one number, or the `mean` of each column.
        standardise: Whether columns of numbers are standardised; as the model's own were unless given.
        unseen: `zeros`: a category that the training data did not have is none of them. It is refused otherwise.
        unit: What numbers to predict are divided by; as the model's own were unless given.
        decimal: `comma` where 1,5 is a number of a table, and not 1.5.
        test: The share of a table's rows that is held out as its test split.
    """

    split: Split | None = None
    classes: tuple[range, ...] | None = None
    first: int | None = None
    limit: int | None = None
    transform: Transform = field(default_factory=Transform)
    channels: int | None = None
    rotate: float | None = None
    permute: int | None = None
    augment: tuple[str, ...] = ()
    weight: float | None = None
    offset: int = 0
    active: tuple[range, ...] | None = None
    text: tuple[str, ...] | None = None
    inputs: tuple[str, ...] | None = None
    target: str | None = None
    labels: tuple[str, ...] | None = None
    length: int | None = None
    pack: int | None = None
    config: str | None = None
    revision: str | None = None
    stream: bool = False
    prompts: str | None = None
    seed: int = 0
    header: bool | None = None
    ignore: tuple[str, ...] = ()
    onehot: bool | tuple[str, ...] = False
    missing: str | float | None = None
    standardise: bool | None = None
    unseen: str | None = None
    unit: float | None = None
    decimal: str = "point"
    test: float | None = None

    @property
    def changes_images(self) -> bool:
        """Whether `apply` does anything."""
        others = (self.channels, self.rotate, self.permute)
        return self.transform.reshapes or any(option is not None for option in others)

    @property
    def encodes(self) -> bool:
        """Whether it says how columns of a table become inputs."""
        return bool(self.onehot or self.unseen) or self.missing is not None or self.standardise is not None

    def apply(self, images: Tensor) -> Tensor:
        """Resize, crop, recolour, rotate and permute images `(..., channels, height, width)`, in this order."""
        images = self.transform.reshape(images)
        if self.channels is not None and images.shape[-3] != self.channels:
            images = image_ops.rgb_to_grayscale(images) if self.channels == 1 else image_ops.grayscale_to_rgb(images)
        if self.rotate is not None:
            images = image_ops.rotate(images, self.rotate, interpolation=InterpolationMode.BILINEAR)
        if self.permute is not None:
            pixels = images.shape[-2] * images.shape[-1]
            order = torch.randperm(pixels, generator=torch.Generator().manual_seed(self.permute))
            images = images.flatten(-2)[..., order].reshape(images.shape)
        return images

    def keep(self, samples: int, labels: Tensor | None) -> Tensor:
        """Return the indices of the samples that `classes` and `first` keep; `classes` needs labels."""
        indices = torch.arange(samples)
        if self.classes is not None and labels is not None:
            kept = torch.zeros(samples, dtype=torch.bool)
            for part in self.classes:
                kept |= (labels >= part.start) & (labels < part.stop)
            indices = indices[kept]
        return indices[: self.first]


def read_options(address: Address, own: Collection[str] = ()) -> DataOptions:
    """Read the options of a data spec.

    Args:
        address: The spec.
        own: Options of this kind of data beside those that all have.

    Raises:
        UsageError: naming the option, what it says and what was expected.
    """
    values: dict[str, object] = {}
    known = _READERS | {key: _OWN[key] for key in own}
    for key, text in address.options.items():
        if key not in known:
            raise UsageError(f"{address}: this data has no option {key!r}. {suggest(key, known)}")
        reader, expected = known[key]
        try:
            values[key] = reader(text)
        except (ValueError, csv.Error):
            raise UsageError(f"{address}: {key}={text} is not understood; expected {expected}") from None
    said = {key: values.pop(key) for key in _OF_TRANSFORM if key in values}
    transform = Transform(**said)  # type: ignore[arg-type]
    _check_transform(transform, address)
    if "augment" in values and "permute" in values:
        raise UsageError(f"{address}: augment= is for images, and permute= makes of each no image any more; say one")
    return DataOptions(transform=transform, **values)  # type: ignore[arg-type]


def _check_transform(transform: Transform, address: Address) -> None:
    """Refuse what is half said, or said twice."""
    if (transform.mean is None) != (transform.std is None):
        there, lacks = ("mean", "std") if transform.std is None else ("std", "mean")
        raise UsageError(
            f"{address}: it says {there} and no {lacks}. Pixels from 0 to 1 are normalised by both, as in "
            "mean=imagenet&std=imagenet or mean=0.5&std=0.5; std=1 and mean=0 leave them as they are"
        )
    if transform.size is not None and transform.resize is not None:
        raise UsageError(
            f"{address}: size= resizes to a height and a width, resize= until the shorter side has so many pixels; say "
            "one of them"
        )
    if transform.interpolation is not None and transform.size is None and transform.resize is None:
        raise UsageError(f"{address}: interpolation= is for size= or resize=, and there is neither")


def _one_of(*words: str) -> Callable[[str], str]:
    """Return a reader that takes these words alone."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueError
        return text

    return read


def _augment(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(AUGMENTATIONS) or len(set(names)) < len(names):
        raise ValueError
    return names


def _classes(text: str) -> tuple[range, ...]:
    parts = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        parts.append(range(_whole(first), _whole(last if dash else first) + 1))
        if not 0 < len(parts[-1]) <= _MANY_CLASSES:
            raise ValueError
    return tuple(parts)


def _one_or_two(text: str) -> tuple[str, ...]:
    names = read_names(text)
    if not 1 <= len(names) <= 2:
        raise ValueError
    return names


def _whole(text: str) -> int:
    if not text.isdecimal() or len(text) > 18:  # what torch can hold
        raise ValueError
    return int(text)


def _positive(text: str) -> int:
    if _whole(text) == 0:
        raise ValueError
    return int(text)


def _size(text: str) -> tuple[int, int]:
    height, cross, width = text.partition("x")
    return _positive(height), _positive(width if cross else height)


def _numbers(text: str, imagenet: tuple[float, ...]) -> tuple[float, ...]:
    numbers = imagenet if text == "imagenet" else tuple(map(float, text.split(",")))
    if len(numbers) not in (1, 3) or not all(math.isfinite(number) and abs(number) < 1e30 for number in numbers):
        raise ValueError
    return numbers


def _mean(text: str) -> tuple[float, ...]:
    return _numbers(text, IMAGENET_MEAN)


def _std(text: str) -> tuple[float, ...]:
    deviations = _numbers(text, IMAGENET_STD)
    if min(deviations) < 1e-30:
        raise ValueError
    return deviations


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError
    return float(text)


def _integer(text: str) -> int:
    return -_whole(text[1:]) if text.startswith("-") else _whole(text)


def _yes(text: str) -> bool:
    return _one_of("0", "1")(text) == "1"


def _above_zero(text: str) -> float:
    if _finite(text) < 1e-30:
        raise ValueError
    return float(text)


def _weight(text: str) -> float:
    if _above_zero(text) > _MOST_OFTEN:
        raise ValueError
    return float(text)


def _share(text: str) -> float:
    if not 0 < float(text) < 1:
        raise ValueError
    return float(text)


_READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "split": (_one_of(*SPLITS), "train or test"),
    "classes": (_classes, "labels such as 0-4 or 0,2,7-9"),
    "first": (_positive, "a number of samples, at least 1"),
    "limit": (_positive, "a number of samples, at least 1"),
    "size": (_size, "pixels such as 28 or 224x320 (height x width)"),
    "resize": (_positive, "pixels of the shorter side such as 256; size=224x320 makes images of this height and width"),
    "crop": (_size, "pixels such as 224 or 224x320 (height x width)"),
    "interpolation": (_one_of(*INTERPOLATIONS), ", ".join(INTERPOLATIONS)),
    "mean": (_mean, "imagenet, one number such as 0.5, or three (red,green,blue), of pixels from 0 to 1"),
    "std": (_std, "imagenet, one number above 0 such as 0.5, or three (red,green,blue)"),
    "channels": (lambda text: int(_one_of("1", "3")(text)), "1 (grey) or 3 (colour)"),
    "rotate": (_finite, "degrees such as 30 or -12.5"),
    "augment": (_augment, f"of {', '.join(AUGMENTATIONS)} one or several, joined by commas, none twice"),
    "weight": (_weight, f"how often to take each sample, above 0 and up to {_MOST_OFTEN:,}, such as 0.1 or 2"),
    "offset": (_integer, "a whole number such as 10 or -1"),
    "active": (_classes, "outputs such as 0-4 or 0,2,7-9"),
    "permute": (_whole, "a seed, a whole number from 0"),
}
COMMON = tuple(_READERS)
_OF_TRANSFORM = ("size", "resize", "crop", "interpolation", "mean", "std")
# Options of some kinds of data alone.
_OWN: dict[str, tuple[Callable[[str], object], str]] = {
    "text": (_one_or_two, "the name of a column, or of two whose texts are a pair such as question,answer"),
    "inputs": (read_names, "the name of an array, or of several such as image,mask; none empty, none twice"),
    "target": (str, "the name of a column or an array"),
    "labels": (read_names, "names in the order of the model's outputs such as cat,dog; none empty, none twice"),
    "length": (_positive, "a number of tokens, at least 1"),
    "pack": (_positive, "a number of tokens, at least 1"),
    "config": (str, "the name of a configuration"),
    "revision": (str, "the name of a revision"),
    "stream": (_yes, "1 or 0"),
    "prompts": (str, "a file of requests, one to a line"),
    "seed": (_whole, "a seed, a whole number from 0"),
    "header": (_yes, "1, or 0 where the first line is a row like the others"),
    "ignore": (read_names, "names of columns such as id,name; none empty, none twice"),
    "onehot": (
        lambda text: True if text == "1" else read_names(text),
        "names of columns such as city,kind, or 1 for all whose values are not numbers",
    ),
    "missing": (lambda text: text if text == "mean" else _finite(text), "mean, or a number such as 0"),
    "standardise": (_yes, "1 or 0"),
    "unseen": (_one_of("zeros"), "zeros"),
    "unit": (_above_zero, "a number above 0 such as 1000"),
    "decimal": (_one_of("point", "comma"), "point or comma"),
    "test": (_share, "a share of the rows, above 0 and below 1, such as 0.2"),
}
