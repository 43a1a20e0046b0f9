"""Are the tapped target layers stated, and does `fc` have room for them?"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pytest_specdecode import engines
from pytest_specdecode.checks.keys import DEPTH_KEYS, block_key, layer_key
from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check
from pytest_specdecode.engines import Reading, at
from pytest_specdecode.engines.hf_config import dflash_guess
from pytest_specdecode.findings import Finding, Outcome
from pytest_specdecode.spec import times


@check(
    "taps.stated",
    title="the tapped layers are stated, from 0 up, and none twice",
    why="Engines guess what is not stated, in the right number, so that everything loads and acceptance collapses.",
    faults=(
        "taps-missing",
        "taps-miscounted",
    ),
    cost="the guess is not the trained list for 14 of 20 published block drafts (sgl-project/sglang issue 37475)",
    example={"family": "dflash", "dflash_config": {"mask_token_id": 511, "block_size": 8}},
    fix="state the layers as trained, in the place that the packaging has for them",
)
def stated(context: Context) -> Iterator[Finding]:
    """Missing ids, with what each engine assumes; then the ids themselves."""
    taps = context.spec.taps
    if not taps.required:
        raise Skip(_no_taps(context))
    block = context.spec.block is not None and context.spec.eagle3 is None
    unusable = _unusable(context)
    for key, (value, wrong) in unusable.items():
        # A head is given the default states where its list is empty, which it may have been trained on.
        make = context.fail if block or value != [] else context.warn
        yield make(
            f"{key} is {wrong}",
            where=f"config.json: {key}",
            got=value,
            due="a list of layer ids, whole numbers from 0 up",
            fix=f"state {key} as trained",
            outcomes=_at_unusable(context, key),
        )
    if taps.ids is None and unusable:
        return
    if taps.ids is None:
        key = block_key(context, "taps") if block else "eagle_aux_hidden_state_layer_ids"
        make = context.fail if block else context.warn
        yield make(
            "the tapped layers are not stated; each engine takes its own guess, which may or may not be the trained one",
            where=f"config.json: {key}",
            got=None,
            due="a list of layer ids",
            fix=f"state {key} as trained",
            fault="taps-missing",
            outcomes=_with_guesses(context),
        )
        return
    where = f"config.json: {taps.stated[0].key}"
    if _packaged_block(context) and taps.convention != "boundary":
        key = block_key(context, "taps")
        yield context.fail(
            f"the tapped layers are stated in {taps.stated[0].key} only, which readers of this packaging do not look at",
            where=where,
            got=list(taps.ids),
            due={key: [id + 1 for id in taps.ids]} if taps.convention == "output" else f"{key}: a list of layer ids",
            fix=f"state {key}; it counts the states between layers, so that the output of layer i is i + 1",
            fault="taps-missing",
        )
    negative = [id for id in taps.ids if id < 0]
    if negative:
        yield context.fail("a layer id is negative", where=where, got=list(taps.ids), due="ids from 0 up")
    counted = context.draft.checkpoint.config.get("num_aux_hidden_states")
    if context.spec.eagle3 is not None and isinstance(counted, int) and counted != len(taps.ids):
        yield context.fail(
            f"num_aux_hidden_states says {counted}, {len(taps.ids)} layers are stated; engines count by the first",
            where="config.json: num_aux_hidden_states",
            got=counted,
            due=len(taps.ids),
            fix="state the number of the listed layers, or leave it out",
            fault="taps-miscounted",
        )
    if len(set(taps.ids)) < len(taps.ids):
        yield context.fail(
            "a layer is tapped twice", where=where, got=list(taps.ids), due="different layers", fix="state each id once"
        )


@check(
    "taps.order",
    title="the tapped layers are in increasing order",
    why="An engine that sorts them permutes the features that fc reads.",
    severity="warning",
    faults=("taps-unordered",),
    example={
        "family": "dflash",
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [9, 1, 17], "block_size": 8},
    },
    fix="list the layers in increasing order, and train so",
)
def order(context: Context) -> Iterator[Finding]:
    """Ids that fall."""
    ids = _stated_ids(context)
    if list(ids) != sorted(ids):
        yield context.warn(
            "the tapped layers are not in increasing order",
            where=f"config.json: {context.spec.taps.stated[0].key}",
            got=list(ids),
            due=sorted(ids),
            fix="right only where training read them in this order and the engine keeps it",
            fault="taps-unordered",
        )


@check(
    "taps.range",
    title="the tapped layers are layers of the target",
    why="An id past the end is not captured: the features have another width, or an engine reads what is not there.",
    faults=("taps-range", "target-depth"),
    example={
        "family": "dflash",
        "dflash_config": {"mask_token_id": 511, "target_layer_ids": [1, 9, 20], "block_size": 8},
    },
    fix="state the layers that were tapped in training, and the target's depth",
)
def in_range(context: Context) -> Iterator[Finding]:
    """Ids against the target's depth, in the packaging's convention; where that is not settled, in either."""
    ids = _stated_ids(context)
    taps = context.spec.taps
    if _may_count_taps(context):
        stated = taps.num_target_layers
        yield context.warn(
            f"num_target_layers is {stated}, and so is the number of taps: a count of taps, as some packagings write it there, or a "
            f"target of {stated} layers, which has no layer {max(ids)}",
            where="config.json: num_target_layers",
            got=stated,
            due="the target's layers",
            fix="give --draft-target=DIR, which settles it, and state the target's depth",
            fault="target-depth",
        )
        return
    depth = _depth(context)
    if depth is None:
        raise Inconclusive(
            "the target's depth is not known: give --draft-target=DIR, or state num_target_layers", "target"
        )
    if depth < 1:
        # Nothing lies within a target without layers: the number is at fault, not the list.
        given = context.target is not None and context.target.num_hidden_layers == depth
        yield context.fail(
            f"a target of {depth} layers has nothing to tap",
            where="the target's num_hidden_layers" if given else f"config.json: {_depth_key(context)}",
            got=depth,
            due=f"more than {max(ids)}" if ids else "a positive number",
            fix="state the target's depth",
            fault="target-depth",
        )
        return
    lowest, highest = {"output": (0, depth - 1), "boundary": (1, depth), None: (0, depth)}[taps.convention]
    outside = [id for id in ids if not lowest <= id <= highest]
    if outside:
        one, many = {
            "output": ("no output of a layer", "no outputs of layers"),
            "boundary": ("no state entering a layer", "no states entering layers"),
        }.get(taps.convention or "", ("no layer", "no layers"))
        yield context.fail(
            f"{', '.join(map(str, outside))} {f'is {one}' if len(outside) == 1 else f'are {many}'} of a target with "
            f"{depth} {'layer' if depth == 1 else 'layers'}",
            where=f"config.json: {taps.stated[0].key}",
            got=list(ids),
            due=f"{lowest} to {highest}",
            fix="state the layers that were tapped in training, and the target's depth",
            fault="taps-range",
        )


@check(
    "taps.convention",
    title="every engine captures the states that the file means: outputs of layers, or states entering them",
    why="One list names other states under the other reading, a layer too early or too late, or past the end, and all loads and runs.",
    severity="warning",
    cost=(
        "accepted length about 0.1 lower with 1 added to a list that counts states (sgl-project/sglang PR 25454); 1.00 instead of "
        "2.39 to 2.68 where that ran past the last layer (issue 32226, PR 32334)"
    ),
    example={"family": "eagle3", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 8, 13]}},
    fix="state the layers in each place as the engines that read it count them",
)
def convention(context: Context) -> Iterator[Finding]:
    """What each engine captures against what the file means, where that is settled; where not, what hangs on it."""
    ids = _stated_ids(context)
    if any(id < 0 for id in ids):
        raise Inconclusive("a layer id is negative; see taps.stated")
    if _differ(context):
        raise Inconclusive("two places name different layers; see taps.places")
    where = f"config.json: {context.spec.taps.stated[0].key}"
    if _is_copied_list(context):
        yield context.warn(
            "the tapped layers are the list that block drafts of the other packaging have by default, without the 1 that is due here: "
            "this key counts states entering layers",
            where=where,
            got=list(ids),
            due=[id + 1 for id in ids],
            fix="add 1 to each id if the list was copied from a target_layer_ids; leave it if the draft was trained with it as it stands",
            outcomes={
                name: outcome if outcome.outcome != "fine" else replace(outcome, outcome="unknown")
                for name, outcome in engines.against(_captures(context), sorted(ids)).items()
            },
        )
        return
    captured = _captures(context)
    reads = {name: found for name, found in captured.items() if found is not None and found.place}
    if not reads:
        raise Skip("of no engine is it known how it reads the taps of such a draft")
    meaning = _meaning(context)
    if meaning is None:
        yield context.warn(
            "the file does not settle whether its tapped layers are outputs of layers or states entering layers; were the target "
            f"{ids[-1]} layers deep, the last one would be the state behind them all, and 1 added to it runs past the end",
            where=where,
            got=list(ids),
            due="a list whose convention shows: see the fix",
            fix=(
                "give --draft-target=DIR, whose depth may settle it; compare with training: outputs are one less than the states "
                "entering layers"
            ),
            outcomes=_open(captured, ids),
        )
        return
    meant = sorted(set(meaning.states))
    if all(found.value == meant for found in reads.values()):
        return
    kind = "states entering layers" if list(meaning.states) == list(ids) else "outputs of layers"
    yield context.warn(
        f"the tapped layers {'are' if meaning.sure else 'look like'} {kind}, for {meaning.why}; not every engine reads them so",
        where=where,
        got={name: found.value for name, found in reads.items()},
        due=meant,
        fix=(
            "state the layers in each place as the engines that read it count them: outputs are one less than the states entering layers"
        ),
        outcomes=_captured_as(context, captured, meant, meaning.sure),
    )


@check(
    "taps.places",
    title="the tapped layers are stated the same in every place that an engine reads",
    why="Engines look in different places, some in one only: a head that states one place is served with a guess by the others.",
    faults=(
        "taps-places-differ",
        "taps-nested-only",
        "taps-top-only",
    ),
    example={"family": "eagle3", "eagle_aux_hidden_state_layer_ids": [2, 8, 14]},
    fix="state the trained list in every place",
)
def places(context: Context) -> Iterator[Finding]:
    """Two places that differ are an error; one place that an engine does not look at is a warning."""
    _stated_ids(context)
    stated = {item.key: item.value for item in context.spec.taps.stated}
    first = next(iter(stated))
    if _differ(context):
        shift = _counts_states_first(context)
        yield context.fail(
            "the tapped layers are stated with different values",
            where=f"config.json: {', '.join(stated)}",
            got=stated,
            due=f"one list; dflash_config counts outputs, one less than {first}" if shift else "one list",
            fix="leave the trained list, in every place",
            fault="taps-places-differ",
        )
        return
    looked = engines.looks_in("taps", context.draft, context.engines) if context.spec.packaging == "plain" else {}
    blind = {name: keys for name, keys in looked.items() if keys and not set(keys) & set(stated)}
    if blind:
        yield context.warn(
            f"the tapped layers are stated in {', '.join(stated)} only, and not every engine looks there",
            where=f"config.json: {first}",
            got=stated,
            due=sorted({first, *(keys[0] for keys in blind.values())}),
            fix="state the list in every place that an engine reads",
            fault="taps-nested-only" if "." in first else "taps-top-only",
        )


@check(
    "taps.fc-width",
    title="fc reads the taps side by side: its columns are taps x target hidden size, and not the hidden size itself",
    why="A width that does not fit stops the server; one tap of the draft's own width makes an engine skip fc in silence.",
    needs=("config", "headers"),
    faults=(
        "fc-width",
        "fc-skipped",
    ),
    example={
        "family": "eagle3",
        "eagle_aux_hidden_state_layer_ids": [2],
        "eagle_config": {},
        "num_aux_hidden_states": 1,
    },
    fix="state the taps that the draft was trained on, and target_hidden_size where it is not hidden_size",
)
def fc_width(context: Context) -> Iterator[Finding]:
    """fc's columns against K x Ht, and the widths at which engines skip or miscount."""
    spec = context.spec
    if not spec.taps.required:
        raise Skip(_no_taps(context))
    binding = context.draft.binding
    if binding is not None and "fc.weight" not in binding.expected:
        raise Skip(f"a {spec.family} draft mixes its taps without an fc")
    width = times(spec.taps.count, spec.target_hidden_size)
    if width is None:
        raise Inconclusive("the number of taps or the target's hidden size is not stated")
    if spec.eagle3 is not None and width == spec.hidden_size:
        yield context.fail(
            "fc's input is as wide as the hidden size: what tells the target's states from recycled ones by their width skips fc",
            where=context.draft.stored_name("fc.weight"),
            got=width,
            due=f"another width than {spec.hidden_size}",
            fault="fc-skipped",
        )
    header = context.draft.header("fc.weight")
    shape = context.draft.shape("fc.weight")
    columns = shape[1] if shape is not None and len(shape) == 2 else None
    if header is not None and columns not in (None, width):
        taps = spec.taps
        counted = f"{taps.count} taps" if taps.ids is not None else f"{taps.count} taps by default"
        yield context.fail(
            f"fc reads {columns} features; {counted} of {spec.target_hidden_size} give {width}",
            where=f"{header.file}: {header.name}",
            got=columns,
            due=width,
            fix="state the taps that the draft was trained on, and target_hidden_size where it is not hidden_size",
            fault="fc-width",
        )
    counts = context.readings("taps-count")
    missed = {name: found for name, found in counts.items() if found is not None and not found.place}
    if spec.taps.ids is not None and any(found.value != spec.taps.count for found in missed.values()):
        key = spec.taps.stated[0].key
        yield context.warn(
            f"the number of taps is not where every engine counts it: {spec.taps.count} are stated in {key}",
            where=f"config.json: {key}",
            got={name: found.value for name, found in missed.items()},
            due=spec.taps.count,
            fix=f"add num_aux_hidden_states: {spec.taps.count}" if spec.eagle3 is not None else "",
            outcomes=_miscounted(context, counts),
        )


def _counts_states_first(context: Context) -> bool:
    """Whether the key that counts states entering layers is there, beside which a list of outputs is one less."""
    return _packaged_block(context) and context.spec.taps.convention == "boundary"


def _differ(context: Context) -> bool:
    """Whether two places name different layers, each counted as its readers count."""
    first, *others = context.spec.taps.stated
    for other in others:
        alike = [other.value]
        if _counts_states_first(context):
            more = [id + 1 for id in other.value]
            alike = [other.value, more] if other.key == "target_layer_ids" else [more]
        elif context.spec.eagle3 is not None and context.spec.packaging == "plain":
            alike.append([id - 1 for id in other.value])
        if first.value not in alike:
            return True
    return False


@dataclass(frozen=True, kw_only=True)
class _Meaning:
    """What the stated ids mean.

    Attributes:
        states: the states entering layers that they name, in the file's order.
        why: what shows it.
        sure: whether that leaves no doubt.
    """

    states: tuple[int, ...]
    why: str
    sure: bool = True


def _meaning(context: Context) -> _Meaning | None:
    """The states that the file means, or None where nothing in it, and nothing of the target, settles it."""
    ids, depth = _stated_ids(context), _depth(context)
    outputs, said = tuple(id + 1 for id in ids), context.spec.taps.convention
    if said is not None:
        apart = context.spec.eagle3 is not None and said == "output"
        why = "the two places are one apart" if apart else "this packaging counts so"
        return _Meaning(states=ids if said == "boundary" else outputs, why=why)
    if depth is not None and max(ids) == depth:
        return _Meaning(states=ids, why=f"the last id is the target's depth, {depth}")
    usual = None if depth is None or depth < 6 else (2, depth // 2, depth - 3)
    if ids == usual:
        return _Meaning(states=ids, why=f"they are the default (2, N // 2, N - 3) of a target {depth} layers deep")
    if outputs == usual:
        return _Meaning(states=outputs, why=f"they are one less than the default (2, N // 2, N - 3) of {depth} layers")
    if ids[0] in (0, 1):
        return _Meaning(states=outputs, why=f"lists of outputs begin with {ids[0]}", sure=False)
    if ids[0] == 2:
        return _Meaning(states=ids, why="lists of states begin with 2", sure=False)
    return None


def _is_copied_list(context: Context) -> bool:
    """Whether a list that counts states is the one that z-lab's drafts have by default, who count outputs."""
    taps = context.spec.taps
    if taps.ids is None or taps.convention != "boundary" or len(taps.ids) < 3 or not _packaged_block(context):
        return False
    # Its last id is three layers before the end; a depth that is known has to fit.
    depth = taps.ids[-1] + 3
    known = _depth(context)
    return known in (None, depth) and 4 <= depth <= 512 and list(taps.ids) == dflash_guess(len(taps.ids), depth)


def _captures(context: Context) -> dict[str, Reading | None]:
    return engines.captures(context.draft, context.target, context.engines)


def _captured_as(
    context: Context, captured: Mapping[str, Reading | None], meant: list[int], sure: bool
) -> dict[str, Outcome]:
    """What comes of what each engine captures; an id past the last layer is a fault of its own."""
    depth = _depth(context)
    past = engines.outcomes("taps-range", context.spec, captured)
    found = engines.against(captured, meant)
    for name, reading in captured.items():
        if reading is None or found[name].outcome != "serves wrong":
            continue
        if depth is not None and _is_past(reading.value, depth):
            found[name] = replace(
                past[name], message=f"{reading}, past the last of {depth} layers: {past[name].message}"
            )
        elif not sure:
            found[name] = replace(found[name], outcome="unknown")
    return found


def _is_past(ids: Any, depth: int) -> bool:
    return isinstance(ids, list) and any(isinstance(id, int) and id > depth for id in ids)


def _open(captured: Mapping[str, Reading | None], ids: tuple[int, ...]) -> dict[str, Outcome]:
    """What each engine captures, and when that is right."""
    outputs = sorted({id + 1 for id in ids})
    found = {}
    for name, reading in captured.items():
        if reading is None:
            found[name] = Outcome(outcome="unknown")
        elif reading.value in (outputs, sorted(set(ids))):
            meant = "outputs of layers" if reading.value == outputs else "states entering layers"
            found[name] = Outcome(
                outcome="unknown", message=f"{reading}: right if {meant} are meant", source=reading.source
            )
        else:
            found[name] = Outcome(outcome="unknown", message=str(reading), source=reading.source)
    return found


def _with_guesses(context: Context) -> dict[str, Outcome]:
    """What each engine does about missing ids, with the list that it takes, counted as this packaging counts."""
    found = engines.outcomes("taps-missing", context.spec, context.engines)
    outputs = context.spec.taps.convention == "output"
    for name, reading in _captures(context).items():
        if reading is None or reading.place or not isinstance(reading.value, list):
            continue
        guess = [id - 1 for id in reading.value] if outputs else reading.value
        said = f"takes {guess}: {found[name].message}".removesuffix(": ")
        found[name] = replace(found[name], message=said, source=found[name].source or reading.source)
    return found


def _miscounted(context: Context, counts: Mapping[str, Reading | None]) -> dict[str, Outcome]:
    """What comes of the number of taps that each engine builds fc for."""
    wide = engines.outcomes("fc-width", context.spec, counts)
    found = engines.against(counts, context.spec.taps.count)
    return {
        name: replace(wide[name], message=f"{counts[name]}: {wide[name].message}")
        if outcome.outcome == "serves wrong" and wide[name].outcome != "unknown"
        else outcome
        for name, outcome in found.items()
    }


def _packaged_block(context: Context) -> bool:
    """Whether the draft is a block draft as speculators writes it, whose taps count the states between layers."""
    spec = context.spec
    return spec.packaging == "speculators" and spec.block is not None and spec.eagle3 is None


def _no_taps(context: Context) -> str:
    if context.spec.eagle3 is not None:
        return "use_aux_hidden_state is false; the draft reads no taps"
    return f"no draft of the {context.spec.family} family reads taps"


def _stated_ids(context: Context) -> tuple[int, ...]:
    taps = context.spec.taps
    if not taps.required:
        raise Skip("use_aux_hidden_state is false; the draft reads no taps")
    if taps.ids is None:
        raise Inconclusive("the tapped layers are not stated; see taps.stated")
    return taps.ids


def _depth(context: Context) -> int | None:
    """Layers of the target: from its own configuration, else as the draft states it."""
    if context.target is not None and context.target.num_hidden_layers is not None:
        return context.target.num_hidden_layers
    return None if _may_count_taps(context) else context.spec.taps.num_target_layers


def _depth_key(context: Context) -> str:
    """The key that gives the depth of a draft's target."""
    if context.spec.packaging == "embedded":
        return layer_key(context, "num_hidden_layers")
    config, depth = context.draft.checkpoint.config, context.spec.taps.num_target_layers
    return next((key for key in DEPTH_KEYS if at(config, key) == depth), DEPTH_KEYS[1])


def _may_count_taps(context: Context) -> bool:
    """Whether the depth that the draft states may be the number of its taps: they are equal, a tap lies beyond, and no target is known."""
    taps, target = context.spec.taps, context.target
    if target is not None and target.num_hidden_layers is not None:
        return False
    if taps.ids is None or taps.num_target_layers is None or taps.num_target_layers != taps.count:
        return False
    return max(taps.ids) > taps.num_target_layers - (taps.convention == "output")


#: Where lists of tapped layers stand.
_PLACES = {
    "block": ("dflash_config.target_layer_ids", "target_layer_ids", "dspark_target_layer_ids"),
    "head": ("eagle_config.eagle_aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"),
    "speculators": ("aux_hidden_state_layer_ids", "target_layer_ids", "eagle_aux_hidden_state_layer_ids"),
}


def _unusable(context: Context) -> dict[str, tuple[Any, str]]:
    """The stated lists that name no layer: what is there, and what is wrong with it."""
    spec, config = context.spec, context.draft.checkpoint.config
    kind = "block" if spec.eagle3 is None else "head"
    found = {}
    for key in _PLACES["speculators" if spec.packaging == "speculators" else kind]:
        value = at(config, key)
        if value is None:
            continue
        if not isinstance(value, list):
            found[key] = (value, "not a list")
        elif not value:
            found[key] = (value, "an empty list")
        elif odd := [item for item in value if isinstance(item, bool) or not isinstance(item, int)]:
            found[key] = (value, f"a list with {reprlib.repr(odd[0])}, which is no whole number")
    return found


def _at_unusable(context: Context, key: str) -> dict[str, Outcome]:
    """What each engine does about the list at `key`: it stops, or takes it as it is, which is not followed further."""
    found = {}
    for name, reading in _captures(context).items():
        found[name] = Outcome(outcome="unknown")
        if reading is None or reading.place != key:
            continue
        if reading.refused:
            found[name] = engines.stops(reading.refused, reading.source)
        else:
            found[name] = Outcome(outcome="unknown", message=str(reading), source=reading.source)
    return found
