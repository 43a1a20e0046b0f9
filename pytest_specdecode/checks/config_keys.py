"""Is every key of the configuration read, and does every key that is read hold a value?"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pytest_specdecode import engines
from pytest_specdecode.checks.known_keys import MISTAKEN, READ, UNREAD, keys_of
from pytest_specdecode.checks.registry import Context, check
from pytest_specdecode.engines.hf_config import refused_nulls
from pytest_specdecode.findings import Finding, Outcome

#: Keys of which a check of their own says which engine reads them.
_ELSEWHERE = frozenset(
    (
        *("eagle_aux_hidden_state_layer_ids", "target_layer_ids", "aux_hidden_state_layer_ids"),
        *("norm_before_residual", "norm_before_fc", "fc_norm", "use_aux_norm", "norm_output"),
        *("attention_bias", "bias"),
        *("is_neox_style", "rope_is_neox_style"),
        *("block_size", "sample_from_anchor", "query_zero_predicts_next"),
        *("is_causal", "causal", "sliding_window_non_causal"),
        *("attention_value_scale", "attention_sink_bias"),
    )
)

#: Keys that speak of a draft wherever they stand.
_DRAFT_KEY = re.compile(
    r"dflash|dspark|eagle|nextn|mtp|medusa|hydra|speculator|markov|draft|mask_token|block_size|target_layer_ids"
)

#: Below this share of letters in common two keys are two keys.
_NEAR = 0.87


@check(
    "config.unread-keys",
    title="no key is misspelled, and none is passed over by an engine at a loss",
    why="A key that nobody reads is an option that is not in force: readers take their default and say nothing.",
    faults=("key-misspelled",),
    cost="accepted length 2.39 to 2.68 where the norm is read that engines ignored before, 1.00 without (sglang PR 32334)",
    example={"eagle_config": {"aux_hidden_state_layer_ids": [2, 8, 13]}},
    fix="state the option under the key that every engine in use reads, or serve with one that reads it",
)
def unread_keys(context: Context) -> Iterator[Finding]:
    """Misspelled keys, then keys that an engine passes over."""
    config = context.draft.checkpoint.config
    # The other keys of a file that describes a target as well are that model's own business.
    embedded = context.draft.spec is not None and context.draft.spec.packaging == "embedded"
    for key, meant in _misspelled(config):
        if embedded and not _DRAFT_KEY.search(meant):
            continue
        yield context.warn(
            f"{key} is a key that no reader looks for; {meant} is one that readers do",
            where=f"config.json: {key}",
            got=engines.at(config, key),
            due=meant,
            fix=f"state it as {meant}, or leave it out",
            fault="key-misspelled",
        )
    for key, outcomes in context.ignored().items():
        if key.rpartition(".")[2] in _ELSEWHERE:
            continue
        everywhere = all(outcome.outcome == "serves wrong" for outcome in outcomes.values())
        told = next(outcome.message for outcome in outcomes.values() if outcome.outcome == "serves wrong")
        yield context.fail(
            f"{key} is passed over by every engine: {told}"
            if everywhere
            else f"{key} is passed over by {_some(outcomes)}: {told}",
            severity="error" if everywhere else "warning",
            where=f"config.json: {key}",
            got=engines.at(config, key),
            due="a key that is read",
            outcomes=outcomes,
        )


@check(
    "config.null-values",
    title="no key is null where a reader wants a value",
    why="Configuration classes check types since transformers 5: a null where a number or a boolean is due stops the server.",
    faults=("null-value",),
    example={"use_cache": None},
    fix="leave the key out, or state its value",
)
def null_values(context: Context) -> Iterator[Finding]:
    """One finding per key that is null where a configuration class wants a value; an error where an engine is known to stop at it."""
    stops = context.null_stops()
    refused = refused_nulls(context.draft)
    for key in _nulls(context.draft.checkpoint.config):
        refusing = [name for name, keys in stops.items() if key in keys]
        if not refusing and key not in refused:
            continue
        stated = engines.outcomes("null-value", context.spec, context.engines)
        outcomes = {
            name: outcome if name in refusing else Outcome(outcome="unknown") for name, outcome in stated.items()
        }
        yield context.fail(
            f"{key} is null where configuration classes want a value",
            where=f"config.json: {key}",
            got=None,
            due="a value, or no such key",
            fix=f"leave {key} out, or state its value",
            fault="null-value",
            outcomes=outcomes,
            severity="error" if refusing else "warning",
        )


def _nulls(config: Mapping[str, Any]) -> Iterator[str]:
    """The keys that are null, those of the layers of a speculators file with their section."""
    yield from (key for key, value in config.items() if value is None)
    layer = config.get("transformer_layer_config")
    if isinstance(layer, Mapping):
        yield from (f"transformer_layer_config.{key}" for key, value in layer.items() if value is None)


def _some(outcomes: Mapping[str, Outcome]) -> str:
    count = sum(outcome.outcome == "serves wrong" for outcome in outcomes.values())
    return "one engine" if count == 1 else f"{count} engines"


def _misspelled(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys that nobody looks for and that are near one that somebody does, with that one."""
    yield from _misspelled_in("", config)
    for section in (*(name for name in READ if name), "transformer_layer_config", "text_config"):
        if isinstance(values := config.get(section), Mapping):
            yield from _misspelled_in(section, values)


def _misspelled_in(section: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    own = section if section in READ else ""
    known = keys_of(own)
    prefix = f"{section}." if section else ""
    for key, value in values.items():
        if value is None or not isinstance(key, str) or len(key) > 80 or key in known or key in UNREAD:
            continue
        if (meant := MISTAKEN.get(f"{prefix}{key}")) is not None:
            yield f"{prefix}{key}", meant
            continue
        # Other ids of the tokenizer are one letter apart, and mean what they say.
        if key in READ[""] or (key.endswith(("_token_id", "_token_index")) and "mask" not in key):
            continue
        near = difflib.get_close_matches(key, known, n=1, cutoff=_NEAR)
        if near and near[0] not in values:
            yield f"{prefix}{key}", f"{prefix}{near[0]}"
