"""The mixture of experts: routing worked out by hand, the rest against a sum written out.

What these catch: a bias that weighs as well as chooses; groups ranked by their best expert where the best two count; weights divided after
they are scaled, or not at all; an expert's output given to another row; joined experts split the wrong way round; a weight on an expert's
output where it is due on its input; a router, or a shared expert, that reads the latent. The same against transformers' DeepSeek-V3,
Llama 4 and Nemotron-H is in `tests/peers/`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pytest_specdecode.errors import LayerBuildError
from pytest_specdecode.layers import MoE
from pytest_specdecode.spec import MoESpec

HIDDEN, INNER, EXPERTS = 4, 3, 4
SPEC: dict[str, Any] = {"num_experts": EXPERTS, "top_k": 2, "intermediate_size": INNER}


def tensors(*, shared: str | None = None, bias: Tensor | None = None) -> dict[str, Tensor]:
    """Random experts under a gate that is the identity: the logits of a row are its own entries."""
    generator = torch.Generator().manual_seed(7)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    found = {"gate.weight": torch.eye(EXPERTS, dtype=torch.float64)}
    for stem in (*(f"experts.{index}" for index in range(EXPERTS)), *([shared] if shared else [])):
        found |= {f"{stem}.{name}_proj.weight": drawn(INNER, HIDDEN) for name in ("gate", "up")}
        found[f"{stem}.down_proj.weight"] = drawn(HIDDEN, INNER)
    if shared == "shared_expert":
        found["shared_expert_gate.weight"] = drawn(1, HIDDEN)
    if bias is not None:
        found["gate.e_score_correction_bias"] = bias
    return found


def expert(held: dict[str, Tensor], stem: str, x: Tensor) -> Tensor:
    gate, up = (x @ held[f"{stem}.{name}_proj.weight"].T for name in ("gate", "up"))
    return (gate * gate.sigmoid() * up) @ held[f"{stem}.down_proj.weight"].T


def routed(x: list[float], **fields: Any) -> dict[int, float]:
    bias = fields.pop("bias", None)
    held = tensors(bias=None if bias is None else torch.tensor(bias, dtype=torch.float64))
    layer = MoE(MoESpec(**{**SPEC, **fields}, correction_bias=bias is not None), held, hidden_size=HIDDEN)
    weights, ids = layer.route(torch.tensor([x], dtype=torch.float64))
    return dict(zip(ids[0].tolist(), weights[0].tolist(), strict=True))


SIGMOID = {0.0: 0.5, 1.0: 0.7310585786300049, 2.0: 0.8807970779778823, -1.0: 0.2689414213699951}


def test_softmax_weights_are_those_over_all_experts() -> None:
    total = sum(2.718281828459045**value for value in (0.0, 1.0, 2.0, -1.0))
    assert routed([0.0, 1.0, 2.0, -1.0]) == pytest.approx(
        {2: 2.718281828459045**2 / total, 1: 2.718281828459045 / total}
    )


def test_weights_are_divided_by_their_sum_and_then_scaled() -> None:
    total = SIGMOID[2.0] + SIGMOID[1.0]
    due = {2: 2.5 * SIGMOID[2.0] / total, 1: 2.5 * SIGMOID[1.0] / total}
    found = routed([0.0, 1.0, 2.0, -1.0], scoring="sigmoid", norm_topk_prob=True, routed_scaling_factor=2.5)
    assert found == pytest.approx(due, rel=1e-12)


def test_the_root_of_softplus_scores_each_expert_by_itself() -> None:
    # sqrt(ln(1 + e^x)) at 2, 1 and -1.
    second, first, last = 1.4583991261115636, 1.145976303209723, 0.5596978537731075
    found = routed([0.0, 1.0, 2.0, -1.0], scoring="sqrtsoftplus")
    assert found == pytest.approx({2: second, 1: first}, rel=1e-12)
    # The bias chooses expert 3 in the place of expert 1.
    found = routed([0.0, 1.0, 2.0, -1.0], scoring="sqrtsoftplus", bias=[0.0, 0.0, 0.0, 5.0], norm_topk_prob=True)
    assert found == pytest.approx({2: second / (second + last), 3: last / (second + last)}, rel=1e-12)


def test_the_bias_chooses_and_does_not_weigh() -> None:
    found = routed([0.0, 1.0, 2.0, -1.0], scoring="sigmoid", bias=[0.0, 0.0, 0.0, 9.0])
    assert found == pytest.approx({3: SIGMOID[-1.0], 2: SIGMOID[2.0]}, rel=1e-12)


def test_groups_are_ranked_by_their_best_two_with_a_bias_and_by_their_best_without() -> None:
    # Experts 0 and 1 are good together, expert 2 is best alone.
    row, fields = [1.0, 1.0, 2.0, -9.0], {"scoring": "sigmoid", "n_group": 2, "topk_group": 1}
    assert set(routed(row, **fields, bias=[0.0] * 4)) == {0, 1}
    assert set(routed(row, **fields)) == {2, 3}


@pytest.mark.parametrize("shared", [None, "shared_experts", "shared_expert"])
@pytest.mark.parametrize("fused", [True, False])
def test_the_output_is_the_weighted_sum_of_the_experts(shared: str | None, fused: bool) -> None:
    held = tensors(shared=shared)
    given = dict(held)
    if fused:
        for index in range(EXPERTS):
            for name in ("gate", "up", "down"):
                del given[f"experts.{index}.{name}_proj.weight"]
        halves = [[held[f"experts.{index}.{name}_proj.weight"] for name in ("gate", "up")] for index in range(EXPERTS)]
        given["experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in halves])
        given["experts.down_proj"] = torch.stack(
            [held[f"experts.{index}.down_proj.weight"] for index in range(EXPERTS)]
        )
    spec = MoESpec(
        **SPEC,
        shared_intermediate_size=INNER if shared else None,
        shared_gate=shared == "shared_expert",
        fused_experts=fused,
    )
    layer = MoE(spec, given, hidden_size=HIDDEN)
    x = torch.randn(3, 5, HIDDEN, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    scores = x.softmax(dim=-1)
    kept = scores * (scores >= scores.topk(2, dim=-1).values[..., -1:])
    due = sum(kept[..., index : index + 1] * expert(held, f"experts.{index}", x) for index in range(EXPERTS))
    if shared is not None:
        output = expert(held, shared, x)
        due = due + (
            output if shared == "shared_experts" else (x @ held["shared_expert_gate.weight"].T).sigmoid() * output
        )
    torch.testing.assert_close(layer(x), due, rtol=1e-12, atol=1e-12)


def test_weighing_the_input_is_another_function() -> None:
    held = tensors()
    spec = MoESpec(**{**SPEC, "top_k": 1}, scoring="sigmoid", weigh_inputs=True)
    layer = MoE(spec, held, hidden_size=HIDDEN)
    x = torch.tensor([[0.0, 1.0, 2.0, -1.0]], dtype=torch.float64)
    # The gate is the identity, so expert 2 is chosen with the weight sigmoid(2).
    torch.testing.assert_close(layer(x), expert(held, "experts.2", SIGMOID[2.0] * x), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(layer(x), SIGMOID[2.0] * expert(held, "experts.2", x), rtol=1e-3)


def test_plain_experts_in_a_latent_space() -> None:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    generator, latent = torch.Generator().manual_seed(7), 5
    held = {"gate.weight": torch.eye(EXPERTS, dtype=torch.float64)}
    held |= {"fc1_latent_proj.weight": drawn(latent, HIDDEN), "fc2_latent_proj.weight": drawn(HIDDEN, latent)}
    for stem, width in (*((f"experts.{index}", latent) for index in range(EXPERTS)), ("shared_experts", HIDDEN)):
        held |= {f"{stem}.up_proj.weight": drawn(INNER, width), f"{stem}.down_proj.weight": drawn(width, INNER)}
    fields = {"latent": True, "latent_size": latent, "gated": False, "shared_intermediate_size": INNER}
    spec = MoESpec(**{**SPEC, "top_k": 1}, scoring="sigmoid", **fields)
    layer = MoE(spec, held, hidden_size=HIDDEN, hidden_act="relu2")
    x = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)

    def run(stem: str, x: Tensor) -> Tensor:
        return held[f"{stem}.down_proj.weight"] @ (held[f"{stem}.up_proj.weight"] @ x).clamp(min=0) ** 2

    routed = SIGMOID[2.0] * run("experts.2", held["fc1_latent_proj.weight"] @ x)
    due = held["fc2_latent_proj.weight"] @ routed + run("shared_experts", x)
    torch.testing.assert_close(layer(x[None])[0], due, rtol=1e-12, atol=1e-12)
    for name, due_key in (("fc2_latent_proj.weight",) * 2, ("experts.3.up_proj.weight",) * 2):
        with pytest.raises(LayerBuildError) as caught:
            MoE(spec, {key: value for key, value in held.items() if key != name}, hidden_size=HIDDEN)
        assert caught.value.key == due_key


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"latent": True}, "moe_latent_size"),
        ({"num_experts": None}, "num_experts"),
        ({"top_k": 0}, "num_experts_per_tok"),
        ({"top_k": 5}, "num_experts_per_tok"),
        ({"n_group": 3}, "n_group"),
        ({"n_group": 2, "topk_group": 3}, "n_group"),
        ({"n_group": 4, "topk_group": 1}, "num_experts_per_tok"),
        ({"correction_bias": True}, "gate.e_score_correction_bias"),
        ({"intermediate_size": 5}, "experts.0.gate_proj.weight"),
        ({"fused_experts": True}, "experts.gate_up_proj"),
        ({"shared_intermediate_size": 3}, "shared_experts.gate_proj.weight"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, Any], key: str) -> None:
    with pytest.raises(LayerBuildError) as caught:
        MoE(MoESpec(**{**SPEC, **fields}), tensors(), hidden_size=HIDDEN)
    assert caught.value.key == key


def test_scores_next_to_nothing_are_not_blown_up() -> None:
    # sigmoid(-69) = 1.08e-30 is nothing beside the 1e-20 that keeps the sum from zero.
    score = 1 / (1 + 2.718281828459045**69)
    found = routed([-69.0] * 4, scoring="sigmoid", norm_topk_prob=True)
    assert list(found.values()) == pytest.approx([score / 1e-20] * 2, rel=1e-6)


def test_each_row_has_weights_of_its_own() -> None:
    rows = [[0.0, 1.0, 2.0, -1.0], [3.0, 0.0, 0.5, 0.25], [0.0, 0.0, 0.0, 4.0]]
    layer = MoE(MoESpec(**{**SPEC, "norm_topk_prob": True}), tensors(), hidden_size=HIDDEN)
    weights, ids = layer.route(torch.tensor(rows, dtype=torch.float64))
    for index, row in enumerate(rows):
        alone = routed(row, norm_topk_prob=True)
        assert dict(zip(ids[index].tolist(), weights[index].tolist(), strict=True)) == pytest.approx(alone)


@pytest.mark.parametrize("bias", [True, False])
def test_groups_of_several_experts_row_by_row(bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    held = {"gate.weight": torch.eye(12, dtype=torch.float64)}
    held["experts.gate_up_proj"] = torch.zeros(12, 2, 12, dtype=torch.float64)
    held["experts.down_proj"] = torch.zeros(12, 12, 1, dtype=torch.float64)
    correction = torch.randn(12, generator=generator, dtype=torch.float64) * 0.2
    if bias:
        held["gate.e_score_correction_bias"] = correction
    spec = MoESpec(
        num_experts=12, top_k=3, intermediate_size=1, n_group=3, topk_group=2, scoring="sigmoid", correction_bias=bias,
        fused_experts=True,
    )  # fmt: skip
    layer = MoE(spec, held, hidden_size=12)
    x = torch.randn(2, 20, 12, generator=generator, dtype=torch.float64)
    _, ids = layer.route(x)
    for row, chosen in zip(x.flatten(0, 1).tolist(), ids.flatten(0, 1).tolist(), strict=True):
        scores = [1 / (1 + 2.718281828459045**-value) for value in row]
        scores = [score + float(extra) for score, extra in zip(scores, correction, strict=True)] if bias else scores
        groups = [sorted(scores[start : start + 4], reverse=True)[: 2 if bias else 1] for start in (0, 4, 8)]
        best = sorted(range(3), key=lambda group: -sum(groups[group]))[:2]
        due = sorted((each for each in range(12) if each // 4 in best), key=lambda each: -scores[each])[:3]
        assert chosen == due


def test_a_tensor_outside_the_experts_is_none_of_theirs() -> None:
    held, x = tensors(), torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    stray = {"up_proj.weight": torch.zeros(INNER, HIDDEN, dtype=torch.float64)}
    alone, beside = (MoE(MoESpec(**SPEC), given, hidden_size=HIDDEN) for given in (held, held | stray))
    assert torch.equal(alone(x), beside(x))
