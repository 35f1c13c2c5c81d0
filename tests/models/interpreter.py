"""Lets Triton 3.6's interpreter run under newer numpy."""

from __future__ import annotations

import os
from typing import Any


def accept_scalars_of_numpy_2_4() -> None:
    """The interpreter turns arrays of one element into loop bounds by ``int``, which numpy refuses
    since 2.4. Does nothing where kernels are compiled."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched
