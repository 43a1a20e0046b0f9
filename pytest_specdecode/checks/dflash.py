"""What a block-drafting head must state beside its layers."""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode.checks.registry import Context, check
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import BlockSpec


@check(
    "dflash.mask-token",
    title="mask_token_id is stated and is an id of the target's embedding",
    why="An id outside the embedding stops one engine; an absent one is replaced by another token, and every row drafts from it.",
    families=("dflash", "dflash2", "domino", "dflare", "dspark", "xpress", "peagle"),
)
def mask_token(context: Context) -> Iterator[Finding]:
    """Presence, agreement, range, and a mask that means something else."""
    block = _block(context)
    where = (
        f"config.json: {block.mask_token_stated[0].key if block.mask_token_stated else 'dflash_config.mask_token_id'}"
    )
    config = context.draft.checkpoint.config
    stated = {item.key: item.value for item in block.mask_token_stated}
    if block.mask_token_id is None and block.variant == "peagle":
        yield context.warn(
            "mask_token_id is not stated; engines cannot draft in parallel without it",
            where="config.json: mask_token_id",
            got=next(iter(stated.values()), None),
            due="the id that masked positions were trained with",
            fix="state mask_token_id",
            fault="parallel-mask-token-missing",
        )
        return
    if block.mask_token_id is None:
        yield context.fail(
            "mask_token_id is not stated" if not stated else "mask_token_id is not an id",
            where=where,
            got=next(iter(stated.values()), None),
            due="the id that masked rows were trained with",
            fix="state dflash_config.mask_token_id",
            fault="mask-token-missing",
        )
        return
    if any(value != block.mask_token_id for value in stated.values()):
        yield context.fail(
            "mask_token_id is stated with different values", where=where, got=stated, due="one value", fault=None
        )
    rows = context.spec.vocabulary.vocab_size
    if context.target is not None and isinstance(context.target.get("vocab_size"), int):
        rows = context.target["vocab_size"]
    if rows is not None and block.mask_token_id >= rows:
        yield context.fail(
            f"mask_token_id {block.mask_token_id} lies outside an embedding of {rows} rows",
            where=where,
            got=block.mask_token_id,
            due=f"0 to {rows - 1}",
            fix="state the id that was trained, and the target's padded vocab_size",
            fault="mask-token-range",
        )
    for key in ("pad_token_id", "eos_token_id", "bos_token_id"):
        value = config.get(key)
        ids = value if isinstance(value, list) else [value]
        if block.mask_token_id in ids:
            yield context.warn(
                f"mask_token_id is {key}, which means something else to the target",
                where=where,
                got=block.mask_token_id,
                due=f"an id other than {key}",
            )


@check(
    "dflash.block-size",
    title="block_size is stated, at least 2, and the same in both places",
    why="Engines take 16 where they do not find it; asking for more tokens than were trained takes 2.74 down to 1.31.",
    families=("dflash", "dflash2", "domino", "dflare", "dspark", "xpress"),
)
def block_size(context: Context) -> Iterator[Finding]:
    """Presence, agreement, size, and a place that one engine does not read."""
    block = _block(context)
    stated = {item.key: item.value for item in block.block_size_stated}
    where = f"config.json: {next(iter(stated), 'block_size')}"
    fix = "state block_size at top level and in dflash_config"
    if block.block_size is None:
        yield context.fail(
            "block_size is not stated" if not stated else "block_size is not a number",
            where=where,
            got=next(iter(stated.values()), None),
            due="rows of a block as trained",
            fix=fix,
            fault="block-size-missing",
        )
        return
    if any(value != block.block_size for value in stated.values()):
        yield context.fail(
            "block_size is stated with different values",
            where=f"config.json: {', '.join(stated)}",
            got=stated,
            due="one value",
            fix="leave the trained one, in both places",
            fault="block-size-disagrees",
        )
    if block.block_size < 2:
        yield context.fail(
            "a block has an anchor and at least one masked row", where=where, got=block.block_size, due="2 or more"
        )
    if list(stated) == ["dflash_config.block_size"]:
        yield context.warn(
            "block_size stands in dflash_config only; TensorRT-LLM reads the top level",
            where=where,
            got=stated,
            due="both places",
            fix=fix,
            fault="block-size-nested-only",
        )


def _block(context: Context) -> BlockSpec:
    block = context.spec.block
    assert block is not None, "a DFlash spec has a block"
    return block
