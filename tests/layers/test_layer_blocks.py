"""What works along a drafted block: DFlash2's convolution and selector, Domino's recurrence, XPress's refiner.

Failure modes this file exists to catch: rows before the block that count as something; one side's kernel used for the other; a group's
number spread over the wrong channels; a block shorter than the kernel; a candidate scored after another predecessor; gates of a recurrence
in another order; a correction on rows that are to keep their logits; a tensor that is missing, named wrongly.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from pytest_specdecode.errors import DraftError, LayerBuildError
from pytest_specdecode.layers.conv import GroupedDynamicConv
from pytest_specdecode.layers.linear import Linear
from pytest_specdecode.layers.prefix_gru import DominoHead, PrefixGRU
from pytest_specdecode.layers.refiner import Refiner
from pytest_specdecode.layers.selector import CandidateSelector

EXACT = {"rtol": 1e-11, "atol": 1e-12}


def named(layer, shapes, draw, build, attributes=None):
    """Each tensor that is missing, or of another shape, is named; and so is each projection."""
    tensors = {name: draw(*shape) for name, shape in shapes.items()}
    for name in shapes:
        for wrong in ({}, {name: draw(*shapes[name][:-1], shapes[name][-1] + 1)}):
            with pytest.raises(LayerBuildError) as caught:
                build({**{each: value for each, value in tensors.items() if each != name}, **wrong})
            assert (caught.value.key, caught.value.due) == (name, shapes[name])
        module = getattr(layer, (attributes or {}).get(name, name.removesuffix(".weight")))
        assert not isinstance(module, Linear) or module.name.endswith(name)


# --- convolution ---


def conv(draw, *, taps=3, group_size=2, hidden=6):
    shapes = {
        "base_kernel": (2, taps, hidden),
        "kernel_projection.weight": (2 * taps * (hidden // group_size), hidden),
    }
    tensors = {name: draw(*shape) for name, shape in shapes.items()}
    return GroupedDynamicConv(tensors, hidden_size=hidden, taps=taps, group_size=group_size), tensors, shapes


@pytest.mark.parametrize("rows", [1, 3, 5])
@pytest.mark.parametrize(("taps", "group_size"), [(3, 2), (1, 1), (6, 6), (8, 3)])
def test_a_convolution_channel_by_channel(taps, group_size, rows, draw):
    layer, tensors, _ = conv(draw, taps=taps, group_size=group_size)
    x, y = draw(rows, 6), draw(rows, 6)
    groups = 6 // group_size
    delta = (x @ tensors["kernel_projection.weight"].T).view(rows, 2, taps, groups)
    due = [torch.zeros(rows, 6, dtype=torch.float64) for _ in range(2)]
    for side, given in enumerate((x, y)):
        for row in range(rows):
            for tap in range(min(taps, row + 1)):
                for channel in range(6):
                    kernel = tensors["base_kernel"][side, tap, channel] + delta[row, side, tap, channel // group_size]
                    due[side][row, channel] += kernel * given[row - tap, channel]
    before, kernels = layer.prepare(x)
    torch.testing.assert_close(before, due[0], **EXACT)
    torch.testing.assert_close(layer.finish(y, kernels), due[1], **EXACT)
    batch, kernels = layer.prepare(torch.stack([x, y]))
    torch.testing.assert_close(batch[0], due[0], **EXACT)
    assert kernels.shape == (2, rows, taps, groups)


@pytest.mark.parametrize(("taps", "group_size"), [(0, 2), (-1, 2), (3, 0), (3, -1), (3, 4)])
def test_taps_and_groups_that_make_no_convolution(taps, group_size):
    with pytest.raises(LayerBuildError) as caught:
        GroupedDynamicConv({}, hidden_size=6, taps=taps, group_size=group_size)
    assert (caught.value.got, caught.value.due) == (group_size, "a divisor of 6")


def test_a_convolution_names_its_tensors(draw):
    layer, _, shapes = conv(draw)
    named(layer, shapes, draw, lambda tensors: GroupedDynamicConv(tensors, hidden_size=6, taps=3, group_size=2))


def test_kernels_of_another_number_of_rows(draw):
    layer, _, _ = conv(draw)
    with pytest.raises(DraftError) as caught:
        layer.finish(draw(4, 6), draw(5, 3, 3))
    assert (caught.value.key, caught.value.got) == ("kernels", (5, 3, 3))


# --- selector ---


def test_a_selector_goes_greedily_along_the_block(draw):
    shapes = {"predecessor_codebook": (7, 3), "successor_codebook": (7, 3), "hidden_projection.weight": (3, 5)}
    tensors = {name: draw(*shape, scale=2.0) for name, shape in shapes.items()}
    layer = CandidateSelector(tensors, hidden_size=5, vocab_size=7, rank=3, top_k=3)
    logits, hidden, anchors = draw(2, 4, 7), draw(2, 4, 5), torch.tensor([6, 2])
    due, moved = [], 0
    for batch in range(2):
        previous = int(anchors[batch])
        for row in range(4):
            best = sorted(range(7), key=lambda token: -float(logits[batch, row, token]))[:3]
            context = tensors["predecessor_codebook"][previous] * (
                tensors["hidden_projection.weight"] @ hidden[batch, row]
            )
            score = {c: float(logits[batch, row, c] + context @ tensors["successor_codebook"][c]) for c in best}
            previous = max(score, key=score.__getitem__)
            moved += previous != best[0]
            due.append(previous)
    assert moved > 2
    assert layer(logits, hidden, anchors).flatten().tolist() == due
    assert layer(logits[0], hidden[0], anchors[0]).tolist() == due[:4]
    named(layer, shapes, draw, lambda given: CandidateSelector(given, hidden_size=5, vocab_size=7, rank=3, top_k=3))


# --- recurrence ---

GRU = {"weight_ih_l0": (12, 3), "weight_hh_l0": (12, 4)}


def gru(draw):
    tensors = {name: draw(*shape) for name, shape in GRU.items()}
    return PrefixGRU(tensors, in_features=3, hidden=4), tensors


def test_a_recurrence_is_torchs(draw):
    layer, tensors = gru(draw)
    theirs = torch.nn.GRU(3, 4, bias=False, batch_first=True).double()
    theirs.load_state_dict(tensors)
    inputs = draw(2, 5, 3)
    torch.testing.assert_close(layer(inputs), theirs(inputs)[0], **EXACT)
    torch.testing.assert_close(layer(inputs[0]), theirs(inputs)[0][0], **EXACT)
    attributes = {"weight_ih_l0": "ih", "weight_hh_l0": "hh"}
    named(layer, GRU, draw, lambda given: PrefixGRU(given, in_features=3, hidden=4), attributes)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("shift", [True, False])
def test_a_correction_from_the_tokens_before_a_row(shift, prefix, draw):
    recurrence, _ = gru(draw)
    shapes = {"0.weight": (5, 7), "2.weight": (6, 5)}
    projection = {name: draw(*shape) for name, shape in shapes.items()}

    def build(given):
        return DominoHead(
            recurrence, given, hidden_size=3, emb_dim=5, rows=6, shift_label=shift, pure_draft_prefix_len=prefix
        )

    layer = build(projection)
    logits, hidden, embeddings = draw(2, 4, 6), draw(2, 4, 3), draw(2, 4, 3)
    states, due = recurrence(embeddings), logits.clone()
    for row in range(4):
        # Shifted, row r drafts what follows position r, which the state has seen; else the token at r, which it must not see.
        if row < prefix + (0 if shift else 1):
            continue
        seen = states[:, row if shift else row - 1]
        inner = F.silu(torch.cat([hidden[:, row], seen], dim=-1) @ projection["0.weight"].T)
        due[:, row] += inner @ projection["2.weight"].T
    torch.testing.assert_close(layer(logits, hidden, embeddings), due, **EXACT)
    with pytest.raises(DraftError) as caught:
        layer(logits, hidden, embeddings[:, :3])
    assert (caught.value.key, caught.value.got, caught.value.due) == ("embeddings", (2, 3, 3), (2, 4, 3))
    named(layer, shapes, draw, build, {"0.weight": "down", "2.weight": "up"})


# --- refiner ---

SIZES = {"hidden_size": 5, "vocab_size": 9, "rows": 7, "rank": 3, "inner": 4, "block_size": 4}
REFINER = {
    "token_embed.weight": (9, 3), "down_h.weight": (3, 5), "down_g.weight": (3, 5), "in_proj.weight": (3, 9), "mix_l": (3, 4, 4),
    "mlp_gate.weight": (4, 3), "mlp_up.weight": (4, 3), "mlp_down.weight": (3, 4), "readout.weight": (7, 3),
}  # fmt: skip


def refiner(draw, scale=0.8):
    tensors = {name: draw(*shape, scale=scale) for name, shape in REFINER.items()}
    return Refiner(tensors, **SIZES), tensors


def bias_by_hand(tensors, hidden, previous):
    """Row by row and lane by lane, of one block."""
    weight = {name.removesuffix(".weight"): value for name, value in tensors.items()}
    mean = sum(hidden) / len(hidden)
    rows = [
        weight["in_proj"] @ torch.cat([weight["down_h"] @ h, weight["down_g"] @ mean, weight["token_embed"][p]])
        for h, p in zip(hidden, previous.tolist(), strict=True)
    ]
    mixed = [
        row + torch.stack([sum(weight["mix_l"][c, k, j] * rows[j][c] for j in range(k + 1)) for c in range(3)])
        for k, row in enumerate(rows)
    ]
    out = [x + weight["mlp_down"] @ (F.silu(weight["mlp_gate"] @ x) * (weight["mlp_up"] @ x)) for x in mixed]
    return torch.stack([weight["readout"] @ x for x in out])


def test_a_refiner_row_by_row(draw):
    layer, tensors = refiner(draw)
    hidden, previous = draw(2, 4, 5), torch.tensor([[0, 8, 3, 3], [1, 2, 5, 0]])
    due = torch.stack([bias_by_hand(tensors, hidden[batch], previous[batch]) for batch in range(2)])
    torch.testing.assert_close(layer(hidden, previous), due, **EXACT)
    named(layer, REFINER, draw, lambda given: Refiner(given, **SIZES))
    assert layer.block_size == 4


@pytest.mark.parametrize("anchored", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_rounds_are_conditioned_on_the_round_before(rounds, mapped, anchored, draw):
    layer, tensors = refiner(draw, scale=1.5)
    logits, hidden = draw(2, 4, 7), draw(2, 4, 5)
    anchor, before = torch.tensor([4, 6]), torch.tensor([1, 8])
    d2t = torch.tensor([0, 1, 0, 2, 1, 2, 2]) if mapped else None
    due = []
    for batch in range(2):
        refined = logits[batch]
        for _ in range(rounds):
            best = [int(row.argmax()) for row in refined]
            best = [token + int(d2t[token]) for token in best] if mapped else best
            head = [int(anchor[batch])] if anchored else [int(before[batch]), int(anchor[batch])]
            previous = (head + (best if anchored else best[1:]))[:4]
            refined = logits[batch] + bias_by_hand(tensors, hidden[batch], torch.tensor(previous))
        due.append(refined)
    got = layer.draft(logits, hidden, anchor, before, rounds=rounds, sample_from_anchor=anchored, d2t=d2t)
    torch.testing.assert_close(got, torch.stack(due), **EXACT)


def test_a_block_of_one_row_has_the_token_before_the_anchor(draw):
    sizes = {**SIZES, "block_size": 1}
    tensors = {name: draw(*shape) for name, shape in {**REFINER, "mix_l": (3, 1, 1)}.items()}
    layer = Refiner(tensors, **sizes)
    logits, hidden = draw(1, 7), draw(1, 5)
    got = layer.draft(logits, hidden, torch.tensor(4), torch.tensor(1), rounds=1)
    torch.testing.assert_close(got, logits + bias_by_hand(tensors, hidden, torch.tensor([1])), **EXACT)
    assert math.isfinite(float(got.sum()))
