"""Variations of inputs: between two, or moved a little; and none of what they would make nonsense."""

import torch

from ewc_finetune.data.input_spec import InputSpec
from ewc_finetune.rehearsal.variations import varied


def draws():
    return torch.Generator().manual_seed(0)


def test_mixtures_lie_between_two():
    inputs = torch.tensor([[0.0, 10.0], [1.0, 20.0]], dtype=torch.float16)
    made = varied(inputs, InputSpec((2,), False, False), draws())
    assert made.shape == (16_384, 2)
    assert made.dtype == torch.float16
    torch.testing.assert_close(made[:, 1].float(), 10 + 10 * made[:, 0].float(), atol=0.02, rtol=0)
    assert made[:, 0].min() >= 0
    assert made[:, 0].max() <= 1
    assert made[:, 0].unique().numel() > 500


def test_half_of_the_images_are_moved_and_none_by_much():
    image = torch.zeros(2, 1, 28, 28, dtype=torch.uint8)
    image[:, :, 10:18, 10:18] = 200
    made = varied(image, InputSpec((1, 28, 28), False, True), draws())
    assert made.dtype == torch.uint8
    same = (made == image[0]).flatten(1).all(dim=1)  # a mixture of one and the same
    assert 0.49 < same.float().mean() < 0.51
    moved = made[~same].float()
    rows, columns = moved.sum(dim=3), moved.sum(dim=2)
    places = torch.arange(28.0)
    for mass in (rows, columns):
        centres = (mass * places).sum(dim=2) / mass.sum(dim=2)
        assert (centres - 13.5).abs().max() < 3  # two pixels, of an image that may be stretched
        assert centres.std() > 0.8
    area = moved.sum(dim=(1, 2, 3)) / image[0].sum()
    assert 0.6 < area.min() < 0.85
    assert 1.2 < area.max() < 1.6


def test_edges_go_on_where_nothing_is_left():
    bright = torch.full((2, 3, 32, 32), 255, dtype=torch.uint8)
    assert varied(bright, InputSpec((3, 32, 32), False, True), draws()).min() == 255


def test_small_images_are_mixed_alone():
    images = torch.eye(6).expand(2, 1, 6, 6)
    assert varied(images, InputSpec((1, 6, 6), False, False), draws()).equal(images[:1].expand(16_384, -1, -1, -1))


def test_large_inputs_are_no_more_than_fit():
    images = torch.zeros(2, 3, 1000, 1000, dtype=torch.uint8)
    images[:, :, 400:600, 400:600] = 200
    made = varied(images, InputSpec((3, 1000, 1000), False, True), draws())
    assert len(made) == (256 << 20) // 3_000_000
    moved = sum(not image.equal(images[0]) for image in made)
    assert 0.4 < moved / len(made) < 0.6


def test_tokens_and_single_inputs_have_none():
    spec = InputSpec((3,), False, False)
    assert varied(torch.ones(5, 3, dtype=torch.long), spec, draws()) is None
    assert varied({"input_ids": torch.ones(5, 3)}, spec, draws()) is None
    assert varied(torch.ones(1, 3), spec, draws()) is None
