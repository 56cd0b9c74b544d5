"""Variations of inputs: between two, or moved a little; and none of what they would make nonsense."""

import torch

from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.rehearsal.variations import varied


def draws():
    return torch.Generator().manual_seed(0)


def test_mixtures_lie_between_two():
    inputs = torch.tensor([[0.0, 10.0], [1.0, 20.0]], dtype=torch.float16)
    made = varied(inputs, InputSpec((2,), False, False), draws())
    assert made.shape == (4096, 2)
    assert made.dtype == torch.float16
    torch.testing.assert_close(made[:, 1].float(), 10 + 10 * made[:, 0].float(), atol=0.02, rtol=0)
    assert made[:, 0].min() >= 0
    assert made[:, 0].max() <= 1
    assert made[:, 0].unique().numel() > 500


def test_images_are_moved_and_their_edges_go_on():
    image = torch.arange(28 * 28).remainder(256).to(torch.uint8).view(1, 1, 28, 28).repeat(2, 1, 1, 1)
    made = varied(image, InputSpec((1, 28, 28), False, True), draws())
    assert made.dtype == torch.uint8
    assert made[:2048].equal(image[:1].expand(2048, -1, -1, -1))  # mixtures of one and the same
    inner = {(down, right) for down in range(5) for right in range(5)}
    seen = set()
    for moved in made[2048:2300]:
        seen |= {
            (down, right)
            for down, right in inner
            if moved[0, 2:-2, 2:-2].equal(image[0, 0, down : down + 24, right : right + 24])
        }
    assert seen == inner
    assert varied(image[:, :, :6, :6], InputSpec((1, 6, 6), False, True), draws()).shape[0] == 4096


def test_tokens_and_single_inputs_have_none():
    spec = InputSpec((3,), False, False)
    assert varied(torch.ones(5, 3, dtype=torch.long), spec, draws()) is None
    assert varied({"input_ids": torch.ones(5, 3)}, spec, draws()) is None
    assert varied(torch.ones(1, 3), spec, draws()) is None
