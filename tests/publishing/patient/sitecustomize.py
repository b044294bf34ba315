"""Has trainers be patient in processes that a test starts with this directory on their path; see patience.py beside it."""

import importlib.abc
import importlib.machinery
import sys
from pathlib import Path

RUN = "girih.lifecycle.run"


class Patience(importlib.abc.MetaPathFinder):
    """Has runs wait for each segment, as their module is imported."""

    def find_spec(self, name, path, target=None):
        if name != RUN:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            from patience import patient

            for method, patiently in patient(module.Publisher):
                setattr(module.Publisher, method, patiently)

        spec.loader.exec_module = exec_module
        return spec


sys.path.append(str(Path(__file__).parents[1]))
sys.meta_path.insert(0, Patience())
