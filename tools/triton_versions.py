"""Run a command against several releases of Triton, each installed beside this environment and put before its own.

What it runs by default are the tests of everything here that reaches into Triton: the interpreted launch, the bfloat16 repair, the guard,
the kernels, and a canary that names the private function that moved. Nothing in the environment is changed: a release lies in a folder of
its own, which is kept for the next run. Run it from the repository's root:

    python tools/triton_versions.py                       # 3.2.0, 3.6.0, 3.8.0 and 3.9.0
    python tools/triton_versions.py 3.2.0 3.9.0           # these
    python tools/triton_versions.py 3.9.0 --run python benchmarks/compile_gate.py
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSIONS = ("3.2.0", "3.6.0", "3.8.0", "3.9.0")
TESTS = (
    "tests/test_triton_surface.py",
    "tests/test_launch.py",
    "tests/test_memory.py",
    "tests/test_quick_ops.py",
    "tests/fused_kv/test_fused_kv_kernel.py",
    "tests/fused_kv/test_fused_kv_caches.py",
    "tests/fused_kv/test_latent_kernel.py",
)


def main() -> int:
    """Install what is missing, run, and say for each release whether it passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {' '.join(VERSIONS)}")
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()) / "triton-releases",
        help="where releases are kept (default: %(default)s)",
    )
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="another command than pytest on those tests")
    options = parser.parse_args()
    command = options.run or [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS]
    if command[0] == "python":
        command = [sys.executable, *command[1:]]
    failed = []
    for version in options.versions or VERSIONS:
        folder = installed(version, options.folder)
        print(f"\n=== triton {version}", flush=True)
        path = os.pathsep.join([str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        # Caches of compiled kernels are not shared between releases.
        extra = {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(folder / "cache"), "SPECDECODE_TRITON": version}
        if subprocess.run(command, cwd=ROOT, env={**os.environ, **extra}, check=False).returncode:
            failed.append(version)
    if failed:
        print(f"\nfailed on triton {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def installed(version: str, folder: Path) -> Path:
    """The folder of a release, installed without its dependencies (it has none) where it is not there yet."""
    place = folder / version
    if not (place / "triton" / "__init__.py").exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", place, f"triton=={version}"],
            check=True,
        )
    return place


if __name__ == "__main__":
    sys.exit(main())
