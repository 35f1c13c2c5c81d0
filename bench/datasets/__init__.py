"""Prompt sets by name: the built-in ones and published data sets.

``published`` says what each data set is called and looks like, ``sources`` finds its files (a
folder, a package, the hub), ``files`` reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import prompts
from bench.datasets import sources
from bench.datasets.published import PUBLISHED
from bench.prompts import Prompt
from ssd_pipe.errors import ConfigError

ALL_AT_LEAST = 4
STAND_INS = ("builtin-code", "builtin-maths", "builtin-questions", "builtin-chat")
"""What takes the place of published sets that are not to be had; never under their names."""


def names() -> tuple[str, ...]:
    """Every set that can be asked for."""
    return (*prompts.SETS, *PUBLISHED)


def load(name: str, count: int) -> list[Prompt]:
    """The first ``count`` prompts of a set, built in or published.

    Raises ConfigError: an unknown set, too many prompts, or a set that is not on this machine and
    cannot be fetched; the message then says what to do.
    """
    if name in prompts.SETS:
        return prompts.load(name, count)
    if name not in PUBLISHED:
        raise ConfigError("--datasets", f"{name!r} is none of: {', '.join(names())}")
    known = PUBLISHED[name]
    made = [p for record in sources.records(known) if (p := known.prompt(record)) is not None]
    found = [
        Prompt(id=f"{name}-{i}", kind=name, messages=p.messages, text=p.text)
        for i, p in zip(range(count), made, strict=False)
    ]
    if len(found) < count:
        raise ConfigError("--prompts", f"set {name} has {len(found)} prompts, asked for {count}")
    return found


def every(count: int) -> tuple[dict[str, list[Prompt]], list[str]]:
    """The same number of prompts, ``count`` if it can be, of each published set that is to be had.

    Built-in sets (``STAND_INS``) make up for what lacks to four; they are small, and then all sets
    give as many as the smallest has. Also returns notes: why the other sets are not to be had.
    """
    found: dict[str, list[Prompt]] = {}
    notes = []
    for name in PUBLISHED:
        try:
            found[name] = load(name, count)
        except ConfigError as error:
            notes.append(str(error))
    lacking = max(0, ALL_AT_LEAST - len(found))
    for name in STAND_INS[:lacking]:
        prompts_of = prompts.SETS[name]()
        found[name] = prompts_of[:count]
    if lacking:
        notes.append(f"built-in sets stand in: {', '.join(STAND_INS[:lacking])}")
    least = min(map(len, found.values()))
    return {name: listed[:least] for name, listed in found.items()}, notes


def several(wanted: Sequence[str], count: int) -> dict[str, list[Prompt]]:
    """``count`` prompts of each set. Raises ConfigError as ``load``."""
    return {name: load(name, count) for name in wanted}
