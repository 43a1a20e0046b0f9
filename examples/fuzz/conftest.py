"""One example database for everybody who runs these tests, on this machine and elsewhere.

What any worker finds lies in the directory that `FUZZ_DATABASE` names, and is the first thing that the next run of any kind replays. Where
`FUZZ_REPOSITORY` names a GitHub repository, what its last nightly run left there as an artifact is replayed as well, and not written to.
"""

import os

from hypothesis import settings
from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    GitHubArtifactDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)

shared = DirectoryBasedExampleDatabase(os.environ.get("FUZZ_DATABASE", ".hypothesis/examples"))
if repository := os.environ.get("FUZZ_REPOSITORY"):
    owner, name = repository.split("/")
    nightly = ReadOnlyDatabase(GitHubArtifactDatabase(owner, name, artifact_name="fuzz-database"))
    shared = MultiplexedDatabase(shared, nightly)

# Before the contracts are imported: their tests take the database that is the default then, and ten times their examples where the profile
# has 1000. In CI Hypothesis loads a profile that keeps nothing and repeats itself, so what matters is said here.
settings.register_profile(
    "shared-database",
    settings.get_profile("default"),
    database=shared,
    derandomize=False,
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")),
)
settings.load_profile("shared-database")
