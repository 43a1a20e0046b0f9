"""Mutants: what is changed in the code on purpose, and how the tests are run against each change."""
