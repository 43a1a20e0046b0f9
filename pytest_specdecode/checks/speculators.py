"""What the `speculators` packaging must hold around a draft: algorithm, proposals, verifier, layer configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pytest_specdecode import engines
from pytest_specdecode.checks.registry import Context, check
from pytest_specdecode.findings import Finding

#: Keys that engines read at start, as dotted paths under speculators_config.
_READ = ("proposal_methods", "verifier.name_or_path")
#: Keys that the library's own classes demand beside them.
_DEMANDED = ("algorithm", "default_proposal_method", "verifier.architectures")


def _is_not_packaged(context: Context) -> str | None:
    return None if context.spec.packaging == "speculators" else "the draft is not in the speculators packaging"


@check(
    "speculators.structure",
    title="speculators_config and transformer_layer_config are whole, and ask for what the draft can give",
    why="The packaging carries what the server needs to start: how many tokens to propose, for which verifier, with which layers.",
    unless=_is_not_packaged,
    applies="drafts in the speculators packaging",
    faults=(
        "speculators-structure",
        "speculators-key-missing",
        "speculators-layer-config",
        "speculators-layer-type",
        "tokens-exceed-block",
    ),
    cost="accepted length 2.74 with a block of 5, 1.31 with 7 tokens asked of it (vllm PR #41834)",
    example={
        "family": "xpress",
        "speculators_config": {
            "algorithm": "xpress",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 0}],
            "verifier": {"name_or_path": "target", "architectures": ["Qwen3ForCausalLM"]},
        },
    },
    fix="export the draft with the speculators library, which writes all of it",
)
def structure(context: Context) -> Iterator[Finding]:
    """Absent keys, values that cannot be, more tokens than a block drafts, and layers that an engine does not build."""
    config = context.draft.checkpoint.config
    nested = config.get("speculators_config")
    if nested is not None and not isinstance(nested, Mapping):
        yield _wrong(context, "speculators_config", nested, "an object")
    else:
        yield from _absent(context, nested or {})
        yield from _values(context, nested or {})
    yield from _layer_config(context, config.get("transformer_layer_config"))


def _absent(context: Context, nested: Mapping[str, Any]) -> Iterator[Finding]:
    """One finding for all keys that are not there."""
    read = [key for key in _READ if _at(nested, key) is None]
    absent = [*read, *(key for key in _DEMANDED if _at(nested, key) is None)]
    if absent:
        where = f"config.json: speculators_config.{absent[0]}" if nested else "config.json: speculators_config"
        yield context.warn(
            f"{', '.join(absent)} {'is' if len(absent) == 1 else 'are'} not stated",
            where=where,
            got=None,
            due=[f"speculators_config.{key}" for key in absent],
            fix="state them as the speculators library writes them",
            fault="speculators-structure" if read else "speculators-key-missing",
        )


def _values(context: Context, nested: Mapping[str, Any]) -> Iterator[Finding]:
    """What is stated and cannot be; that the algorithm is another than the type's is config.family's to say."""
    algorithm, default = nested.get("algorithm"), nested.get("default_proposal_method")
    if algorithm is not None and not isinstance(algorithm, str):
        yield _wrong(context, "speculators_config.algorithm", algorithm, "a name")
    verifier = nested.get("verifier")
    if verifier is not None and not isinstance(verifier, Mapping):
        yield _wrong(context, "speculators_config.verifier", verifier, "an object")
    methods = nested.get("proposal_methods")
    if methods is None:
        return
    if not isinstance(methods, list) or not methods:
        yield _wrong(context, "speculators_config.proposal_methods", methods, "a list with one method or more")
        return
    for index, method in enumerate(methods):
        place = f"speculators_config.proposal_methods[{index}]"
        if not isinstance(method, Mapping):
            yield _wrong(context, place, method, "an object")
        elif (tokens := method.get("speculative_tokens")) is not None:
            yield from _tokens(context, f"{place}.speculative_tokens", tokens)
    types = [method.get("proposal_type") for method in methods if isinstance(method, Mapping)]
    if default is not None and any(types) and default not in types:
        yield _wrong(context, "speculators_config.default_proposal_method", default, [item for item in types if item])


def _tokens(context: Context, place: str, tokens: Any) -> Iterator[Finding]:
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        yield _wrong(context, place, tokens, "1 or more")
        return
    block = context.spec.block
    if block is not None and block.variant != "peagle" and block.block_size is not None and tokens > block.block_size:
        yield context.fail(
            f"{tokens} tokens are to be proposed of a block of {block.block_size} rows",
            where=f"config.json: {place}",
            got=tokens,
            due=block.block_size if block.sample_from_anchor else block.block_size - 1,
            fix="propose as many tokens as rows draft",
            fault="tokens-exceed-block",
        )


def _layer_config(context: Context, layer: Any) -> Iterator[Finding]:
    where = "config.json: transformer_layer_config"
    if not isinstance(layer, Mapping) or not layer:
        yield context.fail(
            "transformer_layer_config is not there" if layer is None else "transformer_layer_config states no layer",
            where=where,
            got=layer,
            due="the configuration of a layer",
            fix="state the layers' sizes and model_type there",
            fault="speculators-layer-config",
        )
        return
    kind = layer.get("model_type")
    if kind is not None and not isinstance(kind, str):
        yield _wrong(context, "transformer_layer_config.model_type", kind, "a name")
        return
    outcomes = engines.outcomes("speculators-layer-type", context.spec, context.engines)
    if kind is None or any(outcome.outcome in engines.UNFIT for outcome in outcomes.values()):
        yield context.warn(
            "model_type is not stated, so each reader takes a class of its own"
            if kind is None
            else f"layers of type {kind}, which not every engine builds for {context.spec.family}",
            where=f"{where}.model_type",
            got=kind,
            due="a type that the engine builds",
            fix="state the class that the layers were trained as",
            fault="speculators-layer-type",
        )


def _wrong(context: Context, place: str, got: Any, due: Any) -> Finding:
    key = place.rpartition(".")[2]
    return context.fail(
        f"{key} is not {due}" if isinstance(due, str) else f"{key} is none of those that are listed",
        where=f"config.json: {place}",
        got=got,
        due=due,
        fix="state it as the speculators library writes it",
    )


def _at(nested: Mapping[str, Any], key: str) -> Any:
    """The value at the dotted `key`; what is no object counts as stated, and is reported as such."""
    value: Any = nested
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return value
        value = value.get(part)
    return value
