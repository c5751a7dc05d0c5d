"""Python imports it in every new process that has this folder on its path."""

import ctypes
import importlib
import os

# Before torch is imported, which asks only once whether there are GPUs.
ctypes.CDLL(os.environ["SIMULATED_GPUS"], mode=ctypes.RTLD_GLOBAL)
importlib.import_module("tests.simulated_gpus.simulated").install()
