"""A wrong argument must be refused where it is given, by name and with its value. Found out later, in a draw, it would look like a failing
test; not found out, it would quietly draw something else than what was asked for.
"""

from __future__ import annotations

import inspect
import re

import pytest
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from pytest_specdecode import spec, strategies
from pytest_specdecode.families import mlp_speculator
from pytest_specdecode.strategies import (
    LatentConfig,
    LayerConfig,
    checkpoints,
    draft_configs,
    draft_specs,
    heterogeneous_latent_stacks,
    heterogeneous_stacks,
    homogeneous_latent_stacks,
    homogeneous_stacks,
    kernel_inputs,
    latent_configs,
    latent_kernel_inputs,
    layer_configs,
    mla_configs,
    mla_layers,
    mutated_configs,
)

SEPARATE = LatentConfig(kv_lora_rank=1, qk_rope_head_dim=2, hidden_size=1)
NARROW = LayerConfig(num_heads=1, num_kv_heads=1, head_dim=2, hidden_size=1)

WRONG = [
    (layer_configs, {"num_heads": 0}, "num_heads=0: an integer of at least 1 is due"),
    (layer_configs, {"num_heads": True}, "num_heads=True: an integer of at least 1 is due"),
    (layer_configs, {"num_kv_heads": 1.5}, "num_kv_heads=1.5: an integer of at least 1 is due"),
    (layer_configs, {"num_heads": 3, "num_kv_heads": 2}, "num_heads=3 is not a multiple of num_kv_heads=2"),
    (layer_configs, {"head_dim": 1}, "head_dim=1: an integer of at least 2 is due"),
    (layer_configs, {"rotary_dim": 3}, "rotary_dim=3: an even integer of at least 2 is due"),
    (layer_configs, {"rotary_dim": 0}, "rotary_dim=0: an even integer of at least 2 is due"),
    (layer_configs, {"rotary_dim": 8, "head_dim": 6}, "rotary_dim=8 is above head_dim=6"),
    (layer_configs, {"hidden_size": "64"}, "hidden_size='64': an integer of at least 1 is due"),
    (layer_configs, {"rope_theta": 0.0}, "rope_theta=0.0: a finite number above 0 is due"),
    (layer_configs, {"rope_theta": float("nan")}, "rope_theta=nan: a finite number above 0 is due"),
    (
        layer_configs,
        {"rope_scaling": "yarn"},
        "rope_scaling='yarn': a mapping such as {'rope_type': 'linear', 'factor': 2.0} is due",
    ),
    (
        layer_configs,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rotary_dim": 2},
        "rope_scaling={'rope_type': 'dynamic', 'factor': 2.0}: dynamic scaling needs more rotating lanes than 2",
    ),
    (
        layer_configs,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 3},
        "rope_scaling={'rope_type': 'dynamic', 'factor': 2.0}: dynamic scaling needs more rotating lanes than 3",
    ),
    (layer_configs, {"dtype": "float64"}, "dtype='float64': one of 'float32', 'float16', 'bfloat16' is due"),
    (layer_configs, {"bias": 1}, "bias=1: True or False is due"),
    (layer_configs, {"norm_kind": "layer"}, "norm_kind='layer': one of 'rms', 'gemma' is due"),
    (layer_configs, {"norm_eps": -1e-6}, "norm_eps=-1e-06: a finite number above 0 is due"),
    (layer_configs, {"value_scale": float("inf")}, "value_scale=inf: a finite number above 0 is due"),
    (homogeneous_stacks, {"min_layers": 0}, "min_layers=0: an integer of at least 1 is due"),
    (homogeneous_stacks, {"min_layers": 4}, "min_layers=4 is above max_layers=3"),
    (homogeneous_stacks, {"config": "plain"}, "config='plain': a LayerConfig is due"),
    (
        homogeneous_stacks,
        {"weights": "random"},
        "weights='random': one of 'zeros', 'integers', 'one-hot', 'repeated', 'normal', 'tiny', 'large' is due",
    ),
    (homogeneous_stacks, {"seed": -1}, "seed=-1: an integer of at least 0 is due"),
    (homogeneous_stacks, {"norm_eps": 0}, "norm_eps=0: a finite number above 0 is due"),
    (heterogeneous_stacks, {"axis": "theta"}, "axis='theta': one of 'num-kv-heads', 'head-dim', "),
    (heterogeneous_stacks, {"min_layers": 1}, "min_layers=1: an integer of at least 2 is due"),
    (heterogeneous_stacks, {"max_layers": 1}, "max_layers=1: an integer of at least 2 is due"),
    (
        heterogeneous_stacks,
        {"config": NARROW, "axis": "rotary-dim"},
        f"config={NARROW!r} leaves no room for another value of axis='rotary-dim'",
    ),
    (kernel_inputs, {"stack": NARROW}, f"stack={NARROW!r}: a Stack is due"),
    (kernel_inputs, {"min_tokens": -1}, "min_tokens=-1: an integer of at least 0 is due"),
    (kernel_inputs, {"min_tokens": 18}, "min_tokens=18 is above max_tokens=17"),
    (kernel_inputs, {"positions": "random"}, "positions='random': one of 'zero', 'arange', "),
    (kernel_inputs, {"positions_dtype": "uint8"}, "positions_dtype='uint8': one of 'int64', 'int32' is due"),
    (kernel_inputs, {"values": "nan"}, "values='nan': one of 'zeros', "),
    (kernel_inputs, {"layout": "rows"}, "layout='rows': one of 'contiguous', 'padded', 'transposed' is due"),
    (kernel_inputs, {"block_rows": 12}, "block_rows=12: a power of two is due"),
    (kernel_inputs, {"block_rows": 0}, "block_rows=0: an integer of at least 1 is due"),
    (kernel_inputs, {"seed": 0.5}, "seed=0.5: an integer of at least 0 is due"),
    (latent_configs, {"kv_lora_rank": 0}, "kv_lora_rank=0: an integer of at least 1 is due"),
    (latent_configs, {"qk_rope_head_dim": 3}, "qk_rope_head_dim=3: an even integer of at least 2 is due"),
    (
        latent_configs,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "qk_rope_head_dim": 2},
        "rope_scaling={'rope_type': 'dynamic', 'factor': 2.0}: dynamic scaling needs more rotating lanes than 2",
    ),
    (latent_configs, {"dtype": "float64"}, "dtype='float64': one of 'float32', 'float16', 'bfloat16' is due"),
    (latent_configs, {"is_joined": 1}, "is_joined=1: True or False is due"),
    (homogeneous_latent_stacks, {"min_layers": 0}, "min_layers=0: an integer of at least 1 is due"),
    (homogeneous_latent_stacks, {"config": NARROW}, f"config={NARROW!r}: a LatentConfig is due"),
    (homogeneous_latent_stacks, {"weights": "nice"}, "weights='nice': one of 'zeros', "),
    (heterogeneous_latent_stacks, {"axis": "head-dim"}, "axis='head-dim': one of 'kv-lora-rank', 'qk-rope-head-dim', "),
    (heterogeneous_latent_stacks, {"min_layers": 1}, "min_layers=1: an integer of at least 2 is due"),
    (
        heterogeneous_latent_stacks,
        {"config": SEPARATE, "axis": "q-lora-rank"},
        f"config={SEPARATE!r} leaves no room for another value of axis='q-lora-rank'",
    ),
    (latent_kernel_inputs, {"stack": SEPARATE}, f"stack={SEPARATE!r}: a LatentStack is due"),
    (latent_kernel_inputs, {"min_tokens": 18}, "min_tokens=18 is above max_tokens=17"),
    (latent_kernel_inputs, {"block_rows": 12}, "block_rows=12: a power of two is due"),
    (draft_configs, {"family": "eagle2"}, "family='eagle2': one of 'eagle1', 'eagle3', "),
    (draft_configs, {"packaging": "gguf"}, "packaging='gguf': one of 'plain', 'speculators', 'embedded' is due"),
    (
        draft_configs,
        {"family": "medusa", "packaging": "speculators"},
        "packaging='speculators': a draft of the family medusa is written as 'plain', 'embedded'",
    ),
    (draft_specs, {"family": "eagle2"}, "family='eagle2': one of 'eagle1', 'eagle3', "),
    (mutated_configs, {"check": "taps"}, "check='taps': one of 'files.code', 'config.family', "),
    (
        mutated_configs,
        {"check": "taps.order", "family": "medusa"},
        "check='taps.order', family='medusa': no configuration has room for such a fault",
    ),
    (checkpoints, {"min_shards": 0}, "min_shards=0: an integer of at least 1 is due"),
    (checkpoints, {"min_shards": 4}, "min_shards=4 is above max_shards=3"),
    (checkpoints, {"seed": True}, "seed=True: an integer of at least 0 is due"),
    (mla_configs, {"qk_rope_head_dim": 3}, "qk_rope_head_dim=3: an even integer of at least 2 is due"),
    (
        mla_configs,
        {"whole_query": True, "q_lora_rank": 2},
        "q_lora_rank=2: queries without a latent have none, whole_query=True",
    ),
    (mla_layers, {"config": SEPARATE}, f"config={SEPARATE!r}: a MLAConfig is due"),
    (mla_layers, {"norms": "nice"}, "norms='nice': one of 'zeros', "),
]

PUBLIC = (
    layer_configs,
    homogeneous_stacks,
    heterogeneous_stacks,
    kernel_inputs,
    latent_configs,
    homogeneous_latent_stacks,
    heterogeneous_latent_stacks,
    latent_kernel_inputs,
    draft_configs,
    draft_specs,
    mutated_configs,
    checkpoints,
    mla_configs,
    mla_layers,
)

SHRINKING = settings(database=None, deadline=None, derandomize=True, phases=[Phase.generate, Phase.shrink])

#: What the printed examples are made of.
NAMES = {**vars(spec), **vars(mlp_speculator), **vars(strategies)}


@pytest.mark.parametrize(
    ("strategy", "arguments", "text"),
    WRONG,
    ids=[f"{made.__name__}-{'-'.join(args)}-{at}" for at, (made, args, _) in enumerate(WRONG)],
)
def test_a_wrong_argument_is_refused_at_once(strategy, arguments, text):
    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}"):
        strategy(**arguments)


@pytest.mark.parametrize(
    ("strategy", "arguments", "text"),
    [
        (layer_configs, {"head_dim": st.just(1)}, "head_dim=1: an integer of at least 2 is due"),
        (layer_configs, {"head_dim": st.just(4), "rotary_dim": 8}, "rotary_dim=8 is above head_dim=4"),
        (
            layer_configs,
            {"num_heads": st.just(3), "num_kv_heads": 2},
            "num_heads=3 is not a multiple of num_kv_heads=2",
        ),
        (homogeneous_stacks, {"weights": st.just("random")}, "weights='random': one of 'zeros', "),
        (heterogeneous_stacks, {"axis": st.just("theta")}, "axis='theta': one of 'num-kv-heads', "),
        (kernel_inputs, {"values": st.just("nan")}, "values='nan': one of 'zeros', "),
        (kernel_inputs, {"block_rows": st.just(12)}, "block_rows=12: a power of two is due"),
        (
            draft_configs,
            {"family": st.just("hydra"), "packaging": "embedded"},
            "packaging='embedded': a draft of the family hydra is written as 'plain'",
        ),
        (
            mutated_configs,
            {"check": st.just("dspark.keys"), "family": "eagle1"},
            "check='dspark.keys', family='eagle1': no configuration has room for such a fault",
        ),
        (
            mla_configs,
            {"whole_query": st.just(True), "is_joined": True},
            "is_joined=True: queries without a latent have none, whole_query=True",
        ),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_wrong_value_from_a_strategy_is_refused_when_drawn(strategy, arguments, text):
    @settings(deadline=None, max_examples=1, derandomize=True)
    @given(strategy(**arguments))
    def check(drawn):
        pytest.fail("nothing was to be drawn")

    with pytest.raises(InvalidArgument, match=f"^{re.escape(text)}"):
        check()


@pytest.mark.parametrize("strategy", PUBLIC)
def test_arguments_are_keywords_only_and_all_have_a_default(strategy):
    parameters = inspect.signature(strategy).parameters.values()
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters)
    assert isinstance(strategy(), SearchStrategy)


@pytest.mark.parametrize("strategy", PUBLIC)
def test_documentation_has_its_parts_in_order_and_names_every_argument(strategy):
    text = inspect.getdoc(strategy)
    parts = ["An example, as printed", "Guarantee:", "Requirement:", "Shrinks", "Args:", "Raises:", "See also:"]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    documented = text[text.index("Args:") : text.index("Raises:")]
    for name in inspect.signature(strategy).parameters:
        assert re.search(rf"\b{name}\b", documented), name


def test_the_public_list_is_sorted_and_complete():
    names = strategies.__all__
    assert all(hasattr(strategies, name) for name in names)
    constants = [name for name in names if name.isupper()]
    classes = [name for name in names if name[0].isupper() and not name.isupper()]
    functions = [name for name in names if name[0].islower()]
    assert names == [*sorted(constants), *sorted(classes), *sorted(functions)]
    assert {made.__name__ for made in PUBLIC} == set(functions)


@pytest.mark.parametrize("strategy", PUBLIC)
def test_the_printed_example_is_one_that_is_drawn(strategy):
    """Evaluated, and of the kind that the strategy draws, so that a renamed field does not leave a stale example behind."""
    text = inspect.getdoc(strategy)
    before, example = re.search(r"An example, as printed([^:]*):(.*?)Guarantee:", text, re.DOTALL).groups()
    made = eval(" ".join(example.split()), NAMES)
    if "without the fields that have their default" in before:
        assert made == find(strategy(family=made.family), lambda drawn: True, settings=SHRINKING)
    else:
        assert repr(made) == " ".join(example.split())
