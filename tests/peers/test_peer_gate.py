"""The recipe for export scripts, on a model of speculators' own.

Caught here: a gate that refuses what speculators writes, or passes what its `save_pretrained` writes of a model that is put together wrong.
"""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_peer_speculators_eagle import built
from test_peer_speculators_eagle import peer as peer

from pytest_specdecode import RejectedDraftError

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "ci" / "save_checked.py"


def test_speculators_models_are_saved_where_they_pass(peer: SimpleNamespace, tmp_path: Path) -> None:
    found = importlib.util.spec_from_file_location("save_checked", RECIPE)
    assert found is not None
    assert found.loader is not None
    recipe = importlib.util.module_from_spec(found)
    found.loader.exec_module(recipe)
    model = built(peer, "eagle3", torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert recipe.save_checked(model, tmp_path / "good").ok
        # Ids in the place of offsets: the draft would propose tokens that are not there.
        model.d2t.data += torch.arange(len(model.d2t))
        with pytest.raises(RejectedDraftError, match=r"error vocabulary\.d2t: "):
            recipe.save_checked(model, tmp_path / "bad")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.rejected", "good"]
