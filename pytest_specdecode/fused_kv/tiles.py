"""How much of the work one program of the fused K/V kernel does, by device, heads and widths.

On a GPU a program has so many rows that the norm's weights and the other loads that all its rows share cost little per row, and so few that
its lanes stay in registers: four threads a row of 128 lanes, two warps where that is possible. The figures behind the table are in the
budget that `benchmarks/compile_gate.py` holds the compiled kernel against. On a CPU a program costs some milliseconds and rows nearly
nothing, so one program does all of a small example's layers and tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytest_specdecode.fused_kv.inputs import next_power_of_two


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program does.

    Attributes:
        items: tokens of one layer, or where `flat` of all layers; all heads of each.
        steps: how often it does that many items, one after the other.
        flat: whether a program's items cross layers.
        warps: of a compiled program.
    """

    items: int
    steps: int
    flat: bool
    warps: int


def tile_of(device: str, items: int, num_kv_heads: int, head_dim: int, block_rows: int | None = None) -> Tile:
    """The tile for `items` = layers x tokens on a kind of device; `block_rows` as for `fused_norm_rope`."""
    heads = next_power_of_two(num_kv_heads)
    if device == "cpu":
        rows = _CPU_ROWS if block_rows is None else block_rows
        tokens = max(1, rows // heads)
        return Tile(items=min(next_power_of_two(items), tokens), steps=1, flat=True, warps=4)
    if block_rows is not None:
        return Tile(items=max(1, block_rows // heads), steps=1, flat=False, warps=4)
    tokens, steps, warps = GPU_TILES.get(heads, (1, 2, 8))
    # The table is for 128 lanes; wider heads take fewer tokens, or where there is one already more warps.
    lanes = next_power_of_two(head_dim)
    if lanes > 128:
        wider = lanes // 128
        tokens, warps = max(1, tokens // wider), warps * max(1, wider // tokens)
    return Tile(items=tokens, steps=steps, flat=False, warps=min(warps, 16))


#: Tokens at a time, how often, and warps, by KV heads (rounded up to a power of two), for 128 lanes of 16 bits.
GPU_TILES = {1: (8, 2, 2), 2: (4, 4, 2), 4: (4, 1, 2), 8: (2, 2, 2), 16: (1, 2, 2), 32: (1, 2, 4)}

#: An interpreted program's cost hardly depends on its rows up to here.
_CPU_ROWS = 512


def meta_of(num_kv_heads: int, head_dim: int, rotary_dim: int) -> dict[str, int]:
    """The kernel's constants that follow from the widths."""
    half, rest = rotary_dim // 2, head_dim - rotary_dim
    return {
        "NUM_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "HALF": half,
        "BLOCK_HEADS": next_power_of_two(num_kv_heads),
        "BLOCK_HALF": next_power_of_two(half),
        "BLOCK_REST": next_power_of_two(rest) if rest else 0,
        "BLOCK_HEAD": next_power_of_two(head_dim),
    }
