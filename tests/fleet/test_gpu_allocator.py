"""A machine's GPUs are counted out: each to one engine."""

from penstock.fleet.gpu_allocator import GpuAllocator


def test_gpus_are_counted_out_and_come_back() -> None:
    gpus = GpuAllocator.over((3, 4, 9), "the test")
    assert gpus.take(2) == (3, 4) and gpus.take(2) is None and gpus.take(0) == ()
    assert not gpus.claim([3]) and gpus.claim([9]) and gpus.free == 0
    gpus.give([4, 3])
    assert gpus.take(2) == (3, 4)
