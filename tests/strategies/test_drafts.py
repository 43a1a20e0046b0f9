"""The strategies of whole drafts promise configurations that nothing reports, faults that one check must report, and checkpoints that pass.

Either side can be wrong: a strategy draws what no exporter writes, or always the same; a check reports a sound file, or misses a fault on
one form of file of many; a fault that is drawn is none, or not the one that it says; an example that fails is too long to read.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

from pytest_specdecode import check_draft, open_draft
from pytest_specdecode.api import context_of
from pytest_specdecode.checkpoint import Checkpoint
from pytest_specdecode.checks import REGISTRY, Context, run
from pytest_specdecode.families import FAMILIES, load
from pytest_specdecode.strategies import (
    FAMILY_NAMES,
    FAULTY_CHECKS,
    PACKAGINGS,
    DraftFiles,
    MutatedConfig,
    checkpoints,
    draft_configs,
    draft_specs,
    mutated_configs,
)
from pytest_specdecode.strategies.drafts import draft_forms
from pytest_specdecode.strategies.faults import FAULTS, NOT_IN_CONFIG, value_at
from pytest_specdecode.strategies.forms import DRAWN, FORMS, Form, Picks, drawn, picks
from pytest_specdecode.strategies.namings import NAMINGS
from pytest_specdecode.testing import expected_tensors

FORM_IDS = [form.id for form in FORMS]
LOOKING = settings(
    database=None,
    deadline=None,
    derandomize=True,
    max_examples=400,
    phases=[Phase.generate],
    suppress_health_check=[*HealthCheck],
)
SHRINKING = settings(
    database=None, deadline=None, derandomize=True, max_examples=1000, phases=[Phase.generate, Phase.shrink]
)

#: Checks that read nothing but the configuration and the headers.
QUICK = [item for item in REGISTRY.values() if not {"tensors", "triton", "gpu", "trace"} & set(item.needs)]


def opened(config: dict[str, Any]) -> Context:
    """A configuration without weights, as a check sees it."""
    checkpoint = Checkpoint(Path("config"))
    checkpoint.config = json.loads(json.dumps(config))
    return context_of(load(checkpoint))


def reports(context: Context) -> list[str]:
    """What the checks fail or warn of."""
    results = [run(item, context) for item in QUICK]
    return [f"{result.id}: {result.message}" for result in results if result.status in ("failed", "warned")]


# --- configurations -----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_a_configuration_opens_as_what_it_is_and_nothing_reports_it(form: Form) -> None:
    """Every form, so that a check with a false alarm on one exporter's files shows here."""

    @settings(deadline=None, max_examples=12, derandomize=True)
    @given(picks())
    def check(pick: Picks) -> None:
        config = drawn(pick, form, {})
        context = opened(config)
        assert (context.spec.family, context.spec.packaging) == (form.family, form.packaging)
        assert context.draft.recognition.disagreement == ()
        assert reports(context) == []

    check()


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.data())
def test_the_arguments_are_what_the_configuration_opens_as(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(FAMILY_NAMES))
    packaging = data.draw(st.sampled_from([form.packaging for form in FORMS if form.family == family]))
    of_both = opened(data.draw(draft_configs(family=family, packaging=packaging))).spec
    assert (of_both.family, of_both.packaging) == (family, packaging)
    assert opened(data.draw(draft_configs(packaging=packaging))).spec.packaging == packaging
    assert opened(data.draw(draft_configs(family=family))).spec.family == family


def test_every_family_in_every_packaging_has_a_form() -> None:
    assert tuple(family.name for family in FAMILIES) == FAMILY_NAMES
    due = {(family.name, packaging) for family in FAMILIES for packaging in family.packagings}
    assert {(form.family, form.packaging) for form in FORMS} == due
    assert set(PACKAGINGS) == {packaging for _, packaging in due}
    assert len(set(FORM_IDS)) == len(FORMS)
    assert set(NAMINGS) <= set(FORM_IDS)


def test_all_forms_are_drawn() -> None:
    """None is left out of the families' draw, and the first is not all that is drawn."""
    seen = set()

    @settings(LOOKING, max_examples=800)
    @given(draft_forms(None, None))
    def look(chosen: tuple[Form, Picks]) -> None:
        seen.add(chosen[0].id)

    look()
    assert seen == set(FORM_IDS)


def test_every_value_that_may_be_drawn_is_drawn() -> None:
    """A key's later values too, wherever some form has the key."""
    seen: dict[str, set[Any]] = {key: set() for key in DRAWN}

    @LOOKING
    @given(draft_configs())
    def look(config: dict[str, Any]) -> None:
        nested = [value for value in config.values() if isinstance(value, dict)]
        for section in (config, *nested):
            for key in seen.keys() & section.keys():
                seen[key].add(section[key])

    look()
    assert {key: set(values) - seen[key] for key, values in DRAWN.items()} == {key: set() for key in DRAWN}


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.sampled_from(FORMS), picks())
def test_numbers_are_small_and_json_holds_them(form: Form, pick: Picks) -> None:
    config = drawn(pick, form, {})
    assert json.loads(json.dumps(config)) == config
    spec, tensors = expected_tensors(config, form.family)
    assert len(spec.layers) <= 4
    extents = [extent for tensor in tensors if tensor.need == "required" for extent in tensor.shape]
    assert all(extent is not None and extent <= 512 for extent in extents)


@settings(deadline=None, max_examples=60, derandomize=True)
@given(st.data())
def test_a_spec_is_the_one_that_is_read(data: st.DataObject) -> None:
    """Drawn alone or opened from the same configuration; with every extent that a shape needs."""
    family = data.draw(st.sampled_from(FAMILY_NAMES))
    spec = data.draw(draft_specs(family=family))
    assert spec.family == family
    sheet = next(item for item in FAMILIES if item.name == family)
    assert all(None not in tensor.shape for tensor in sheet.tensors(spec) if tensor.need == "required")


@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_a_spec_does_not_hang_on_the_door_it_is_read_through(form: Form) -> None:
    config = drawn(Picks([1] * 60), form, {})
    assert expected_tensors(config, form.family)[0] == opened(config).spec


# --- faults -------------------------------------------------------------------------------------------------------------------------------


def test_every_check_of_the_configuration_has_a_fault_or_a_reason() -> None:
    """A new check without an entry in the catalogue is not shown to see a fault in drawn files."""
    elsewhere = {"target", "serving", "trace"}
    due = {item.id for item in REGISTRY.values() if "config" in item.needs and not elsewhere & set(item.needs)}
    assert set(FAULTS) | set(NOT_IN_CONFIG) == due
    assert not set(FAULTS) & set(NOT_IN_CONFIG)
    assert tuple(FAULTS) == FAULTY_CHECKS


@pytest.mark.parametrize("id", FAULTY_CHECKS)
def test_a_fault_is_reported_by_its_check(id: str) -> None:
    """With the status that it says, and the sound twin is reported by none."""

    @settings(deadline=None, max_examples=15, derandomize=True)
    @given(mutated_configs(check=id))
    def check(mutated: MutatedConfig) -> None:
        assert mutated.check == id
        result = run(REGISTRY[id], opened(dict(mutated.config)))
        assert result.status == mutated.status, result
        assert reports(opened(mutated.sound)) == []

    check()


@pytest.mark.parametrize("id", FAULTY_CHECKS)
def test_every_form_that_has_room_for_a_fault_shows_each_change(id: str) -> None:
    """At the plainest values and at others, so that no form is drawn that then has no change."""
    for form in FAULTS[id].forms:
        for number in (0, 1, 5):
            sound = drawn(Picks([number] * 60), form, FAULTS[id].wishes)
            changes = list(FAULTS[id].changes(sound))
            assert changes, form.id
            for change in changes:
                result = run(REGISTRY[id], opened(change.made(sound)))
                assert result.status == change.status, (form.id, change, result)


@settings(deadline=None, max_examples=100, derandomize=True)
@given(mutated_configs())
def test_a_fault_is_one_key(mutated: MutatedConfig) -> None:
    """The record says what was there and what is, and nothing else differs."""
    sound, faulty = mutated.sound, dict(mutated.config)
    assert value_at(faulty, mutated.key) == mutated.got
    assert value_at(sound, mutated.key) == mutated.due
    assert sound != faulty
    assert _without(sound, mutated.key) == _without(faulty, mutated.key)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.data())
def test_the_arguments_of_a_fault_are_kept(data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(FORMS))
    mutated = data.draw(mutated_configs(family=form.family, packaging=form.packaging))
    assert mutated.family == form.family
    assert opened(mutated.sound).spec.packaging == form.packaging


def _without(config: dict[str, Any], key: str) -> dict[str, Any]:
    """The configuration without a key, and without the objects that then hold nothing."""
    parent, _, rest = key.partition(".")
    left = {name: value for name, value in config.items() if name != parent}
    inner = _without(config[parent], rest) if rest and isinstance(config.get(parent), dict) else {}
    return {**left, parent: inner} if inner else left


# --- checkpoints --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS, ids=FORM_IDS)
def test_a_checkpoint_passes_every_check(form: Form, tmp_path: Path) -> None:
    """Numbers included; what is left open asks for a target, for options, or for a forward that is not written."""
    place = iter(range(100))

    @settings(deadline=None, max_examples=2, derandomize=True, phases=[Phase.generate])
    @given(checkpoints(family=form.family, packaging=form.packaging).filter(lambda files: files.form == form.id))
    def check(files: DraftFiles) -> None:
        report = check_draft(files.write(tmp_path / str(next(place))))
        assert (report.drafts[0].family, report.drafts[0].packaging) == (form.family, form.packaging)
        assert [str(result) for result in report if result.status in ("failed", "warned")] == []

    check()


@settings(deadline=None, max_examples=80, derandomize=True)
@given(files=checkpoints())
def test_a_checkpoint_s_headers_are_the_draft_s(tmp_path_factory: pytest.TempPathFactory, files: DraftFiles) -> None:
    """Under whatever names and in however many files: every tensor is found, none is left over, and the spec is the same."""
    path = files.write(tmp_path_factory.mktemp("draft"))
    draft = open_draft(path)
    assert draft.spec is not None
    assert draft.binding is not None
    assert draft.spec.family == files.family
    assert (draft.binding.missing, draft.binding.unexpected, draft.binding.twice) == ((), (), ())
    assert set(draft.checkpoint.tensors) == set(files.tensors)
    written = sorted(file.name for file in path.glob("*.safetensors"))
    assert len(written) == min(files.shards, len(files.tensors))
    assert (path / "model.safetensors.index.json").exists() == (len(written) > 1)
    assert sum(file.stat().st_size for file in path.iterdir()) < 1_000_000


@pytest.mark.parametrize(("form", "naming"), [(form, naming) for form in NAMINGS for naming in NAMINGS[form]])
def test_a_draft_by_other_names_is_the_same_draft(form: str, naming: str, tmp_path: Path) -> None:
    """Every naming of the catalogue: the usual names are gone, and what is read is what was there."""
    config = drawn(Picks([1] * 60), next(item for item in FORMS if item.id == form), {})
    usual, other = (DraftFiles(form=form, config=config, naming=each) for each in ("own", naming))
    assert set(usual.tensors) != set(other.tensors)
    own, exported = (open_draft(files.write(tmp_path / files.naming)) for files in (usual, other))
    assert own.binding is not None
    assert exported.binding is not None
    assert set(own.binding.stored) == set(exported.binding.stored)
    assert (exported.binding.missing, exported.binding.unexpected) == ((), ())
    assert own.spec == exported.spec


def test_every_way_to_write_one_family_is_drawn() -> None:
    seen: dict[str, set[Any]] = {"naming": set(), "shards": set(), "joined": set(), "form": set()}

    @LOOKING
    @given(checkpoints(family="eagle1"))
    def look(files: DraftFiles) -> None:
        for name, values in seen.items():
            values.add(getattr(files, name))

    look()
    assert seen == {
        "naming": {"own", "prefixed", "mistral", "minicpm"},
        "shards": {1, 2, 3},
        "joined": {False, True},
        "form": {"eagle1-plain", "eagle1-plain-nested"},
    }


@pytest.mark.parametrize(("name", "centre"), [("qwen", 0.0), ("mimo", 1.0)])
def test_norms_are_stored_for_the_factor_that_the_layer_has(name: str, centre: float) -> None:
    """1 + w for Qwen's layers, w for MiMo's."""
    form = next(form for form in FORMS if form.name == name)
    files = DraftFiles(form=form.id, config=drawn(Picks([0] * 60), form, {}))
    norms = [value for tensor, value in files.tensors.items() if tensor.endswith("input_layernorm.weight")]
    assert norms
    assert all(abs(float(value.float().mean()) - centre) < 0.1 for value in norms)


def test_equal_records_write_equal_files(tmp_path: Path) -> None:
    """A checkpoint that is copied out of a failure is the same checkpoint."""
    files = find(checkpoints(family="dflash2"), lambda files: files.shards == 2, settings=SHRINKING)
    again = eval(repr(files), {"DraftFiles": DraftFiles})
    for name, made in (("one", files), ("other", again)):
        made.write(tmp_path / name)
    for file in (tmp_path / "one").iterdir():
        assert file.read_bytes() == (tmp_path / "other" / file.name).read_bytes()


def test_drawing_and_printing_a_checkpoint_makes_no_tensor() -> None:
    files = find(checkpoints(), lambda files: files.shards == 3, settings=SHRINKING)
    assert re.match(r"DraftFiles\(form='eagle1-plain', config=\{", repr(files))
    assert "tensors" not in vars(files)


def test_a_failing_example_prints_what_was_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    """And not what it was made from."""

    @settings(deadline=None, max_examples=1, derandomize=True, phases=[Phase.generate])
    @given(draft_configs(), draft_specs(), mutated_configs())
    def fail(config: dict[str, Any], spec: Any, mutated: MutatedConfig) -> None:
        raise AssertionError

    with pytest.raises(AssertionError) as caught:
        fail()
    # Python 3.10 has no notes, and Hypothesis prints there.
    notes = "\n".join(getattr(caught.value, "__notes__", [])) + capsys.readouterr().out
    assert "config={'architectures'" in notes
    assert "spec=DraftSpec(" in notes
    assert "mutated=MutatedConfig(" in notes
    assert "Picks" not in notes


# --- shrinking ----------------------------------------------------------------------------------------------------------------------------

PLAIN_EAGLE1 = {
    "architectures": ["EagleLlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "bias": True,
}
PLAIN_DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "vocab_size": 64,
    "tie_word_embeddings": False,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "is_causal": False,
    "layer_types": ["full_attention"],
    "dtype": "bfloat16",
    "block_size": 4,
    "num_target_layers": 8,
    "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0], "block_size": 4},
}


def test_whatever_fails_shrinks_to_the_plainest_draft() -> None:
    """The first family, its usual form, the first of every value."""
    assert find(draft_configs(), lambda config: True, settings=SHRINKING) == PLAIN_EAGLE1


def test_a_reader_that_drops_windows_fails_on_one_sliding_layer() -> None:
    """Of all block drafts, the first family's plain form; nothing else is odd in it."""
    found = find(
        draft_configs(),
        lambda config: (
            any(layer.layer_type == "sliding_attention" for layer in opened(config).spec.layers)
            and opened(config).spec.block is not None
        ),
        settings=SHRINKING,
    )
    slides = {"layer_types": ["sliding_attention"], "sliding_window": 8, "use_sliding_window": True}
    assert found == {**PLAIN_DFLASH, **slides}


def test_a_check_that_misses_a_fault_fails_on_the_plainest_form_of_it() -> None:
    """As if taps.order knew nothing of the speculators packaging."""
    found = find(
        mutated_configs(check="taps.order"),
        lambda mutated: "speculators_config" in mutated.config,
        settings=SHRINKING,
    )
    assert (found.family, found.key) == ("dflash", "aux_hidden_state_layer_ids")
    assert (found.due, found.got) == ([2, 3], [3, 2])
    assert found.config["transformer_layer_config"]["num_hidden_layers"] == 1


def test_a_reader_that_takes_one_file_for_all_fails_on_two_shards() -> None:
    """Of a draft as small as any, with the family's own names."""
    found = find(checkpoints(), lambda files: files.shards > 1 and files.family == "dflash", settings=SHRINKING)
    assert found == DraftFiles(form="dflash-plain", config=PLAIN_DFLASH, naming="own", joined=False, shards=2, seed=0)
