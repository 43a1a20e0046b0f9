"""A contract run without pytest around it, for subjects that are to fail."""

from __future__ import annotations

import inspect

import pytest

from pytest_specdecode.contracts.base import DRAWN


def failing(contract, tmp_path, *, tests=None):
    """The properties that a contract class does not hold, of its fixed cases, with the errors' texts; of `tests` alone where given."""
    found = {}
    for name, method in inspect.getmembers(contract, inspect.isfunction):
        if not hasattr(method, "contract_cases") or (tests is not None and name not in tests):
            continue
        argument, cases = method.contract_cases
        for case, value in cases.items():
            if case.endswith(DRAWN):
                continue
            arguments = {argument: value}
            if "tmp_path" in inspect.signature(method).parameters:
                arguments["tmp_path"] = tmp_path / case
                arguments["tmp_path"].mkdir(parents=True)
            try:
                getattr(contract(), name)(**arguments)
            except pytest.skip.Exception:
                continue
            except Exception as error:
                found[case] = f"{type(error).__name__}: {error}"
    return found
