"""Lets several commands share one set of options: one parameter stands for many."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any


def option(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """One keyword parameter, ``annotation`` as typer reads it."""
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def expand(
    name: str, parameters: Sequence[inspect.Parameter], build: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a command ``parameters`` in place of its parameter ``name``.

    The command still receives ``name``: what ``build`` makes of the parameters' values.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        own = inspect.signature(command, eval_str=True)

        @functools.wraps(command)
        def wrapper(**values: Any) -> Any:
            taken = {p.name: values.pop(p.name) for p in parameters}
            return command(**values, **{name: build(taken)})

        kept = [
            p.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for p in own.parameters.values()
            if p.name != name
        ]
        together = [*kept, *parameters]
        wrapper.__signature__ = own.replace(parameters=together)  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in together}
        return wrapper

    return decorate
