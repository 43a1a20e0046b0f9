"""Do drafts that are made of heads hold as many as they declare, and lists with one entry for each?"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from pytest_specdecode.checks.keys import ids_below
from pytest_specdecode.checks.registry import Context, Inconclusive, check
from pytest_specdecode.families.hydra import HydraOptions
from pytest_specdecode.families.medusa import MedusaOptions
from pytest_specdecode.families.mlp_speculator import MLPSpeculatorOptions
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import Extent

#: The keys by which each number may be stated.
_SPELLINGS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "medusa": (
        ("medusa_num_heads", "num_medusa_heads", "num_heads"),
        ("medusa_num_layers", "num_medusa_layers"),
    ),
}
#: Per family, what one head has, by the pattern of its canonical name.
_PARTS: Mapping[str, Mapping[str, str]] = {
    "medusa": {"lm_heads": r"lm_heads\.(\d{1,6})\.weight", "blocks": r"blocks\.(\d{1,6})\.layers\.\d{1,6}\.weight"},
    "hydra": {
        "hydra_lm_head": r"hydra_lm_head\.(\d{1,6})\.1\.weight",
        "hydra_mlp": r"hydra_mlp\.(\d{1,6})\.\d{1,6}\.linear\.weight",
    },
    "mlp-speculator": {part: rf"{part}\.(\d{{1,6}})\.weight" for part in ("emb", "proj", "ln", "head")},
}
#: Per family, a block of a head.
_BLOCK: Mapping[str, str] = {
    "medusa": r"blocks\.(\d{1,6})\.layers\.(\d{1,6})\.weight",
    "hydra": r"hydra_mlp\.(\d{1,6})\.(\d{1,6})\.linear\.weight",
}
_LIST = "top_k_tokens_per_head"


@check(
    "heads.counts",
    title="as many heads, blocks and list entries as the configuration declares",
    why="A head that is not counted is never run, and one that the file lacks stays uninitialised; a list of another length stops a tree.",
    needs=("config", "headers"),
    families=("medusa", "hydra", "mlp-speculator"),
    faults=("heads-count",),
    example={"family": "medusa", "num_heads": 4},
    fix="state the number of heads and of blocks that the file holds, and lists with one entry per head",
)
def counts(context: Context) -> Iterator[Finding]:
    """Keys that contradict each other, parts of heads against their number, blocks of each head, and lists with one entry per head."""
    spec = context.spec
    if spec.family == "mlp-speculator":
        yield from _list(context)
    for spellings in _SPELLINGS.get(spec.family, ()):
        yield from _spelled_twice(context, spellings)
    stated = spec.num_hidden_layers
    if stated is None:
        raise Inconclusive(f"{spec.layer_key} is not stated")
    if context.draft.checkpoint.has_weights and (heads := _heads(context, stated)) is not None:
        yield from _parts(context, heads)
        yield from _blocks(context, heads)


def _list(context: Context) -> Iterator[Finding]:
    options, config = context.spec.options, context.draft.checkpoint.config
    assert isinstance(options, MLPSpeculatorOptions)
    where = f"config.json: {_LIST}"
    entries, stages = options.top_k_tokens_per_head, options.n_predict
    if config.get(_LIST) is None:
        near = difflib.get_close_matches(_LIST, [key for key in config if key != _LIST], n=1, cutoff=0.85)
        yield context.fail(
            f"{_LIST} is not stated" + (f"; {near[0]} is a misspelling that nothing reads" if near else ""),
            where=f"config.json: {near[0]}" if near else where,
            got=near[0] if near else None,
            due=_LIST,
            fix=f"rename {near[0]}" if near else "state the candidates that a tree takes from each stage",
            fault="heads-count",
        )
    elif entries is not None and stages is not None and len(entries) != stages:
        yield context.fail(
            f"{_LIST} has {len(entries)} entries for {stages} stages",
            where=where,
            got=list(entries),
            due=f"{stages} entries, as n_predict says",
            fix="state one entry per stage",
            fault="heads-count",
        )


def _spelled_twice(context: Context, spellings: tuple[str, ...]) -> Iterator[Finding]:
    found = {key: value for key in spellings if type(value := context.draft.checkpoint.config.get(key)) is int}
    if len(set(found.values())) > 1:
        yield context.fail(
            f"{' and '.join(found)} state one number with different values",
            where=f"config.json: {', '.join(found)}",
            got=found,
            due="one value",
            fix="leave the one that the weights have",
            fault="heads-count",
        )


def _heads(context: Context, stated: int) -> int | None:
    """How many heads the weights should hold; None where the form has no heads."""
    options = context.spec.options
    if isinstance(options, HydraOptions) and options.arch not in ("mlp", "prefix-mlp"):
        return None
    return stated


def _parts(context: Context, heads: int) -> Iterator[Finding]:
    """Each part of a head, against the number of heads."""
    options = context.spec.options
    held: dict[str, set[int]] = {}
    due: dict[str, int] = {}
    for part, pattern in _PARTS[context.spec.family].items():
        if isinstance(options, MedusaOptions) and (
            (part == "lm_heads" and options.one_head) or (part == "blocks" and options.num_layers == 0)
        ):
            continue
        if isinstance(options, HydraOptions) and part == "hydra_mlp" and options.num_layers == 0:
            continue
        found = {int(match[1]) for name in _stored(context) if (match := re.fullmatch(pattern, name))}
        tied = isinstance(options, MLPSpeculatorOptions) and options.tie_weights
        least = min(heads, 2 if part == "proj" else 1) if tied else heads
        if not set(range(least)) <= found or any(index >= heads for index in found):
            held[part], due[part] = found, least
    if not held:
        return
    part, found = next(iter(held.items()))
    lacking = sorted(set(range(due[part])) - found)
    beyond = sorted(index for index in found if index >= heads)
    where = next(
        (stored for name, stored in _stored(context).items() if beyond and _index(part, name, context) == beyond[0]),
        f"config.json: {context.spec.layer_key}",
    )
    yield context.fail(
        f"{context.spec.layer_key} is {heads}, the weights hold {len(found)} of {part}"
        + (f"; {_shown(lacking)} {'is' if len(lacking) == 1 else 'are'} not there" if lacking else "")
        + (f"; also {', '.join(list(held)[1:])}" if len(held) > 1 else ""),
        where=where,
        got={name: sorted(indices)[:64] for name, indices in held.items()},
        due=ids_below(heads) if heads > 0 else "a positive number of heads",
        fix="state the number of heads that the file holds, or export all of them",
        fault="heads-count",
    )


def _blocks(context: Context, heads: int) -> Iterator[Finding]:
    """Blocks of each head against their number; a block that is repeated is stored as often."""
    options, family = context.spec.options, context.spec.family
    if not isinstance(options, (MedusaOptions, HydraOptions)) or options.num_layers is None:
        return
    step = 2 if isinstance(options, HydraOptions) else 1
    blocks: dict[int, set[int]] = {}
    for name in _stored(context):
        if match := re.fullmatch(_BLOCK[family], name):
            blocks.setdefault(int(match[1]), set()).add(int(match[2]))
    due = {step * place + (step - 1) for place in range(options.num_layers)}
    wrong = {head: sorted(found) for head, found in sorted(blocks.items()) if head < heads and found != due}
    if wrong:
        first = next(iter(wrong))
        key = _layers_key(context, options.num_layers)
        yield context.fail(
            f"{key} is {options.num_layers}, head {first} holds {len(wrong[first])} blocks"
            + (f"; {len(wrong) - 1} more heads differ" if len(wrong) > 1 else ""),
            where=next(
                stored
                for name, stored in _stored(context).items()
                if (match := re.fullmatch(_BLOCK[family], name)) and int(match[1]) == first
            ),
            got=dict(list(wrong.items())[:16]),
            due=sorted(due),
            fix=f"state {key} as the weights have it",
            fault="heads-count",
        )


def _layers_key(context: Context, value: Extent) -> str:
    config = context.draft.checkpoint.config
    names = ("hydra_num_layers",) if context.spec.family == "hydra" else (*_SPELLINGS["medusa"][1], "num_hidden_layers")
    return next((name for name in names if config.get(name) == value), names[0])


def _index(part: str, name: str, context: Context) -> int | None:
    match = re.fullmatch(_PARTS[context.spec.family][part], name)
    return None if match is None else int(match[1])


def _stored(context: Context) -> Mapping[str, str]:
    binding = context.draft.binding
    return {} if binding is None else binding.stored


def _shown(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
