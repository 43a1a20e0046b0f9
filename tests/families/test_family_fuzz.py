"""Any JSON object as `config.json`.

What these catch: a configuration that is neither read nor reported but ends in a traceback, or eats the machine; a check that breaks on
a value that its family's parser let through; a spec that JSON cannot hold. The starting points are real configurations; keys are dropped
and values replaced by others of every JSON type, nested ones too.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from packagings import PACKAGINGS

from pytest_specdecode import checks
from pytest_specdecode.api import context_of
from pytest_specdecode.checkpoint import DTYPE_BITS, Checkpoint
from pytest_specdecode.families import FAMILIES, Draft, load
from pytest_specdecode.testing import tiny_config, write_sparse

CONFIGS = Path(__file__).parents[1] / "corpus" / "configs"
#: Every family in every packaging, and real files of layouts that those do not have; the rest of the corpus differs in numbers.
SEEDS: list[dict[str, Any]] = [
    *(case.whole for case in PACKAGINGS if not case.names and not case.joined),
    *(
        json.loads((CONFIGS / f"{name}.json").read_text(encoding="utf-8"))
        for name in (
            "dflash--laguna-poolside-Laguna-S-2.1-DFlash",
            "dflash--gemma-4-31B-it-mixed-shape",
            "dflash--zlab-Qwen3.6-35B-A3B-DFlash",
            "bad--dflash-mask-out-of-range",
            "eagle1--eagle-repo-vicuna-7B",
            "eagle1--vllm-converted-llama2-chat-7B-shape",
            "eagle3--nebius-EAGLE3-gpt-oss-20b",
            "eagle3--modelopt-default-train",
            "eagle31--specforge-qwen3-30B-A3B",
            "speculators-eagle3--RedHatAI-gpt-oss-20b-speculator.eagle3",
            "template--modelopt-to-speculators-eagle3",
            "dspark--deepseek-dspark_gemma4_12b_block7",
            "dspark--embedded-DeepSeek-V4-Flash",
            "medusa--vllm-config-class",
            "mtp--glm-5.1",
            "mtp-gemma4assistant--google-gemma-4-E2B",
            "speculators-dflash2--Qwen3-8B-shape",
            "speculators-dspark--makora-gemma4-26b-a4b-shape",
        )
    ),
]
KEYS = sorted(
    {key for seed in SEEDS for key in seed} | {"rope_parameters", "num_aux_hidden_states", "fc_norm", "auto_map"}
)

_NUMBERS = st.sampled_from([0, 1, -1, 2, 3, 511, 1 << 31, (1 << 31) - 1, 1 << 63, 10**299, 0.5, -0.0, 1e308, 5e-324])
_SCALARS = st.none() | st.booleans() | _NUMBERS | st.sampled_from(["", "yarn", "LlamaForCausalLMEagle3", "\x1b[31m\n"])
VALUES = st.recursive(
    _SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["rope_theta", "full_attention", "factor", "rope_type", "causal", ""]), inner, max_size=3
        )
    ),
    max_leaves=5,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """A real configuration with up to four keys dropped or given values of another kind."""
    config = copy.deepcopy(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(1, 4))):
        place = config
        nested = [key for key, value in config.items() if isinstance(value, dict)]
        if nested and draw(st.booleans()):
            place = config[draw(st.sampled_from(nested))]
        key = draw(st.sampled_from([*place, *KEYS]))
        if key in place and draw(st.booleans()):
            del place[key]
        else:
            place[key] = draw(VALUES)
    return config


def opened(directory: Path, config: Any) -> Draft:
    (directory / "config.json").write_text(json.dumps(config))
    return load(Checkpoint.open(directory))


def judged(draft: Draft) -> None:
    """Every check that needs no values gives a result, and the spec and the results are what JSON holds."""
    context = context_of(draft)
    for item in checks.REGISTRY.values():
        if "tensors" not in item.needs:
            result = checks.run(item, context)
            json.dumps(result.to_dict(), allow_nan=False)
    if draft.spec is not None:
        json.dumps(draft.spec.to_dict(), allow_nan=False)
        assert draft.describe().isprintable()
    for fault in draft.config_faults:
        assert str(fault).isprintable()
        assert len(str(fault)) < 500


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@settings(deadline=None, max_examples=300, derandomize=True)
@given(config=configs())
def test_a_mutated_configuration_is_read_or_reported(scratch: Path, config: dict[str, Any]) -> None:
    judged(opened(scratch, config))


@settings(deadline=None, max_examples=150, derandomize=True)
@given(config=st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=8))
def test_a_made_up_configuration_is_read_or_reported(scratch: Path, config: dict[str, Any]) -> None:
    judged(opened(scratch, config))


@pytest.fixture(scope="module", params=[family.name for family in FAMILIES])
def with_weights(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    directory = tmp_path_factory.mktemp(request.param)
    write_sparse(directory, tiny_config(request.param), request.param)
    return directory, request.param


@settings(deadline=None, max_examples=30, derandomize=True)
@given(data=st.data())
def test_a_mutated_configuration_beside_weights_is_judged(with_weights: tuple[Path, str], data: st.DataObject) -> None:
    directory, family = with_weights
    config = tiny_config(family)
    for key in data.draw(st.lists(st.sampled_from([*config, *KEYS]), min_size=1, max_size=3), label="keys"):
        config[key] = data.draw(VALUES, label=key)
    judged(opened(directory, config))


@pytest.mark.parametrize("key", ["block_size", "mask_token_id", "target_layer_ids", "layer_types", "rope_theta"])
@pytest.mark.parametrize("value", [[], {}, [[]], "8", True, -1, 1e308])
def test_a_value_of_any_kind_in_a_second_place_is_judged(scratch: Path, key: str, value: Any) -> None:
    judged(opened(scratch, tiny_config("dflash", **{key: value})))


NAMES = st.sampled_from(
    ["fc.weight", "layers.0.x", "hidden_norm.weight", "d2t", "t2d", "lm_head.weight", "norm.weight"]
)
NAMES |= st.sampled_from([f"layers.0.self_attn.{name}.weight" for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa")])
NAMES |= st.from_regex(r"(model\.)?(layers\.\d{1,5}|midlayer)\.(self_attn|mlp)?\.?[a-z_]{0,6}", fullmatch=True)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(
    family=st.sampled_from([family.name for family in FAMILIES]),
    shapes=st.dictionaries(NAMES, st.lists(st.sampled_from([0, 1, 32, 64, 128, 192, 512]), max_size=3), max_size=8),
    dtype=st.sampled_from(["BF16", "F4", "I64", "BOOL", "C64"]),
)
def test_any_tensors_beside_a_configuration_are_judged(
    scratch: Path, family: str, shapes: dict[str, list[int]], dtype: str
) -> None:
    header: dict[str, Any] = {}
    position = 0
    for name, shape in shapes.items():
        size = DTYPE_BITS[dtype]
        for extent in shape:
            size *= extent
        if size % 8:
            continue
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [position, position + size // 8]}
        position += size // 8
    raw = json.dumps(header).encode()
    directory = scratch / "tensors"
    directory.mkdir(exist_ok=True)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + position)
    judged(opened(directory, tiny_config(family)))
