"""Compiled CPU kernels for float32 arithmetic on bfloat16 or float32 weights.

``library()`` compiles the C++ sources of this folder once per machine and loads them; everything
else goes through ``models.backends.native`` and ``models.native.sampling``.
"""

from models.native.build import NativeUnavailable
from models.native.library import library

__all__ = ["NativeUnavailable", "library"]
