"""Where a draft of its packaging states what a check looks for: a finding about an absent key names the one that readers would read."""

from __future__ import annotations

from typing import Literal

from pytest_specdecode.checks.registry import Context
from pytest_specdecode.families.base import open_view

#: Where a draft states its target's depth.
DEPTH_KEYS = ("dflash_config.num_target_layers", "num_target_layers", "target_num_hidden_layers")

#: For each setting of a block draft: in `dflash_config`, at top level, in the speculators packaging, inside a target.
_BLOCK_KEYS = {
    "taps": ("target_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids", "dspark_target_layer_ids"),
    "mask token": ("mask_token_id", "mask_token_id", "mask_token_id", "dspark_noise_token_id"),
    "block size": ("block_size", "block_size", "block_size", "dspark_block_size"),
}


def block_key(context: Context, setting: Literal["taps", "mask token", "block size"]) -> str:
    """The key of a block draft's `setting`, with its section."""
    nested, flat, packaged, embedded = _BLOCK_KEYS[setting]
    spec = context.spec
    if spec.packaging == "embedded":
        return open_view(context.draft.checkpoint).layer.path(embedded)
    if spec.packaging == "speculators":
        return packaged
    # DeepSpec's files have everything at top level.
    if spec.family == "dspark" and not isinstance(context.draft.checkpoint.config.get("dflash_config"), dict):
        return flat
    return f"dflash_config.{nested}"


def ids_below(rows: int) -> str:
    """The ids of a table of `rows` rows, for a finding's `due`."""
    return f"0 to {rows - 1}" if rows > 0 else "a table that has rows"


def layer_key(context: Context, key: str) -> str:
    """A key of the transformer's own, with the section that holds such in this file."""
    return open_view(context.draft.checkpoint).layer.path(key)
