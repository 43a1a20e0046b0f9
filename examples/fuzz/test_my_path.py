"""What is fuzzed: the contract, and one path over its whole life. Ours is the subject; yours goes in its place."""

from functools import partial

from pytest_specdecode import FusedKV
from pytest_specdecode.contracts import FusedKVContract, fused_kv_machine

#: Without its kernel, whose interpretation takes most of the time.
MyFusedKV = partial(FusedKV, backend="eager")


class TestMine(FusedKVContract):
    build = staticmethod(MyFusedKV)


TestMineOverTime = fused_kv_machine(MyFusedKV).TestCase
