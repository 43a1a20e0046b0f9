"""The gated MLP, the plain one and the frozen linear map under every layer.

What these catch: gate and up exchanged, in the product or in a joined tensor; another activation than the one named,
the exact GELU for the tanh one in particular; a bias that is dropped or added where none is due; shapes that broadcast
into something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers import GatedMLP, Linear, PlainMLP

ERF_HALF = 0.5 * (1 + math.erf(1 / math.sqrt(2)))
TANH = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))


def one(value: float) -> Tensor:
    return torch.tensor([[value]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("name", "at_one", "at_minus_one"),
    [
        ("silu", 1 / (1 + math.exp(-1)), -1 / (1 + math.exp(1))),
        ("swish", 1 / (1 + math.exp(-1)), -1 / (1 + math.exp(1))),
        ("gelu", ERF_HALF, ERF_HALF - 1),
        ("gelu_tanh", TANH, TANH - 1),
        ("gelu_pytorch_tanh", TANH, TANH - 1),
        ("gelu_new", TANH, TANH - 1),
        ("relu", 1.0, 0.0),
    ],
)
def test_activations_by_hand(name: str, at_one: float, at_minus_one: float) -> None:
    mlp = GatedMLP(one(1.0), one(3.0), one(0.5), name)
    assert mlp(one(1.0)).item() == pytest.approx(at_one * 3 * 0.5, rel=1e-14)
    assert mlp(one(-1.0)).item() == pytest.approx(at_minus_one * -3 * 0.5, rel=1e-14)


def test_biases_by_hand() -> None:
    biases = {"gate_proj": torch.tensor([2.0]).double(), "up_proj": torch.tensor([5.0]).double()}
    mlp = GatedMLP(one(1.0), one(3.0), one(0.5), "relu", {**biases, "down_proj": torch.tensor([7.0]).double()})
    assert mlp(one(1.0)).item() == 0.5 * (3 * 8) + 7
    assert GatedMLP(one(1.0), one(3.0), one(0.5), "relu", biases)(one(1.0)).item() == 12.0


def draws() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(5)
    return lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)


def test_a_limit_bounds_the_gate_from_above_and_up_from_both_sides() -> None:
    gate, up, down = torch.tensor([[1.0], [1.0]]), torch.tensor([[1.0], [-1.0]]), torch.eye(2)
    mlp = GatedMLP(gate, up, down, "relu", limit=2.0)
    torch.testing.assert_close(mlp(torch.tensor([3.0])), torch.tensor([4.0, -4.0]))
    torch.testing.assert_close(mlp(torch.tensor([1.0])), torch.tensor([1.0, -1.0]))
    smooth = GatedMLP(gate, up, down, "silu", limit=2.0)
    # The gate has no bound from below: silu(-3), times up at -2 and 2.
    torch.testing.assert_close(smooth(torch.tensor([-3.0])), torch.tensor([0.2845552, -0.2845552]))


@pytest.mark.parametrize("bias", [False, True], ids=["no-bias", "bias"])
def test_joined_and_separate_tensors_are_one(bias: bool) -> None:
    draw = draws()
    gate, up, down = draw(7, 4), draw(7, 4), draw(3, 7)
    separate = {"gate_proj.weight": gate, "up_proj.weight": up, "down_proj.weight": down}
    joined = {"gate_up_proj.weight": torch.cat([gate, up]), "down_proj.weight": down}
    if bias:
        biases = {"gate_proj.bias": draw(7), "up_proj.bias": draw(7), "down_proj.bias": draw(3)}
        separate |= biases
        joined["gate_up_proj.bias"] = torch.cat([biases["gate_proj.bias"], biases["up_proj.bias"]])
        joined["down_proj.bias"] = biases["down_proj.bias"]
    sizes = {"in_features": 4, "intermediate_size": 7, "out_features": 3, "bias": bias}
    one, other = (GatedMLP.from_tensors(tensors, **sizes) for tensors in (separate, joined))
    x = draw(2, 5, 4)
    assert one(x).shape == (2, 5, 3)
    assert torch.equal(one(x), other(x))
    inner = torch.nn.functional.silu(x @ gate.T + (biases["gate_proj.bias"] if bias else 0.0))
    inner = inner * (x @ up.T + (biases["up_proj.bias"] if bias else 0.0))
    due = inner @ down.T + (biases["down_proj.bias"] if bias else 0.0)
    torch.testing.assert_close(one(x), due, rtol=1e-12, atol=1e-12)
    assert not any(parameter.requires_grad for parameter in one.parameters())


@pytest.mark.parametrize(
    ("change", "key", "text"),
    [
        ({"hidden_act": "silue"}, "hidden_act", "unknown activation 'silue'; known: gelu, "),
        ({"up_proj.weight": torch.zeros(4, 4)}, "up_proj.weight", "has shape [4, 4]; due is [7, 4]"),
        ({"down_proj.weight": torch.zeros(7, 4)}, "down_proj.weight", "has shape [7, 4]; due is [4, 7]"),
        ({"gate_up_proj.weight": torch.zeros(7, 4)}, "gate_up_proj.weight", "due is [14, 4]"),
        ({"up_proj.bias": torch.zeros(7)}, "up_proj.bias", "is a bias where the spec says there is none"),
        ({"gate_up_proj.bias": torch.zeros(14)}, "gate_up_proj.bias", "is a bias where the spec says there is none"),
        ({"bias": True}, "gate_proj.bias", "is missing; a tensor of shape [7] is due"),
    ],
)
def test_what_cannot_be_built(change: dict[str, object], key: str, text: str) -> None:
    tensors = {"gate_proj.weight": torch.zeros(7, 4), "up_proj.weight": torch.zeros(7, 4)}
    tensors["down_proj.weight"] = torch.zeros(4, 7)
    options = {name: change[name] for name in change if "." not in name}
    tensors |= {name: change[name] for name in change if "." in name}
    with pytest.raises(LayerBuildError) as caught:
        GatedMLP.from_tensors(tensors, in_features=4, intermediate_size=7, **options)
    assert caught.value.key == key
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("up", "down", "biases", "text"),
    [
        (torch.zeros(1, 4), torch.zeros(4, 7), {}, "up_proj.weight: has shape [1, 4]; due is [7, 4]"),
        (torch.zeros(7, 4), torch.zeros(4, 1), {}, "down_proj.weight: has shape [4, 1]; due is [4, 7]"),
        (torch.zeros(7, 4), torch.zeros(4, 7), {"gate": torch.zeros(7)}, "biases of unknown projections: gate"),
        (torch.zeros(7, 4), torch.zeros(4, 7), {"gate_proj": torch.zeros(1)}, "the bias has shape [1]; due is [7]"),
    ],
)
def test_shapes_that_do_not_chain(up: Tensor, down: Tensor, biases: dict[str, Tensor], text: str) -> None:
    with pytest.raises(LayerBuildError) as caught:
        GatedMLP(torch.zeros(7, 4), up, down, "silu", biases)
    assert text in str(caught.value)


def test_the_plain_mlp_squares_what_is_above_0() -> None:
    tensors = {"up_proj.weight": torch.tensor([[3.0], [-2.0]]), "down_proj.weight": torch.tensor([[10.0, 100.0]])}
    layer = PlainMLP(tensors, in_features=1, intermediate_size=2)
    # 3 squared ten times, and nothing of -2; for -1 it is 2 squared a hundred times.
    assert layer(torch.tensor([[1.0], [-1.0]])).tolist() == [[90.0], [400.0]]
    with pytest.raises(LayerBuildError, match="unknown activation 'relu3'"):
        PlainMLP(tensors, in_features=1, intermediate_size=2, hidden_act="relu3")
    with pytest.raises(LayerBuildError, match=r"down_proj\.weight: is missing"):
        PlainMLP({"up_proj.weight": torch.ones(2, 1)}, in_features=1, intermediate_size=2)


def test_linear_refuses_what_torch_would_explain_badly() -> None:
    linear = Linear(torch.ones(2, 3), name="fc.weight")
    with pytest.raises(DraftError, match=r"fc.weight: reads 3 features; the input has 4"):
        linear(torch.ones(1, 4))
    with pytest.raises(DraftError, match=r"fc.weight: is float32; the input is bfloat16"):
        linear(torch.ones(1, 3).bfloat16())
    with pytest.raises(LayerBuildError, match=r"fc.weight: has shape \[3\]; a projection is \[out, in\]"):
        Linear(torch.ones(3), name="fc.weight")
    with pytest.raises(LayerBuildError, match=r"fc.weight: is int8; layers compute in float16, bfloat16"):
        Linear(torch.ones(2, 3, dtype=torch.int8), name="fc.weight")


def test_linear_shares_the_checkpoints_memory() -> None:
    weight = torch.ones(2, 3)
    assert Linear(weight).weight.data_ptr() == weight.data_ptr()
