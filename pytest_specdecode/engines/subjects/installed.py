"""One module of an installed package, loaded without importing the package.

The engines' packages import dozens of others and want a GPU. The files meant here need torch and triton only, so while one is loaded its
parent packages are stand-ins that only say where their files lie.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from pytest_specdecode.errors import MissingDependencyError

#: The versions that were tried, which is what an error says to install.
TRIED: Mapping[str, str] = {"sglang": "0.5.23", "vllm": "0.33.0"}

#: Where the helper lies, newest place first.
_SGLANG = (
    "sglang.kernels.ops.speculative.fused_kv_materialize",
    "sglang.srt.speculative.triton_ops.fused_kv_materialize",
)


@functools.cache
def sglang_helper() -> Callable[..., Any]:
    """SGLang's FusedKVMaterializeHelper, itself.

    Raises:
        MissingDependencyError: sglang is not installed, or has no such file or class.
    """
    return attribute_of("sglang", _SGLANG, "FusedKVMaterializeHelper")  # type: ignore[no-any-return]


def version_of(package: str) -> str | None:
    """The installed version, or None where the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def attribute_of(
    package: str, modules: tuple[str, ...], attribute: str, stand_ins: Mapping[str, Mapping[str, Any]] | None = None
) -> Any:
    """An attribute of the first of `modules` that an installed package has a file for.

    Args:
        package: the top-level package.
        modules: dotted names, in order.
        attribute: the name in the module.
        stand_ins: more modules that are stand-ins while the file is loaded, by dotted name, with what they hold.

    Raises:
        MissingDependencyError: the package is not installed, has none of the files, the file cannot be loaded by itself, or it has no
            such attribute.
    """
    folder = _folder(package)
    if folder is None:
        raise _missing(package, f"{package} is not installed")
    names = {name: folder.joinpath(*name.split(".")[1:]).with_suffix(".py") for name in modules}
    name = next((name for name, path in names.items() if path.is_file()), None)
    if name is None:
        places = " or ".join(str(path.relative_to(folder.parent)) for path in names.values())
        raise _missing(package, f"the {package} in {folder.parent} has no {places}")
    try:
        module = _loaded(name, folder, names[name], stand_ins or {})
    except Exception as error:
        raise _missing(
            package,
            f"{names[name]} does not load by itself ({type(error).__name__}: {error}); it needs torch and triton",
        ) from error
    if not hasattr(module, attribute):
        raise _missing(package, f"{names[name]} has no {attribute}")
    return getattr(module, attribute)


def _folder(package: str) -> Path | None:
    """Where the package's files lie. It is not imported for that, and where it was imported already it is asked."""
    there = sys.modules.get(package)
    places = getattr(there, "__path__", None)
    if places is None:
        spec = importlib.util.find_spec(package) if there is None else None
        places = None if spec is None else spec.submodule_search_locations
    return next((Path(place) for place in places or ()), None)


def _missing(package: str, what: str) -> MissingDependencyError:
    found = version_of(package)
    version = f" (version {found})" if found else ""
    return MissingDependencyError(
        f"{what}{version}; pip install --no-deps {package}=={TRIED[package]} has what is needed",
        key=package,
        got=found,
        due=TRIED[package],
    )


_LOCK = threading.Lock()


def _loaded(name: str, folder: Path, path: Path, stand_ins: Mapping[str, Mapping[str, Any]]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _LOCK, _without(name.partition(".")[0]):
        for parent in _parents(name):
            stub = ModuleType(parent)
            stub.__path__ = [str(folder.joinpath(*parent.split(".")[1:]))]
            sys.modules[parent] = stub
        for other, holds in stand_ins.items():
            sys.modules[other] = ModuleType(other)
            vars(sys.modules[other]).update(holds)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return module


def _parents(name: str) -> Iterator[str]:
    parts = name.split(".")[:-1]
    return (".".join(parts[: end + 1]) for end in range(len(parts)))


@contextlib.contextmanager
def _without(package: str) -> Iterator[None]:
    """Inside, nothing of the package is imported; afterwards, what was before and nothing else."""

    def held() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == package}

    before = held()
    for name in before:
        del sys.modules[name]
    try:
        yield
    finally:
        for name in held():
            del sys.modules[name]
        sys.modules.update(before)
