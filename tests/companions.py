"""Functions that several real processes run together, as the trainers of a run.

As a program, this file is one of them: ``python companions.py FILE.py FUNCTION RANK SIZE ADDRESS``.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from girih.comm.registry import LocalRegistry, RegistryServer
from girih.comm.registry.remote import RemoteRegistry

ALL_S = 120
SECRET = b"of these companions"


def together(function, size=2, *, barrier=True):
    """What a module's ``function(ranks)`` returns in each of ``size`` processes; anything that JSON can hold.

    Args:
        barrier: whether all meet once more when they are done.
    """
    server = RegistryServer(LocalRegistry(), SECRET)
    file = function.__code__.co_filename
    here = os.pathsep.join([str(Path(file).parent), str(Path(__file__).parent), *sys.path])
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                __file__,
                file,
                function.__name__,
                str(rank),
                str(size),
                server.address,
                *(["barrier"] * barrier),
            ],
            env={**os.environ, "PYTHONPATH": here, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,  # apart: what torch says at its end would come behind the answer
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [process.communicate(timeout=ALL_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
        server.close()
    ended = [process.returncode for process in processes]
    assert ended == [0] * size, "\n".join(out + errors for out, errors in told)
    return [json.loads(out.splitlines()[-1]) for out, _ in told]


def main():
    from girih.comm.group import TrainerGroup

    file, name, rank, size, address, *barrier = sys.argv[1:]
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    registry = RemoteRegistry(address, SECRET)
    ranks = TrainerGroup(int(rank), int(size), registry)
    found = getattr(module, name)(ranks)
    if barrier:
        ranks.barrier()
    ranks.close()
    registry.close()
    print(json.dumps(found))


if __name__ == "__main__":
    import faulthandler

    faulthandler.dump_traceback_later(ALL_S - 10, exit=True)
    main()
