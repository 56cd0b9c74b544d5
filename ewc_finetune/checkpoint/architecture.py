"""Architectures by name: `mlp`, `cnn`, `torchvision:resnet18`, `timm:resnet18`, `package.module:Class?width=256`."""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ewc_finetune.checkpoint import builtin_models as models
from ewc_finetune.errors import ArchitectureError, UsageError, WrongArchitectureError, suggest
from ewc_finetune.specs.importing import find, find_own, value_of, working_directory_on_path
from ewc_finetune.specs.query import Address, parse

BUILTIN: dict[str, type[nn.Module]] = {"mlp": models.MLP, "cnn": models.CNN}
TRANSFORMERS = "transformers:"
TORCHVISION = "torchvision:"
TIMM = "timm:"
FORMS = "mlp, cnn, torchvision:NAME, timm:NAME or package.module:Class (keyword arguments behind a ?)"
# Arguments with which torchvision and timm would read or fetch weights.
_OF_WEIGHTS = {
    *("weights", "weights_backbone", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict"),
    *("checkpoint_path", "cache_dir"),
}


def looks_like_architecture(text: str) -> bool:
    """Whether the text has the form of an architecture rather than that of a path."""
    head = text.partition("?")[0]
    module, colon, name = head.partition(":")
    return head in BUILTIN or bool(colon and all(p.isidentifier() for p in (*module.split("."), *name.split("."))))


def build(text: str, *, trusted: bool, note: Callable[[str], None] | None = None) -> nn.Module:
    """Build the module that an architecture names, with fresh weights.

    The working directory is on the import path meanwhile: before everything else for a name that the user gave, after
    it for one that comes from a file.

    Args:
        text: The architecture.
        trusted: Whether the user named it. One that was read from a file may only name subclasses of `torch.nn.Module`
            that are defined in a module of the user's own (`importing.find_own`): a file from a stranger shall neither
            import what it likes nor call what it likes. Class methods are not among them: many unpickle what they are
            given the path of.
        note: Told what is imported for one that was read from a file.

    Raises:
        UsageError: if the text is no address.
        WrongArchitectureError: if the user named what there is not, or options that it does not have.
        ArchitectureError: if it cannot be found, called, or is no module.
    """
    try:
        return _built(text, trusted, note)
    except UsageError as error:
        if trusted:
            raise
        raise ArchitectureError(str(error)) from error  # nobody typed it


def _built(text: str, trusted: bool, note: Callable[[str], None] | None) -> nn.Module:
    address = parse(text)
    with working_directory_on_path(first=trusted):
        factory = _find(address, trusted, note)
        arguments = {key: value_of(value) for key, value in address.options.items()}
        if address.head in BUILTIN:
            models.check_options(address.head, arguments)
        try:
            module = factory(**arguments)
        except ArchitectureError:
            raise
        except Exception as error:
            # Our networks and torchvision's fail at nothing but what they are given.
            wrong = ArchitectureError if names_code(text) else WrongArchitectureError
            raise wrong(
                f"the architecture {text} cannot be built: {type(error).__name__}: {error}. "
                f"It is called as {address.head}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})"
            ) from error
    if not isinstance(module, nn.Module):
        raise ArchitectureError(f"{address.head} gives a {type(module).__name__}; expected a torch.nn.Module")
    return module


class uninitialised(TorchFunctionMode):  # noqa: N801 - a context, used as one
    """Leave out the random numbers in models that are built inside: weights from a file take their place.

    The system gives no memory to tensors that nothing is written to, so that a model in half precision never takes the
    memory that it would in float32.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _FILLING and isinstance(args[0] if args else (kwargs or {}).get("tensor"), nn.Parameter):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


# Functions that fill a tensor with random numbers, on which no model whose weights are loaded can depend.
_FILLING = {
    *(torch.Tensor.uniform_, torch.Tensor.normal_, nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_),
    *(nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.xavier_uniform_, nn.init.xavier_normal_),
}


def names_code(text: str) -> str | None:
    """Return the `module:name` that an architecture would import, if it is neither ours nor torchvision's or timm's."""
    head = text.strip().partition("?")[0].rstrip()
    ours = head in BUILTIN or ":" not in head or head.startswith((TORCHVISION, TIMM))
    return None if ours else head


def builds_by_itself(text: str) -> bool:
    """Whether the architecture may be built when a file names it, with nobody naming it again."""
    with working_directory_on_path(first=False):
        try:
            _find(parse(text), trusted=False)
        except ArchitectureError:
            return False
    return True


def complete(text: str, sample_shape: tuple[int, ...], num_classes: int) -> str:
    """Fill in what the data says and the text leaves open, so that the text alone builds the model again.

    Args:
        text: The architecture as the user wrote it.
        sample_shape: Of one sample; `(channels, height, width)` for images.
        num_classes: Of the new data.
    """
    address = parse(text)
    known: dict[str, Any] = {"num_classes": num_classes}
    if address.head in BUILTIN:
        size = 1
        for length in sample_shape:
            size *= length
        known["in_features"] = size
        if len(sample_shape) == 3:
            known |= {"in_channels": sample_shape[0], "image_size": sample_shape[1]}
        signature = inspect.signature(BUILTIN[address.head])
        options = {name: str(known.get(name, _text(p.default))) for name, p in signature.parameters.items()}
    elif address.head.startswith((TORCHVISION, TIMM)):
        options = {"num_classes": str(num_classes)}
    else:
        options = {}
    return str(Address(address.head, options | address.options))


def with_outputs(text: str, outputs: int) -> str:
    """Return the architecture with another number of outputs.

    Raises:
        ArchitectureError: if it does not take a `num_classes` that says it.
    """
    if text.startswith(TRANSFORMERS):
        return text  # the folder's config has the number of outputs
    address = parse(text)
    named = address.head in BUILTIN or address.head.startswith((TORCHVISION, TIMM))
    if not (named or "num_classes" in address.options or _takes_num_classes(address)):
        said = Address(address.head, {**address.options, "num_classes": "N"})
        raise ArchitectureError(
            f"{text} does not take its number of outputs, so a model with {outputs} could not be built again. Say its "
            f"present number N with {as_option(said)}, or give {address.head} an argument num_classes if it has none"
        )
    return str(Address(address.head, {**address.options, "num_classes": str(outputs)}))


def _takes_num_classes(address: Address) -> bool:
    """Whether what built a model, which is imported, has an argument for its number of outputs."""
    module, _, name = address.head.partition(":")
    factory: Any = sys.modules.get(module)
    for part in name.split("."):
        factory = getattr(factory, part, None)
    try:
        return "num_classes" in inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return False


def _find(address: Address, trusted: bool, note: Callable[[str], None] | None = None) -> Callable[..., object]:
    head = address.head
    if head in BUILTIN:
        return BUILTIN[head]
    _, colon, name = head.partition(":")
    if not colon:
        raise WrongArchitectureError(f"no architecture is called {head!r}. {suggest(head, BUILTIN)}; otherwise {FORMS}")
    if head.startswith(TORCHVISION):
        return _torchvision(name)
    if head.startswith(TIMM):
        return _timm(name)
    factory = find(head, "architecture", ArchitectureError) if trusted else find_own(head, as_option(address), note)
    is_module_class = isinstance(factory, type) and issubclass(factory, nn.Module)
    if not is_module_class and not (trusted and callable(factory)):
        raise ArchitectureError(
            f"{head} is not a subclass of torch.nn.Module"
            + (
                ""
                if trusted
                else f", and a file may name nothing else. If you trust it, name it yourself with {as_option(address)}"
            )
        )
    return factory  # type: ignore[return-value]


def as_option(architecture: Address | str) -> str:
    """Return the option that names an architecture, to be copied, or without it where Python's own code is named.

    A shell takes it for one word. Of what comes with Python no part is a model.
    """
    text = str(architecture)
    comes_with_python = text.partition(":")[0].partition(".")[0] in sys.stdlib_module_names
    return "--arch" if comes_with_python else f"--arch {shlex.quote(text)}"


def _torchvision(name: str) -> Callable[..., object]:
    from torchvision.models import get_model_builder, list_models

    if name not in list_models():
        raise WrongArchitectureError(f"torchvision has no model {name!r}. {suggest(name, list_models())}")
    builder = get_model_builder(name)
    empty = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}

    def make(**arguments: Any) -> object:
        refuse_weights(TORCHVISION + name, arguments)
        return builder(**arguments, **empty)

    return make


def torchvision_meant(name: str) -> str:
    """Ask whether a model of torchvision was meant by its bare name; nothing if there is none of that name."""
    from torchvision.models import list_models

    return f" Did you mean {TORCHVISION}{name}?" if name.partition("?")[0] in list_models() else ""


def _timm(name: str) -> Callable[..., object]:
    timm = require_timm()
    if not timm.is_model(name):
        raise WrongArchitectureError(f"timm has no model {name!r}. {suggest(name, timm.list_models())}")

    def make(**arguments: Any) -> object:
        refuse_weights(TIMM + name, arguments)
        return timm.create_model(name, **arguments)

    return make


def refuse_weights(name: str, arguments: Collection[str]) -> None:
    """Refuse arguments with which an architecture would read or fetch weights by itself.

    Raises:
        WrongArchitectureError: naming the first, and how published weights are had.
    """
    wrong = next((key for key in arguments if key in _OF_WEIGHTS), None)
    if wrong is not None:
        raise WrongArchitectureError(
            f"{name} is an architecture here, whose weights come from a checkpoint, and not by {wrong}. The published "
            f"ones are a checkpoint by themselves: --model '{name}?weights=DEFAULT'"
        )


def require_timm() -> Any:
    """Import timm, of which most people need nothing.

    Raises:
        ArchitectureError: if it isn't installed, saying how it is.
    """
    try:
        import timm
        import timm.data
    except ImportError as error:
        raise ArchitectureError("models of timm need it; install it: pip install 'ewc-finetune[timm]'") from error
    return timm


def _text(value: object) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, tuple) else str(value)
