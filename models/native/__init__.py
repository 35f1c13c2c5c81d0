"""Compiled CPU kernels for float32 arithmetic on bfloat16 or float32 weights.

``library.library()`` compiles the C++ sources of this folder once per machine and loads them;
everything else goes through ``models.backends.native`` and ``models.native.sampling``. ``build``
needs no torch.
"""

from models.native.build import NativeUnavailable

__all__ = ["NativeUnavailable"]
