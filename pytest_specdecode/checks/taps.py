"""Are the tapped target layers stated, and does `fc` have room for them?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import times

#: Families whose plain packaging states taps at top level and in eagle_config.
_TWO_PLACES = ("eagle3", "eagle3-mla", "peagle")


@check(
    "taps.stated",
    title="the tapped layers are stated, from 0 up, and none twice",
    why="Engines guess what is not stated, in the right number, so that everything loads and acceptance collapses.",
)
def stated(context: Context) -> Iterator[Finding]:
    """Missing ids, with what each engine assumes; then the ids themselves."""
    taps = context.spec.taps
    if not taps.required:
        raise Skip(_no_taps(context))
    if taps.ids is None:
        block = context.spec.block is not None and context.spec.eagle3 is None
        key = "dflash_config.target_layer_ids" if block else "eagle_aux_hidden_state_layer_ids"
        make = context.fail if block else context.warn
        yield make(
            "the tapped layers are not stated; each engine takes its own guess, which may or may not be the trained one",
            where=f"config.json: {key}",
            got=None,
            due="a list of layer ids",
            fix=f"state {key} as trained",
            fault="taps-missing",
        )
        return
    where = f"config.json: {taps.stated[0].key}"
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
            fix="right only where training read them in this order; TensorRT-LLM sorts them",
            fault="taps-unordered",
        )


@check(
    "taps.range",
    title="the tapped layers are layers of the target",
    why="An id past the end is not captured: the features have another width, or an engine reads what is not there.",
)
def in_range(context: Context) -> Iterator[Finding]:
    """Ids against the target's depth, in the packaging's convention; where that is not settled, in either."""
    ids = _stated_ids(context)
    taps = context.spec.taps
    depth = _depth(context)
    if depth is None:
        raise Inconclusive("the target's depth is not known: give --draft-target=DIR, or state num_target_layers")
    lowest, highest = {"output": (0, depth - 1), "boundary": (1, depth), None: (0, depth)}[taps.convention]
    outside = [id for id in ids if not lowest <= id <= highest]
    if outside:
        meaning = {"output": "outputs of layers", "boundary": "states entering layers"}.get(
            taps.convention or "", "layers"
        )
        yield context.fail(
            f"{', '.join(map(str, outside))} {'is' if len(outside) == 1 else 'are'} no {meaning} of a target with {depth} layers",
            where=f"config.json: {taps.stated[0].key}",
            got=list(ids),
            due=f"{lowest} to {highest}",
            fix="state the layers that were tapped in training, and the target's depth",
            fault="taps-range",
        )


@check(
    "taps.places",
    title="the tapped layers are stated the same in every place that an engine reads",
    why="vLLM reads the top level first, SGLang eagle_config only; a head that states one place is served with a guess by the other.",
    severity="warning",
)
def places(context: Context) -> Iterator[Finding]:
    """Two places that differ are an error, one place of two a warning."""
    _stated_ids(context)
    stated = {item.key: item.value for item in context.spec.taps.stated}
    values = list(stated.values())
    if any(value != values[0] for value in values):
        yield context.fail(
            "the tapped layers are stated with different values",
            where=f"config.json: {', '.join(stated)}",
            got=stated,
            due="one list",
            fix="leave the trained list, in every place",
            fault="taps-places-differ",
        )
    elif context.spec.family in _TWO_PLACES and context.spec.packaging == "plain" and len(stated) == 1:
        (key,) = stated
        nested = "eagle_config.eagle_aux_hidden_state_layer_ids"
        yield context.warn(
            f"the tapped layers are stated in {key} only",
            where=f"config.json: {key}",
            got=stated,
            due=[nested, "eagle_aux_hidden_state_layer_ids"],
            fix="state the list in both places",
            fault="taps-nested-only" if key == nested else "taps-top-only",
        )


@check(
    "taps.fc-width",
    title="fc reads the taps side by side: its columns are taps x target hidden size, and not the hidden size itself",
    why="A width that does not fit stops the server; one tap of the draft's own width makes SGLang skip fc in silence.",
    needs=("config", "headers"),
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
            "fc's input is as wide as the hidden size, and SGLang then skips fc: it tells the two apart by width",
            where="fc.weight",
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
    keys = [item.key for item in spec.taps.stated]
    if (
        spec.family == "eagle3"
        and spec.packaging == "plain"
        and keys == ["eagle_aux_hidden_state_layer_ids"]
        and spec.taps.count != 3
        and "num_aux_hidden_states" not in context.draft.checkpoint.config
    ):
        yield context.warn(
            "vLLM's Llama class counts taps in eagle_config or num_aux_hidden_states and takes 3 where neither is there",
            where=f"config.json: {keys[0]}",
            got=spec.taps.count,
            due="num_aux_hidden_states beside it",
            fix=f"add num_aux_hidden_states: {spec.taps.count}",
        )


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
    if context.target is not None:
        text = context.target.get("text_config")
        for config in (context.target, text if isinstance(text, dict) else {}):
            depth = config.get("num_hidden_layers")
            if isinstance(depth, int) and not isinstance(depth, bool):
                return depth
    return context.spec.taps.num_target_layers
