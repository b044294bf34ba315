import platform
import subprocess
import sys

import pytest

PAGES = """
import ctypes, resource
from girih.dense.accel.process_settings import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
{0}
def step(size={1} << 20):
    activations = [libc.malloc(size) for _ in range(6)]
    for each in activations:
        libc.memset(each, 1, size)
    for each in activations:
        libc.free(each)
step(), step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="speaks to glibc")
@pytest.mark.parametrize("mib", [12, 48])
def test_a_step_takes_the_memory_of_the_step_before(mib):
    fresh, kept = (
        int(subprocess.check_output([sys.executable, "-c", PAGES.format(call, mib)]))
        for call in ("", "keep_freed_memory()")
    )
    assert kept < fresh / 10
