import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from ewc_finetune.checkpoint.builtin_models import CNN, MLP
from ewc_finetune.data.domain import as_domain
from ewc_finetune.data.input_spec import InputSpec, find_input_spec
from ewc_finetune.errors import DataError
from ewc_finetune.likelihood.categorical import Categorical

CPU = torch.device("cpu")


def logits(outputs):
    Categorical().check_outputs(outputs, "here")


IMAGES = as_domain(
    TensorDataset(torch.full((3, 1, 8, 8), 255, dtype=torch.uint8), torch.zeros(3, dtype=torch.long)), "pictures"
)


def test_an_image_goes_flat_into_a_flat_network_and_as_it_is_into_another():
    assert find_input_spec(MLP(64, 5), IMAGES, CPU, logits) == (
        InputSpec((1, 8, 8), flat=True, bytes_to_unit=True),
        (10,),
    )
    assert find_input_spec(CNN(1, 8), IMAGES, CPU, logits) == (
        InputSpec((1, 8, 8), flat=False, bytes_to_unit=True),
        (10,),
    )


def test_a_network_that_takes_the_last_dimension_of_anything_still_wants_it_flat():
    square = as_domain([(torch.zeros(2, 1, 1, 8), torch.zeros(2))], "rows")
    assert find_input_spec(nn.Sequential(nn.Linear(8, 3)), square, CPU, logits)[0].flat


def test_presenting():
    input_spec = InputSpec((1, 8, 8), flat=True, bytes_to_unit=True)
    presented = input_spec.present(next(IMAGES.batches(3))[0], torch.float32)
    assert torch.equal(presented, torch.ones(3, 64))
    assert input_spec.present(torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.bfloat16).dtype == torch.bfloat16
    assert InputSpec((3,), False, False).present(torch.zeros(2, 3).double(), torch.float32).dtype == torch.float32
    assert InputSpec((3,), False, False).present(torch.zeros(2, 3).long(), torch.float32).dtype == torch.long
    assert input_spec.describe() == "1 x 8 x 8, scaled from 0..255 to 0..1, flattened to 64 values"


def test_finding_leaves_the_model_as_it_was():
    model = MLP(64, 5).train()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    find_input_spec(model, IMAGES, CPU, logits)
    assert model.training
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_what_does_not_fit_is_named():
    with pytest.raises(DataError, match=r"pictures: a sample of shape 1 x 8 x 8 does not go into the model .*shapes"):
        find_input_spec(MLP(65, 5), IMAGES, CPU, logits)
    recorded = InputSpec((1, 28, 28), True, True).to_json()
    with pytest.raises(DataError, match=r"shape 1 x 8 x 8; the model takes 1 x 28 x 28\. .*size=28x28&channels=1"):
        find_input_spec(MLP(), IMAGES, CPU, logits, recorded)
    assert find_input_spec(MLP(64, 5), IMAGES, CPU, logits, InputSpec((1, 8, 8), True, True).to_json())[0].flat


class Two(nn.Module):
    def forward(self, left, right):
        return left @ right.mT


def test_a_model_of_several_inputs_says_how_they_are_given():
    one = as_domain([torch.ones(3, 2)])
    with pytest.raises(
        DataError, match=r"Its forward takes left, right: give a dictionary .*npz:FILE\?inputs=left,right"
    ):
        find_input_spec(Two(), one, CPU, logits)
    both = as_domain([{"left": torch.ones(3, 2), "right": torch.ones(4, 2)[:3]}])
    spec, outputs = find_input_spec(Two(), both, CPU, logits)
    assert (spec.names, outputs) == ({"left": (2,), "right": (2,)}, (1,))
    recorded = spec.to_json()
    with pytest.raises(DataError, match=r"its samples are a single tensor, and the model takes left, right by name"):
        find_input_spec(Two(), one, CPU, logits, recorded)
    other = as_domain([{"left": torch.ones(3, 2), "wrong": torch.ones(3, 2)}])
    with pytest.raises(
        DataError, match=r"dictionaries of left, wrong, and the model takes left, right .*inputs=left,ri"
    ):
        find_input_spec(Two(), other, CPU, logits, recorded)
    with pytest.raises(
        DataError, match=r"samples are a dictionary of left \(2\), right \(2\); the model takes 1 x 8 x 8"
    ):
        find_input_spec(MLP(64, 5), both, CPU, logits, InputSpec((1, 8, 8), True, True).to_json())
