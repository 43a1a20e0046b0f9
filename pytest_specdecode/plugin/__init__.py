"""The pytest door, as the `pytest11` entry point finds it.

Every pytest run in an environment imports this module, whether it judges a draft or not. So nothing here or in `options` and `fixtures`
imports more than pytest and the standard library, and every hook returns at once where no option of ours is given; the parts that collect
and report are registered by `pytest_configure` in the runs that need them.
"""

from __future__ import annotations

import pytest

from pytest_specdecode.plugin import options
from pytest_specdecode.plugin.fixtures import (
    _given_draft,
    _stackable_draft,
    draft,
    draft_check,
    draft_context,
    draft_device,
    draft_layers,
    draft_max_examples,
    draft_spec,
    draft_target,
    fused_kv,
    fused_kv_reference,
    make_draft_layers,
    make_fused_kv,
)
from pytest_specdecode.plugin.options import SETTINGS

# Fixtures are found by being here.
__all__ = [
    "_given_draft",
    "_stackable_draft",
    "draft",
    "draft_check",
    "draft_context",
    "draft_device",
    "draft_layers",
    "draft_max_examples",
    "draft_spec",
    "draft_target",
    "fused_kv",
    "fused_kv_reference",
    "make_draft_layers",
    "make_fused_kv",
]

MARKER = "draft_check(id, group): a check of the built-in suite on a draft; select with -m draft_check"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options and their ini twins."""
    options.add(parser)


def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Print the checks, or write a test file, and stop, where that was asked."""
    if config.getoption(options.WRITE_TEST) is not None:
        from pytest_specdecode.plugin.starting_test import write_for

        print(write_for(config))
        return int(pytest.ExitCode.OK)
    if not config.getoption(options.LIST_CHECKS):
        return None
    from pytest_specdecode.plugin.reporting import table_of_checks

    print(table_of_checks(options.selected_checks(config)))
    return int(pytest.ExitCode.OK)


def pytest_configure(config: pytest.Config) -> None:
    """Validate the options once, keep the result in the stash, and register what this run needs."""
    config.addinivalue_line("markers", MARKER)
    if not options.any_given(config):
        config.stash[SETTINGS] = options.UNUSED
        return
    settings = config.stash[SETTINGS] = options.read(config)
    if settings.drafts:
        from pytest_specdecode.plugin.collection import SuiteCollection

        config.pluginmanager.register(SuiteCollection(settings), "specdecode-collection")
    if not hasattr(config, "workerinput"):
        from pytest_specdecode.plugin.reporting import Reporter

        config.pluginmanager.register(Reporter(settings), "specdecode-reporter")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what asks for a draft once per draft, and what asks for a check once per check."""
    names = metafunc.fixturenames
    if "_given_draft" not in names and "draft_check" not in names:
        return
    settings = metafunc.config.stash[SETTINGS]
    if settings.drafts and "_given_draft" in names:
        ids = [given.label for given in settings.drafts]
        metafunc.parametrize("_given_draft", settings.drafts, ids=ids, indirect=True, scope="session")
    # A conftest that makes its own `draft` needs no option for the suite to run on it.
    if "draft_check" in names and (settings.drafts or "_given_draft" not in names):
        checks = [
            pytest.param(item, id=item.id, marks=pytest.mark.draft_check(id=item.id, group=item.group))
            for item in options.checks_of(settings)
        ]
        metafunc.parametrize("draft_check", checks)
