"""A door: the C engine from Python. See `colibri.runtime.engine`."""

from colibri.runtime.engine import KERNELS, Model, load

__all__ = ["KERNELS", "Model", "load"]
