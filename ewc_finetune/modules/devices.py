"""Choosing the device to compute on, and borrowing its random state."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from ewc_finetune.errors import DeviceError


def choose_device(name: str | torch.device) -> torch.device:
    """Turn a name into a device; `auto` is the first there is of cuda, mps, cpu.

    Raises:
        DeviceError: if the device is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("--device cuda: this torch finds no CUDA device. Use --device cpu, or auto")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("--device mps: this torch finds no Apple GPU. Use --device cpu, or auto")
    return device


@contextlib.contextmanager
def on_device(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Have the model on the device inside the block, and back where it was after it."""
    home = next((p.device for p in model.parameters()), device)
    model.to(device)
    try:
        yield
    finally:
        model.to(home)


@contextlib.contextmanager
def random_state_kept(device: torch.device, seed: int | None = None) -> Iterator[None]:
    """Put torch's random state back after the block (on the CPU and a cuda `device`).

    Inside it, start from `seed` if one is given; other devices are not touched.
    """
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        if seed is not None:
            torch.default_generator.manual_seed(seed)
            if device.type == "cuda":
                torch.cuda.manual_seed(seed)
            elif device.type == "mps":
                torch.mps.manual_seed(seed)
        yield


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the state of torch's generators on the CPU and, if it is another, on the device."""
    states = [torch.get_rng_state()]
    if device.type == "cuda":
        states.append(torch.cuda.get_rng_state(device))
    elif device.type == "mps":
        states.append(torch.mps.get_rng_state())
    return states


def set_random_state(states: Sequence[torch.Tensor], device: torch.device) -> None:
    """Put torch's generators into a state that `random_state` gave; one of another kind of device stays as it is."""
    torch.set_rng_state(states[0])
    if len(states) == 1:
        return
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
    elif device.type == "mps":
        torch.mps.set_rng_state(states[1])


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out; off CUDA, torch raises no class of its own for it."""
    told = ("not enough memory", "can't allocate memory", "Cannot allocate memory", "out of memory")
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in told)
    )
