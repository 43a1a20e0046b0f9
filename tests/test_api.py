"""The script door: `open_draft`, `check_draft` and the package root.

What these catch: a result that is missing, or one for a check that was not asked for; a selection that is misread; a target or an engine
that is taken silently; a defect of one check that takes the others with it; torch imported before a check needs it.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import pytest_specdecode
from pytest_specdecode import checks as rules
from pytest_specdecode import engines
from pytest_specdecode.api import check_draft, open_context, open_draft
from pytest_specdecode.errors import CheckpointError, DraftError, UnknownFamilyError
from pytest_specdecode.findings import Finding
from pytest_specdecode.report import Report
from pytest_specdecode.target import Target
from pytest_specdecode.testing import tiny_config, write_tiny

FAMILIES = ("eagle3", "eagle3-mla", "dflash")


@pytest.fixture(scope="module", params=FAMILIES)
def good(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A whole tiny draft: its family and its directory."""
    return request.param, write_tiny(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("eagle3"), "eagle3")


def test_open_draft_gives_family_spec_and_tensors(good: tuple[str, Path]) -> None:
    family, path = good
    draft = open_draft(path)
    assert draft.spec is not None
    assert draft.spec.family == family
    assert draft.path == path
    assert draft.binding is not None
    assert not draft.binding.missing
    assert open_draft(str(path)).spec == draft.spec


def test_a_whole_draft_has_one_result_per_check_and_none_fails(good: tuple[str, Path]) -> None:
    family, path = good
    report = check_draft(path)
    assert isinstance(report, Report)
    assert [result.id for result in report] == list(rules.REGISTRY)
    assert report.ok, str(report)
    found = report.to_dict()["drafts"][0]
    assert (found["path"], found["family"], found["packaging"]) == (str(path), family, "plain")
    json.dumps(report.to_dict(), allow_nan=False)
    assert report["weights.finite"].status == "passed"
    assert report["layers.build"].status == "passed"


def test_checks_are_chosen_by_id_and_by_group(eagle3: Path) -> None:
    def ids(**selection: object) -> list[str]:
        return [result.id for result in check_draft(eagle3, **selection)]  # type: ignore[arg-type]

    group = [id for id in rules.REGISTRY if id.startswith("files.")]
    assert ids(checks="files") == group
    assert ids(checks="weights.missing") == ["weights.missing"]
    assert ids(checks=["taps.stated", "files"]) == [*group, "taps.stated"]
    assert ids(checks=" taps.stated , files.index,") == ["files.index", "taps.stated"]
    assert ids(checks="files", skip="files.code") == [id for id in group if id != "files.code"]
    assert ids(checks=["files.index"], skip=["files"]) == []
    assert ids(checks=[]) == []
    assert ids(skip=[id for id in rules.REGISTRY if id != "files.index"]) == ["files.index"]


@pytest.mark.parametrize(
    "selection", [{"checks": "weights.mising"}, {"skip": ["nonsense"]}, {"checks": ["files", ".."]}]
)
def test_an_unknown_check_is_named_with_its_neighbours(eagle3: Path, selection: dict[str, object]) -> None:
    with pytest.raises(rules.UnknownCheckError) as caught:
        check_draft(eagle3, **selection)  # type: ignore[arg-type]
    assert caught.value.got in ("weights.mising", "nonsense", "..")
    if caught.value.got == "weights.mising":
        assert "weights.missing" in str(caught.value)
    assert str(caught.value).isprintable()


def test_engines_are_those_asked_for(tmp_path: Path) -> None:
    def edit(tensors: dict[str, object]) -> None:
        del tensors["fc.weight"]

    path = write_tiny(tmp_path, "eagle3", edit=edit)
    (finding, *_) = check_draft(path, checks="weights.missing")["weights.missing"].findings
    assert set(finding.outcomes) == set(engines.NAMES)
    (finding, *_) = check_draft(path, checks="weights.missing", engines=["vllm"])["weights.missing"].findings
    assert set(finding.outcomes) == {"vllm"}
    with pytest.raises(DraftError, match="vlm"):
        check_draft(path, engines=["vlm"])


def test_a_defect_of_one_check_fails_that_check_alone(eagle3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(context: rules.Context) -> Iterator[Finding]:
        raise ZeroDivisionError("by zero")

    item = dataclasses.replace(rules.REGISTRY["taps.stated"], run=broken)
    monkeypatch.setitem(rules.REGISTRY, "taps.stated", item)
    report = check_draft(eagle3, checks=["taps", "files.index"])
    assert report["taps.stated"].status == "failed"
    assert "ZeroDivisionError: by zero" in report["taps.stated"].message
    assert report["files.index"].status == "passed"


# --- target --------------------------------------------------------------------------------------------------------------


def test_a_target_is_its_configuration(tmp_path: Path, eagle3: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 512}))
    assert open_context(eagle3, target=tmp_path).target == Target(tmp_path, {"vocab_size": 512})
    assert check_draft(eagle3, target=tmp_path, checks="files.index").ok


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "is not a directory"),
        (lambda path: path.write_text("x"), "is not a directory"),
        (lambda path: path.mkdir(), "holds no config.json"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("[]")), "JSON list"),
        (lambda path: (path.mkdir(), (path / "config.json").write_text("")), "is empty"),
    ],
)
def test_a_target_that_is_none_is_an_error(tmp_path: Path, eagle3: Path, make: object, says: str) -> None:
    target = tmp_path / "target"
    make(target)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=says) as caught:
        check_draft(eagle3, target=target)
    assert str(target) in str(caught.value)


# --- unknown families ----------------------------------------------------------------------------------------------------


def test_an_unknown_family_is_named_with_its_evidence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "someday"}))
    with pytest.raises(UnknownFamilyError) as caught:
        open_draft(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path / 'config.json'}: no draft family that this version reads; signals name someday"
    )
    assert caught.value.got == {"someday": ["speculators_model_type = 'someday'"]}
    assert set(caught.value.due) >= set(FAMILIES)


def test_the_target_s_own_directory_is_no_draft(tmp_path: Path) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnknownFamilyError, match="signals name none"):
        open_draft(tmp_path)
    assert "is this the draft's directory" in check_draft(tmp_path)["config.family"].findings[0].fix


# --- the package root ------------------------------------------------------------------------------------------------------

PUBLIC = [
    "AXES",
    "DraftError",
    "Finding",
    "FusedKV",
    "RejectedDraftError",
    "Report",
    "check_draft",
    "fused_kv_reference",
    "gate",
    "open_draft",
]


def test_the_root_exports_its_names_when_asked() -> None:
    assert sorted(pytest_specdecode.__all__) == PUBLIC
    assert set(PUBLIC) <= set(dir(pytest_specdecode))
    assert pytest_specdecode.check_draft is check_draft
    assert pytest_specdecode.open_draft is open_draft
    assert pytest_specdecode.DraftError is DraftError
    assert pytest_specdecode.Report is Report
    assert pytest_specdecode.Finding is Finding
    for name in PUBLIC:
        assert getattr(pytest_specdecode, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        pytest_specdecode.no_such_name  # noqa: B018


_IMPORTS = """
import sys
HEAVY = {"torch", "numpy", "triton", "hypothesis", "safetensors"}
import pytest_specdecode
assert not [name for name in sys.modules if name.startswith("pytest_specdecode.")], "names are loaded when asked for"
assert not HEAVY & set(sys.modules)
from pytest_specdecode import DraftError, Finding, Report, check_draft, open_draft
open_draft(sys.argv[1])
check_draft(sys.argv[1], checks=["files", "config", "taps", "rope", "weights.missing", "vocabulary.sizes"])
print(*sorted(HEAVY & set(sys.modules)))
"""


def test_nothing_heavy_is_imported_before_values_are_needed(good: tuple[str, Path]) -> None:
    _, path = good
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, str(path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == ""


def test_tiny_configurations_are_the_families(good: tuple[str, Path]) -> None:
    family, path = good
    assert json.loads((path / "config.json").read_text()) == tiny_config(family)


def test_one_engine_may_be_given_as_a_text(tmp_path: Path) -> None:
    draft = write_tiny(tmp_path, "eagle3")
    one, listed = (check_draft(draft, engines=given, checks="rope") for given in ("sglang, vllm", ["sglang", "vllm"]))
    assert one.to_dict() == listed.to_dict()
    assert set(one.drafts[0].engines) == {"sglang", "vllm"}
