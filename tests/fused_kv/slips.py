"""Slips that a hand could make in the kernels: each an edit of their source, by what is wrong then.

One table, read by the tests of this folder (which see each caught in a few small launches) and by `benchmarks/mutation.py` (which sees each
caught by the contract, or by the kernel's own tests, at their default numbers of examples).

A slip is pairs of a text, which must occur in the source, and what takes its place, every time it occurs.
"""

from __future__ import annotations

from pathlib import Path

Edits = tuple[tuple[str, str], ...]

ROUNDED = ".to(k_out.dtype.element_ty).to(tl.float32)"

#: Of `fused_kv/kernel.py`.
KERNEL: dict[str, Edits] = {
    # The rotation.
    "halves swapped": (("first * cos - second * sin", "second * cos - first * sin"),),
    "sign of the rotation": (("first * cos - second * sin", "first * cos + second * sin"),),
    "sign of the second half": (("second * cos + first * sin", "second * cos - first * sin"),),
    "turned the other way": (
        ("first * cos - second * sin", "first * cos + second * sin"),
        ("second * cos + first * sin", "second * cos - first * sin"),
    ),
    "sine and cosine swapped": (("cos = tl.load(table + angle", "cos = tl.load(table + HALF + angle"),),
    "sine taken from the cosines": (("sin = tl.load(table + HALF + angle", "sin = tl.load(table + angle"),),
    "first half loaded twice": (("tl.load(kv + HALF + source", "tl.load(kv + source"),),
    "the partner is the next lane": (("tl.load(kv + HALF + source", "tl.load(kv + 1 + source"),),
    "both halves stored in one place": (("tl.store(k_base + HALF + (k_target", "tl.store(k_base + (k_target"),),
    "not turned": (("= first * cos - second * sin", "= first"), ("= second * cos + first * sin", "= second")),
    # Positions.
    "position off by one": (("(position * table_stride)", "((position - 1) * table_stride)"),),
    "position one too far": (("(position * table_stride)", "((position + 1) * table_stride)"),),
    "position of the first token": (("tl.load(positions + token,", "tl.load(positions + token * 0,"),),
    "position of the layer": (("tl.load(positions + token,", "tl.load(positions + layer,"),),
    "table indexed by token": (("(position * table_stride)", "(token * table_stride)"),),
    # The norm.
    "epsilon of layer 0": (("tl.load(eps + layer,", "tl.load(eps + layer * 0,"),),
    "epsilon left out": (("squares / HEAD_DIM + layer_eps", "squares / HEAD_DIM"),),
    "epsilon of another size": (("squares / HEAD_DIM + layer_eps", "squares / HEAD_DIM + 1e-5"),),
    "epsilon outside the root": (
        ("tl.rsqrt(squares / HEAD_DIM + layer_eps)", "1.0 / (tl.sqrt(squares / HEAD_DIM) + layer_eps)"),
    ),
    "epsilon inside the mean": (("squares / HEAD_DIM + layer_eps", "(squares + layer_eps) / HEAD_DIM"),),
    "sum instead of mean": (("squares / HEAD_DIM", "squares"),),
    "mean over the rotating lanes": (("squares / HEAD_DIM", "squares / (2 * HALF)"),),
    "norm over the rotating lanes only": (("squares += tl.sum(rest * rest, axis=2)", "squares += 0.0"),),
    "norm over half of the rotating lanes": (("first * first + second * second, axis=2", "first * first, axis=2"),),
    "norm over the lanes that rest": (
        ("squares += tl.sum(rest * rest, axis=2)", "squares = tl.sum(rest * rest, axis=2)"),
    ),
    "one per cent too long": (("inverse = tl.rsqrt(", "inverse = 1.01 * tl.rsqrt("),),
    "rest not normed": (("rest = rest * inverse * rest_weight", "rest = rest * rest_weight"),),
    "second half not normed": (("second = second * inverse * ", "second = second * "),),
    "normed twice": (("first = first * inverse", "first = first * inverse * inverse"),),
    "norm after the rotation": (
        ("first = first * inverse * first_weight", "first = first * first_weight"),
        ("second = second * inverse * second_weight", "second = second * second_weight"),
        (
            "= first * cos - second * sin",
            "= (first * cos - second * sin) * tl.rsqrt(tl.sum((first * cos - second * sin) * "
            "(first * cos - second * sin) + (second * cos + first * sin) * (second * cos + first * sin), axis=2) / HEAD_DIM "
            "+ layer_eps)[:, :, None]",
        ),
    ),
    # The norm's weight.
    "norm weight left out": (("first = first * inverse * first_weight", "first = first * inverse"),),
    "norm weight of layer 0": (("norm_row = (layer * norm_stride)", "norm_row = (layer * 0)"),),
    "norm weight of another layer": (
        ("norm_row = (layer * norm_stride)", "norm_row = (layer * norm_stride * 0 + norm_stride)"),
    ),
    "norm weight of the token": (("norm_row = (layer * norm_stride)", "norm_row = (token * norm_stride)"),),
    "norm weight of the first half for both": (("norm_weight + partner + first_lane", "norm_weight + first_lane"),),
    "norm weight after the turn": (
        ("first = first * inverse * first_weight", "first = first * inverse"),
        ("second = second * inverse * second_weight", "second = second * inverse"),
        ("= first * cos - second * sin", "= first_weight * (first * cos - second * sin)"),
        ("= second * cos + first * sin", "= second_weight * (second * cos + first * sin)"),
    ),
    "rest's weight left out": (("rest = rest * inverse * rest_weight", "rest = rest * inverse"),),
    "rest's weight of layer 0": (("norm_weight + (norm_row + rest_lane)", "norm_weight + (norm_row * 0 + rest_lane)"),),
    "rest's weight of the first lanes": (
        ("norm_weight + (norm_row + rest_lane)", "norm_weight + (norm_row + (rest_lane - 2 * HALF))"),
    ),
    # Where K is rounded.
    "rounded after the norm": (("first = first * inverse * ", f"first = (first * inverse){ROUNDED} * "),),
    "rounded before the turn": (
        (
            "turned = first * cos - second * sin",
            f"first = first{ROUNDED}\n        second = second{ROUNDED}\n        turned = first * cos - second * sin",
        ),
    ),
    "products rounded": (("= first * cos - second * sin", f"= (first * cos){ROUNDED} - (second * sin){ROUNDED}"),),
    "table rounded": (
        (
            "cos = tl.load(table + angle, mask=angle_mask, other=0.0)",
            "cos = tl.load(table + angle, mask=angle_mask, other=0.0).to(k_out.dtype.element_ty)",
        ),
    ),
    "sum of squares rounded": (
        ("first * first + second * second, axis=2", f"(first * first + second * second){ROUNDED}, axis=2"),
    ),
    "epsilon and mean in 16 bits": (
        ("tl.rsqrt(squares / HEAD_DIM + layer_eps)", f"tl.rsqrt(squares / HEAD_DIM + layer_eps){ROUNDED}"),
    ),
    # Rows: layers, tokens, heads.
    "K of another layer": (("+ layer * kv_layer_stride", "+ (1 - layer) * kv_layer_stride"),),
    "layers and tokens swapped": (
        ("token * kv_token_stride + layer * kv_layer_stride", "token * kv_layer_stride + layer * kv_token_stride"),
    ),
    "heads swapped": (
        (
            "kv_layer_stride)[:, None, None] + head * HEAD_DIM",
            "kv_layer_stride)[:, None, None] + (NUM_HEADS - 1 - head) * HEAD_DIM",
        ),
    ),
    "heads as far apart as they rotate": (
        ("kv_layer_stride)[:, None, None] + head * HEAD_DIM", "kv_layer_stride)[:, None, None] + head * (2 * HALF)"),
    ),
    "the first head for all": (
        ("kv_layer_stride)[:, None, None] + head * HEAD_DIM", "kv_layer_stride)[:, None, None] + head * 0"),
    ),
    "K's layers and tokens swapped at the store": (
        ("layer * k_outer_stride + token * k_inner_stride", "layer * k_inner_stride + token * k_outer_stride"),
    ),
    "K's heads by the stride of tokens": (("head * k_head_stride", "head * k_inner_stride"),),
    "K's layers by V's stride of tokens": (("layer * k_outer_stride", "layer * v_inner_stride"),),
    "rows counted layer by layer in the wrong order": (
        ("token = (item % num_tokens)", "token = (item // num_tokens)"),
        ("layer = (item // num_tokens)", "layer = (item % num_tokens)"),
    ),
    # Masks.
    "last item left out": (("active = item < num_layers * num_tokens", "active = item < num_layers * num_tokens - 1"),),
    "items past the last": (
        ("active = item < num_layers * num_tokens", "active = item < num_layers * num_tokens + 1"),
    ),
    "no mask of items": (("active = item < num_layers * num_tokens", "active = item >= 0"),),
    "heads past the last": (("if BLOCK_HEADS != NUM_HEADS:", "if BLOCK_HEADS < NUM_HEADS:"),),
    "lanes past the head": (("else row_mask & (v_lane < HEAD_DIM)", "else row_mask & (v_lane >= 0)"),),
    "lanes of the other half": (
        (
            "mask = row_mask if BLOCK_HALF == HALF else row_mask & pair_mask\n            source",
            "mask = row_mask\n            source",
        ),
    ),
    "lanes past the rest": (
        ("rest_mask = row_mask & (rest_lane < HEAD_DIM)", "rest_mask = row_mask & (rest_lane >= 0)"),
    ),
    "last lane of a half left out": (("pair_mask = pair < HALF", "pair_mask = pair < HALF - 1"),),
    "last lane of the rest left out": (("(rest_lane < HEAD_DIM)", "(rest_lane < HEAD_DIM - 1)"),),
    "last lane of V left out": (("(v_lane < HEAD_DIM)", "(v_lane < HEAD_DIM - 1)"),),
    "masked lanes count as one": (
        (
            "second = tl.load(kv + HALF + source, mask=mask, other=0.0)",
            "second = tl.load(kv + HALF + source, mask=mask, other=1.0)",
        ),
    ),
    "rest starts at the second half": (("rest_lane = 2 * HALF + ", "rest_lane = HALF + "),),
    "rest never stored": (("tl.store(k_base + (k_target + rest_lane), rest.to(element), mask=rest_mask)", "pass"),),
    # V.
    "V taken from K": (("kv + NUM_HEADS * HEAD_DIM + (row", "kv + (row"),),
    "V of the next head": (
        ("value = tl.load(kv + NUM_HEADS * HEAD_DIM", "value = tl.load(kv + (NUM_HEADS - 1) * HEAD_DIM"),
    ),
    "V rounded": (("if SCALE_VALUES:", "value = value.to(tl.float8e5).to(value.dtype)\n        if SCALE_VALUES:"),),
    "V through float16": (
        ("if SCALE_VALUES:", "value = value.to(tl.float16).to(value.dtype)\n        if SCALE_VALUES:"),
    ),
    "V normed": (
        ("if SCALE_VALUES:", "value = (value.to(tl.float32) * inverse).to(value.dtype)\n        if SCALE_VALUES:"),
    ),
    "V scaled twice": (("* value_scale\n", "* value_scale * value_scale\n"),),
    "V not scaled": (("if SCALE_VALUES:", "if SCALE_VALUES and HEAD_DIM < 0:"),),
    "V written to layer 0": (("v_item = layer * v_outer_stride", "v_item = layer * 0"),),
    "V's layers and tokens swapped at the store": (
        ("layer * v_outer_stride + token * v_inner_stride", "layer * v_inner_stride + token * v_outer_stride"),
    ),
    "V's heads by the stride of tokens": (("head * v_head_stride", "head * v_inner_stride"),),
    # The launch.
    "one program too few": (("(-(-layers * tokens // tile.items),)", "(max(1, layers * tokens // tile.items),)"),),
    "K's strides for V": (("*v_out.stride()[:3])", "*k_out.stride()[1:3], 1)"),),
    "one layer too few": (
        (
            "        layers,\n        tokens,\n        kv.stride(0)",
            "        layers - 1,\n        tokens,\n        kv.stride(0)",
        ),
    ),
}

#: Of `fused_kv/kernel.py`, shown only by strides or numbers of rows that no small launch has.
FAR: dict[str, Edits] = {
    "token in 32 bits": (("(item % num_tokens).to(tl.int64)", "(item % num_tokens).to(tl.int32)"),),
    "layer in 32 bits": (("(item // num_tokens).to(tl.int64)", "(item // num_tokens).to(tl.int32)"),),
    "head in 32 bits": (("[None, :, None].to(tl.int64)", "[None, :, None].to(tl.int32)"),),
    "position in 32 bits": (("(position * table_stride)", "(position.to(tl.int32) * table_stride)"),),
    "row of the table in 32 bits": (
        ("(position * table_stride)[:, None, None]", "(position * table_stride)[:, None, None].to(tl.int32)"),
    ),
    "row of K in 32 bits": (("source = row + pair", "source = row.to(tl.int32) + pair"),),
    "target of K in 32 bits": (("k_item[:, None, None]", "k_item[:, None, None].to(tl.int32)"),),
    "row of V in 32 bits": (("v_item[:, None, None]", "v_item[:, None, None].to(tl.int32)"),),
}

#: Of `fused_kv/latent_kernel.py`.
LATENT: dict[str, Edits] = {
    "k_pe normed as well": (
        (
            "tl.store(out + (target + first_lane), (first",
            "first *= inverse; tl.store(out + (target + first_lane), (first",
        ),
    ),
    "norm over the whole row": (
        ("mask = row_mask[:, None] & (lane < RANK)", "mask = row_mask[:, None] & (lane < RANK + 2 * HALF)"),
    ),
    "mean over the whole row": (("squares / RANK +", "squares / (RANK + 2 * HALF) +"),),
    "neox instead of interleaved": (("IS_NEOX=is_neox_style", "IS_NEOX=not is_neox_style"),),
    "loaded interleaved, stored in halves": (
        ("tl.store(out + (target + first_lane)", "tl.store(out + (target + RANK + pair)"),
    ),
    "pairs swapped": (("(first * cos - second * sin)", "(second * cos - first * sin)"),),
    "sign of the rotation": (("first * cos - second * sin", "first * cos + second * sin"),),
    "sine and cosine swapped": (("cos = tl.load(table + angle", "cos = tl.load(table + HALF + angle"),),
    "position off by one": (("mask=row_mask, other=0).to(tl.int64)", "mask=row_mask, other=0).to(tl.int64) - 1"),),
    "table indexed by token": (("(position * table_stride)", "(token * table_stride)"),),
    "epsilon of layer 0": (("tl.load(eps + layer,", "tl.load(eps + layer * 0,"),),
    "epsilon left out": (("squares / RANK + layer_eps", "squares / RANK"),),
    "norm weight of layer 0": (("(layer * norm_stride)", "(layer * 0)"),),
    "norm weight left out": (("latent * inverse * weight", "latent * inverse"),),
    "rows of another layer": (("+ layer * kv_layer_stride", "+ (1 - layer) * kv_layer_stride"),),
    "written to another layer": (("(layer * out_layer_stride", "((1 - layer) * out_layer_stride"),),
    "layers and tokens swapped": (
        ("token * kv_token_stride + layer * kv_layer_stride", "token * kv_layer_stride + layer * kv_token_stride"),
    ),
    "one per cent too long": (("inverse = tl.rsqrt(", "inverse = 1.01 * tl.rsqrt("),),
    "k_pe taken from the latent": (("first_lane = RANK + (", "first_lane = RANK - 2 * HALF + ("),),
    # Of a norm over the whole row.
    "whole row normed over the latent alone": (("if WHOLE:", "if False:"),),
    "k_pe left out of the sum": (("squares += ", "squares += 0 * "),),
    "half of k_pe left out of the sum": (("(first * first + second * second, axis=1)", "(first * first, axis=1)"),),
    "mean over the latent": (("squares / (RANK + 2 * HALF) +", "squares / RANK +"),),
    "epsilon left out of the whole row's": (("(RANK + 2 * HALF) + layer_eps", "(RANK + 2 * HALF)"),),
    "k_pe not normed": (("first = first * inverse * first_weight", "first = first * first_weight"),),
    "k_pe not weighted": (("second = second * inverse * second_weight", "second = second * inverse"),),
    "weights of the latent for k_pe": (("norm_row + first_lane", "norm_row + pair"),),
    "weights of k_pe in the other style": (("norm_row + second_lane", "norm_row + (RANK + HALF + pair)"),),
    "k_pe's weights of layer 0": (("norm_row + second_lane", "second_lane"),),
    "weighted after the turn": (
        (
            "(first * cos - second * sin)",
            "(first_weight * (first / first_weight * cos - second / second_weight * sin) if WHOLE else first * cos - second * sin)",
        ),
    ),
    "the first lanes turned": (("first_lane = RANK + (pair if IS_NEOX else 2 * pair)", "first_lane = 2 * pair"),),
    "last row left out": (("row_mask = row < num_rows", "row_mask = row < num_rows - 1"),),
    "rows past the last": (("row_mask = row < num_rows", "row_mask = row < num_rows + 1"),),
    "lanes past the latent": (("mask = row_mask[:, None] & (lane < RANK)", "mask = row_mask[:, None]"),),
    "pairs past k_pe": (("pair_mask = row_mask[:, None] & (pair < HALF)", "pair_mask = row_mask[:, None]"),),
    # Both kinds.
    "second lane's sign": (("second * cos + first * sin", "second * cos - first * sin"),),
    "turned the other way": (
        ("first * cos - second * sin", "first * cos + second * sin"),
        ("second * cos + first * sin", "second * cos - first * sin"),
    ),
    "not turned": (("(first * cos - second * sin)", "first"), ("(second * cos + first * sin)", "second")),
    "position of the first token": (("tl.load(positions + token,", "tl.load(positions + token * 0,"),),
    "epsilon outside the root": (
        ("tl.rsqrt(squares / RANK + layer_eps)", "1.0 / (tl.sqrt(squares / RANK) + layer_eps)"),
    ),
    "sum instead of mean": (("squares / RANK + ", "squares + "),),
    "weight of the token": (("(layer * norm_stride)", "(token * norm_stride)"),),
    "written by tokens and layers swapped": (
        ("layer * out_layer_stride + token * out_token_stride", "layer * out_token_stride + token * out_layer_stride"),
    ),
    "rounded after the norm": (
        ("(latent * inverse * weight)", "((latent * inverse).to(element).to(tl.float32) * weight)"),
    ),
    "products rounded": (
        (
            "(first * cos - second * sin)",
            "((first * cos).to(element).to(tl.float32) - (second * sin).to(element).to(tl.float32))",
        ),
    ),
    "latent left out": (
        ("tl.store(out + (target + lane), (latent * inverse * weight).to(element), mask=mask)", "pass"),
    ),
    "last lane left out": (("(lane < RANK)", "(lane < RANK - 1)"),),
    "last pair left out": (("(pair < HALF)", "(pair < HALF - 1)"),),
    "no mask of rows": (("row_mask = row < num_rows", "row_mask = row >= 0"),),
}


def edited(source: str, edits: Edits) -> str:
    """The source with a slip in it; AssertionError where a text to be edited is gone, so that no slip goes stale unseen."""
    for right, wrong in edits:
        assert right in source, f"no longer in the source: {right}"
        source = source.replace(right, wrong)
    return source


def slipped(source: Path, edits: Edits, folder: Path) -> Path:
    """A file in `folder` with the edited text of `source`."""
    path = folder / f"slipped_{source.name}"
    path.write_text(edited(source.read_text(), edits))
    return path
