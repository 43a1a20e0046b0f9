"""Are the tapped target layers stated, and does `fc` have room for them?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode.checks.registry import Context, Inconclusive, Skip, check
from pytest_specdecode.findings import Finding
from pytest_specdecode.spec import times


@check(
    "taps.stated",
    title="the tapped layers are stated, from 0 up, and none twice",
    why="Engines guess what is not stated, in the right number, so that everything loads and acceptance collapses.",
)
def stated(context: Context) -> Iterator[Finding]:
    """Missing ids, with what each engine assumes; then the ids themselves."""
    taps = context.spec.taps
    if not taps.required:
        raise Skip("use_aux_hidden_state is false; the draft reads no taps")
    if taps.ids is None:
        block = context.spec.block is not None
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
    if len(set(taps.ids)) < len(taps.ids):
        yield context.fail(
            "a layer is tapped twice", where=where, got=list(taps.ids), due="different layers", fix="state each id once"
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
        raise Skip("use_aux_hidden_state is false; the draft reads no taps")
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
    if header is not None and len(header.shape) == 2 and header.shape[1] != width:
        taps = spec.taps
        counted = f"{taps.count} taps" if taps.ids is not None else f"{taps.count} taps by default"
        yield context.fail(
            f"fc reads {header.shape[1]} features; {counted} of {spec.target_hidden_size} give {width}",
            where=f"{header.file}: {header.name}",
            got=header.shape[1],
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
