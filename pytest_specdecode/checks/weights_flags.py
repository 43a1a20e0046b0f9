"""Do flags and the tensors that go with them imply each other, and does every engine read the flag?"""

from __future__ import annotations

from collections.abc import Iterator

from pytest_specdecode import engines
from pytest_specdecode.checks.keys import layer_key
from pytest_specdecode.checks.registry import Context, Skip, check
from pytest_specdecode.findings import Finding

#: Per flag: the setting of the engine models, the stem of its tensors, and its usual key.
_NORMS = (
    ("norm-before-fc", "input_norm", "norm_before_fc"),
    ("fc-norm", "fc_norm", "fc_norm"),
)


@check(
    "weights.biases",
    title="bias tensors are there exactly where a flag says",
    why="A bias that the configuration does not announce is dropped; one that it announces and the file lacks is not zero.",
    needs=("config", "headers"),
    faults=(
        "bias-dropped",
        "bias-missing",
    ),
    cost="greedy acceptance about 0.07 for an EAGLE draft whose fc lost its bias (vllm issue 11126)",
    example={"attention_bias": True},
    fix="state the flag that goes with the biases, or fold them away before export; serve with an engine that reads the flag",
)
def biases(context: Context) -> Iterator[Finding]:
    """Biases against their flags, and a flag that an engine does not read."""
    binding = context.draft.binding
    assert binding is not None, "the registry runs these checks only where the family is known"
    owned = [tensor for tensor in binding.expected.values() if tensor.check == "weights.biases"]
    extra = [
        binding.stored[tensor.name] for tensor in owned if tensor.need == "never" and tensor.name in binding.stored
    ]
    absent = [tensor.name for tensor in owned if tensor.need == "required" and tensor.name not in binding.stored]
    lacking = [context.draft.stored_name(name) for name in absent[:12]]
    if extra:
        yield context.fail(
            f"{len(extra)} bias{'' if len(extra) == 1 else 'es'} without a flag, first {extra[0]}",
            where=extra[0],
            got=extra[:12],
            due="no bias, or the flag that announces it (attention_bias; bias for fc)",
            fix="set the flag, or fold the bias away before export",
            fault="bias-dropped",
        )
    if lacking and context.draft.checkpoint.has_weights:
        yield context.fail(
            f"{len(absent)} announced bias{' is' if len(absent) == 1 else 'es are'} not in the weights, "
            f"first {lacking[0]}",
            where=lacking[0],
            got="absent",
            due=lacking,
            fix="clear the flag, or export the biases",
            fault="bias-missing",
        )
    yield from _unread_biases(context)


@check(
    "weights.flags",
    title="norms are there exactly where a flag says, and every engine reads the flag as the file means it",
    why="An engine that does not read the flag builds no such norm and drops its weights without a word: fc reads other features.",
    needs=("config", "headers"),
    families=("eagle3", "eagle3-mla", "eagle4", "peagle"),
    faults=("tensor-missing",),
    cost="accepted length 1.00 with the norm before fc left out, 2.39 to 2.68 with it (sglang PR 32334, tokenspeed PR 526)",
    example={"norm_before_residual": True},
    fix="state the flag that goes with the tensors, in the places that the engine in use reads",
)
def flags(context: Context) -> Iterator[Finding]:
    """Norms before fc, norms of q and k, and the flags that go with no tensor."""
    stated = context.spec.eagle3
    if stated is None:
        raise Skip("this draft has none of the flags")
    for setting, stem, key in _NORMS:
        flag = stated.norm_before_fc if setting == "norm-before-fc" else stated.fc_norm
        yield from _norm(context, setting, stem, key, flag=flag)
    if stated.norm_before_fc and stated.fc_norm:
        yield context.fail(
            "norm_before_fc and fc_norm are both true: the taps are normed twice",
            where=f"config.json: {_place(context, 'fc_norm')}",
            got={"norm_before_fc": True, "fc_norm": True},
            due="one of them",
            fix="clear the flag that the draft was not trained with",
        )
    yield from _head_norms(context)
    if stated.norm_before_residual is not None:
        yield from _unread(context, "norm-before-residual", "norm_before_residual", meant=stated.norm_before_residual)
    if stated.norm_output:
        yield from _unread(context, "norm-output", "norm_output", meant=True)


def _norm(context: Context, setting: str, stem: str, key: str, *, flag: bool) -> Iterator[Finding]:
    """A flag against its tensors, and against what each engine reads."""
    binding = context.draft.binding
    assert binding is not None, "the registry runs these checks only where the family is known"
    owned = [
        name for name, item in binding.expected.items() if item.check == "weights.flags" and name.startswith(f"{stem}.")
    ]
    held = [name for name in owned if name in binding.stored]
    absent = [name for name in owned if name not in binding.stored]
    if held and not flag:
        yield context.fail(
            f"{binding.stored[held[0]]} is in the weights, and {key} is not true"
            + (f"; {len(held) - 1} more norms are without the flag" if len(held) > 1 else ""),
            where=binding.stored[held[0]],
            got=[binding.stored[name] for name in held],
            due=f"{key} true, or no such norm",
            fix=f"state {key}: true where engines read it",
            outcomes=context.read_as(setting, True),
        )
    elif flag and absent and context.draft.checkpoint.has_weights:
        lacking = [context.draft.stored_name(name) for name in absent]
        yield context.fail(
            f"{key} is true, and {lacking[0]} is not in the weights"
            + (f"; {len(lacking) - 1} more norms are not" if len(lacking) > 1 else ""),
            where=lacking[0],
            got="absent",
            due={context.draft.stored_name(name): list(binding.expected[name].shape) for name in absent[:12]},
            fix=f"export the norm, or clear {key}",
            fault="tensor-missing",
        )
    elif flag:
        yield from _unread(context, setting, key, meant=True)


def _head_norms(context: Context) -> Iterator[Finding]:
    """Norms of q and k: which class has a place for them hangs on the label, and not on a flag."""
    normed = [layer for layer in context.spec.layers if getattr(layer.attention, "qk_norm", False)]
    if not normed:
        return
    outcomes = context.read_as("qk-norm", True, "tensor-unexpected")
    if any(outcome.outcome in engines.UNFIT for outcome in outcomes.values()):
        yield context.warn(
            "q and k are normed per head, and not every engine's class for the label has such norms",
            where=context.draft.stored_name(f"layers.{normed[0].index}.self_attn.q_norm.weight"),
            got=context.spec.architectures,
            due="a label whose class norms q and k",
            fix="state the label of a class that has them, such as Eagle3Qwen3ForCausalLM",
            outcomes=outcomes,
        )


def _unread(context: Context, setting: str, key: str, *, meant: bool) -> Iterator[Finding]:
    """A flag that some engine takes otherwise than the file means it."""
    outcomes = context.read_as(setting, meant)
    if any(outcome.outcome in engines.UNFIT for outcome in outcomes.values()):
        yield context.warn(
            f"{key} is {str(meant).lower()}, and not every engine reads it so",
            where=f"config.json: {_place(context, key)}",
            got=meant,
            due="a value that every engine reads",
            fix=_everywhere(
                context, setting, key, [name for name in outcomes if outcomes[name].outcome in engines.UNFIT]
            ),
            outcomes=outcomes,
        )


def _everywhere(context: Context, setting: str, key: str, unfit: list[str]) -> str:
    """Where the flag would have to stand for the engines `unfit`, or that nothing in the file helps."""
    looked = engines.looks_in(setting, context.draft, unfit)
    places = dict.fromkeys(places[0] for places in looked.values() if places)
    config = context.draft.checkpoint.config
    free = [place for place in places if engines.at(config, place) is None]
    return f"state it as {' and as '.join(free)} too" if free else f"serve with an engine that reads {key}"


def _place(context: Context, key: str) -> str:
    """Where the configuration states a flag of EAGLE3, under whichever of its spellings."""
    config = context.draft.checkpoint.config
    spellings = {
        "fc_norm": ("fc_norm", "use_aux_norm", "enable_fc_norm"),
        "norm_output": ("norm_output", "return_hidden_post_norm"),
    }
    for name in spellings.get(key, (key,)):
        for place in (f"eagle_config.{name}", name):
            if engines.at(config, place) is not None:
                return place
    return key


def _unread_biases(context: Context) -> Iterator[Finding]:
    """Flags of biases that an engine does not read."""
    spec = context.spec
    announced = {"qkv-bias": layer_key(context, "attention_bias"), "fc-bias": "bias"}
    config = context.draft.checkpoint.config
    if spec.eagle3 is None or not spec.eagle3.fc_bias:
        del announced["fc-bias"]
    if engines.at(config, announced["qkv-bias"]) is not True:
        del announced["qkv-bias"]
    for setting, key in announced.items():
        outcomes = context.read_as(setting, True, "bias-dropped")
        kinds = {outcome.outcome for outcome in outcomes.values()}
        if not kinds & set(engines.UNFIT):
            continue
        yield context.warn(
            f"{key} is true; no engine builds such biases"
            if kinds <= set(engines.UNFIT)
            else f"{key} is true, and not every engine builds such biases",
            where=f"config.json: {key}",
            got=True,
            due=False,
            fix="fold the biases away before export, or serve with an engine that builds them",
            fault="bias-dropped",
            outcomes=outcomes,
        )
