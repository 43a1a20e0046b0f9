"""Odd values in a configuration, and what findings say of them.

What goes wrong without this file: a check that breaks on a value that JSON may hold, where a finding was due; findings that show a value
or a key that is not in the file, that ask for what cannot be, or that say two things of one fault; terminal codes that reach a terminal.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from pytest_specdecode import check_draft, checks, testing
from pytest_specdecode.api import open_context
from pytest_specdecode.checks.dflash import BLOCKS
from pytest_specdecode.checks.fused_kv import no_stack
from pytest_specdecode.checks.registry import REGISTRY
from pytest_specdecode.families import FAMILIES
from pytest_specdecode.findings import CheckResult, Finding
from pytest_specdecode.plugin.reporting import table_of_checks
from pytest_specdecode.plugin.results import failure_text
from pytest_specdecode.report import DraftReport
from pytest_specdecode.report.terminal import block

#: As large as JSON's 1e400 would be; Python shows no more than 4300 digits of a number.
BIG = 10**400
ODD: list[Any] = [None, True, -1, 0, BIG, "x", [], [1], {}, [[1]], ["x"]]
#: Keys that are read of a block draft and that no tiny one states.
UNUSUAL = ("dflash_config.causal", "dflash_query_causal", "sliding_window", "use_sliding_window", "rope_scaling")
CONFIG_ONLY = [item for item in REGISTRY.values() if set(item.needs) <= {"config"}]
SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64, "use_sliding_window": True}


def _places(config: dict[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in config.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from _places(value, (*prefix, key))


def _with(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    section = changed
    for key in place[:-1]:
        section = section.setdefault(key, {})
    section[place[-1]] = value
    return changed


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_no_value_breaks_a_check_of_the_configuration(family: str, tmp_path: Path) -> None:
    config = testing.tiny_config(family)
    unusual = [tuple(key.split(".")) for key in UNUSUAL] if family in BLOCKS else []
    for place in [*_places(config), *unusual]:
        for odd in ODD:
            (tmp_path / "config.json").write_text(json.dumps(_with(config, place, odd)))
            context = open_context(tmp_path)
            for item in CONFIG_ONLY:
                try:
                    checks.run(item, context)
                except Exception as error:
                    raise AssertionError(f"{item.id} breaks on {'.'.join(place)} = {str(odd)[:20]}") from error


def _judge(path: Path, check: str, family: str, serve: str = "", **changes: Any) -> CheckResult:
    return check_draft(testing.write_tiny(path, family, **changes), checks=[check], serve=serve or None)[check]


def _rewritten(path: Path, check: str, family: str, **changes: Any) -> CheckResult:
    """The check on a tiny draft whose configuration alone is changed."""
    testing.write_tiny(path, family)
    (path / "config.json").write_text(json.dumps({**testing.tiny_config(family), **changes}))
    return check_draft(path, checks=[check])[check]


def _only(result: CheckResult) -> Finding:
    (finding,) = result.findings
    return finding


# --- block drafts ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["dflash", "domino"])
@pytest.mark.parametrize("value", [[1], {}, 1])
def test_a_causality_that_is_no_flag_is_a_finding_about_its_type(family: str, value: Any, tmp_path: Path) -> None:
    assert not _rewritten(tmp_path, "dflash.causality", family, is_causal=value).findings
    finding = _only(_rewritten(tmp_path, "config.types", family, is_causal=value))
    assert (finding.where, finding.got, finding.due) == ("config.json: is_causal", value, "true or false")


def test_causality_shows_what_the_file_states(tmp_path: Path) -> None:
    nested = {**testing.tiny_config("dflash")["dflash_config"], "causal": True}
    config = {**testing.tiny_config("dflash"), **SLIDING, "layer_types": ["full_attention"] * 2}
    config = {key: value for key, value in config.items() if key != "is_causal"} | {"dflash_config": nested}
    (tmp_path / "config.json").write_text(json.dumps(config))
    finding = _only(check_draft(tmp_path, checks=["dflash.causality"])["dflash.causality"])
    assert (finding.where, finding.got) == ("config.json: dflash_config.causal", {"dflash_config.causal": True})


def test_a_mask_beside_an_embedding_without_rows(tmp_path: Path) -> None:
    finding = _only(_rewritten(tmp_path, "dflash.mask-token", "dflash", vocab_size=0))
    assert finding.due == "a table that has rows"


def test_a_target_without_layers_is_the_fault_and_not_the_list(tmp_path: Path) -> None:
    finding = _only(_rewritten(tmp_path, "taps.range", "dflash", num_target_layers=0))
    assert (finding.where, finding.got, finding.due) == ("config.json: num_target_layers", 0, "more than 17")


def test_one_tap_outside_is_no_output_of_a_layer(tmp_path: Path) -> None:
    finding = _only(_rewritten(tmp_path, "taps.range", "dflash", num_target_layers=17))
    assert finding.message == "17 is no output of a layer of a target with 17 layers"


def _without(path: Path, ending: str) -> Path:
    testing.write_tiny(path, "dflash")
    file = path / "model.safetensors"
    save_file({name: value for name, value in load_file(file).items() if not name.endswith(ending)}, file)
    return path


def test_a_missing_k_norm_has_one_outcome_per_engine(tmp_path: Path) -> None:
    found = check_draft(_without(tmp_path, "layers.1.self_attn.k_norm.weight"), checks=["weights", "fused-kv"])
    missing, axis = _only(found["weights.missing"]), _only(found["fused-kv.k-norm"])
    for engine in ("sglang", "vllm"):
        assert axis.outcomes[engine].outcome == missing.outcomes[engine].outcome == "serves wrong"


def test_the_path_s_finding_shows_values_and_no_slugs(tmp_path: Path) -> None:
    found = check_draft(_without(tmp_path, "layers.1.self_attn.k_norm.weight"), checks=["fused-kv.engine-path"])
    for finding in found["fused-kv.engine-path"].findings:
        assert (finding.where, finding.got, finding.due) == ("layer 1", {"k_norm": "none"}, {"k_norm": "per-head"})
    assert found["fused-kv.engine-path"].findings


# --- DSpark ---------------------------------------------------------------------------------------------------------------------------


def test_an_unknown_markov_head_type_is_shown(tmp_path: Path) -> None:
    finding = _only(_rewritten(tmp_path, "config.types", "dspark", markov_head_type="zorp"))
    assert finding.got == "zorp"
    assert finding.where == "config.json: markov_head_type"


def test_a_rank_of_zero_is_what_the_confidence_head_is_measured_by(tmp_path: Path) -> None:
    result = _rewritten(tmp_path, "dspark.heads", "dspark", markov_rank=0)
    (finding,) = (item for item in result.findings if "confidence head reads" in item.message)
    assert "markov_rank 0 gives 64" in finding.message
    assert "with_markov" not in finding.message


# --- configuration --------------------------------------------------------------------------------------------------------------------


def test_the_number_of_layers_is_named_where_it_stands(tmp_path: Path) -> None:
    layer = {**testing.tiny_config("xpress")["transformer_layer_config"], "num_hidden_layers": 1}
    finding = _only(_rewritten(tmp_path, "config.num-hidden-layers", "xpress", transformer_layer_config=layer))
    assert finding.where == "config.json: transformer_layer_config.num_hidden_layers"
    assert finding.message.startswith("1 layer is declared")


def test_a_null_label_of_the_packaging_is_due_the_family(tmp_path: Path) -> None:
    config = testing.tiny_config("dflash")
    layer = {key: value for key, value in config.items() if key not in ("architectures", "dflash_config")}
    packaged = {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": None,
        "speculators_config": {"algorithm": "dflash"},
        "aux_hidden_state_layer_ids": [2, 10, 18],
        "mask_token_id": 511,
        "block_size": 8,
        "transformer_layer_config": layer,
    }
    (tmp_path / "config.json").write_text(json.dumps(packaged))
    finding = _only(check_draft(tmp_path, checks=["config.family"])["config.family"])
    assert (finding.where, finding.got, finding.due) == ("config.json: speculators_model_type", None, "dflash")


def test_no_heads_are_due_as_many_as_the_rows_make(tmp_path: Path) -> None:
    finding = _only(_rewritten(tmp_path, "config.head-arithmetic", "dflash", num_attention_heads=0))
    assert (finding.got, finding.due) == (0, 4)


def test_zeros_have_no_sign(tmp_path: Path) -> None:
    testing.write_tiny(tmp_path, "eagle3")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 0
    save_file(tensors, file)
    finding = _only(check_draft(tmp_path, checks=["weights.degenerate"])["weights.degenerate"])
    assert str(finding.got["lm_head.weight"]) == "0.0"


# --- ranks ----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["eagle3", "eagle3-mla", "eagle1", "mtp", "dflash", "dspark", "peagle"])
def test_heads_divide_among_the_ranks_in_every_family_with_attention(family: str, tmp_path: Path) -> None:
    finding = _only(_judge(tmp_path, "serving.algorithm", family, "tp=3"))
    assert re.match(r"\d query heads do not divide among 3 ranks", finding.message)
    assert (finding.where, finding.got, finding.severity) == ("--draft-serve: tp", 3, "error")
    assert finding.outcomes["sglang"].outcome == finding.outcomes["vllm"].outcome == "stops"


@pytest.mark.parametrize(
    ("family", "serve"), [("eagle3", "tp=2"), ("eagle3", "tp=3 dp-attention=true"), ("medusa", "tp=3")]
)
def test_ranks_that_fit_or_of_which_nothing_is_known(family: str, serve: str, tmp_path: Path) -> None:
    assert not _judge(tmp_path, "serving.algorithm", family, serve).findings


def test_kv_heads_are_replicated_or_divide(tmp_path: Path) -> None:
    changes = {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 32}
    finding = _only(_judge(tmp_path, "serving.algorithm", "eagle3", "tp=6", **changes))
    assert finding.message.startswith("4 KV heads cannot be replicated over 6 ranks")
    assert finding.due == "tp of 1, 2, 4"


def test_a_number_of_ranks_beyond_any_machine_takes_no_time(tmp_path: Path) -> None:
    assert _judge(tmp_path, "serving.algorithm", "eagle3", f"tp={10**11}").status == "failed"


# --- shown ----------------------------------------------------------------------------------------------------------------------------


def test_a_message_is_shown_without_terminal_codes() -> None:
    result = CheckResult(id="made.up", status="failed", message="a \x1b[31mred\nline")
    assert failure_text(result) == r"a \x1b[31mred\nline"


def test_the_list_says_which_drafts_a_check_is_for() -> None:
    rows = {line.split()[0]: line for line in table_of_checks(REGISTRY.values()).splitlines()}
    assert "block drafts with K/V heads" in rows["fused-kv.k-norm"]
    assert "speculators packaging" in rows["speculators.structure"]
    assert all(item.applies or item.families for item in REGISTRY.values() if item.unless is not None)


def test_only_block_drafts_have_a_stack(tmp_path: Path) -> None:
    stacked = set()
    for family in FAMILIES:
        context = open_context(testing.write_tiny(tmp_path / family.name, family.name))
        stacked |= {family.name} if no_stack(context) is None else set()
    assert stacked <= set(BLOCKS)
    assert "dflash" in stacked


def test_codes_of_a_terminal_do_not_reach_the_summary() -> None:
    """Every line of the block, whatever a message or a reason holds."""
    raw = "a \x1b[31mred\nline"
    results = tuple(
        CheckResult(id=f"made.{status}", status=status, message=raw, figures={"x": 1}, expected=expected)
        for status in ("failed", "inconclusive", "passed")
        for expected in ("", raw)
    )
    report = DraftReport(path="x", name="x", description=raw, family=None, packaging=None, spec=None, results=results)
    for brief in (True, False):
        lines = [line.text for line in block(report, brief=brief, notes=True, is_told=lambda result, told=brief: told)]
        assert len(lines) > 4
        assert all(line.isprintable() for line in lines)
