"""Figures out of what the parts left."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from bench.gpu_stages import Stages
from bench.gpu_table.parts import Outcome
from bench.published import PUBLISHED

LEASED = 0.5
"""Share of the decoding steps from which an engine counts as leased."""
FEWEST_HITS = 30
"""Hits whose median says what a hit takes."""
Record = TypeVar("Record")


class Missing(Exception):
    """The part's results lack the figure; the text says what."""


class Figure(NamedTuple):
    """A measured value, and what it is made of."""

    value: float
    note: str = ""


class Decode(msgspec.Struct):
    """Of ``bench.gpu_timing``: steps of one shape in graphs."""

    shape: str
    variant: str
    ms: float
    bandwidth_share: float
    verify8: float


class Tree(msgspec.Struct):
    """Of ``bench.gpu_timing``: tree steps, sampling included."""

    shape: str
    variant: str
    branches: int
    steps: int
    total_ms: float
    step_over_ar: float


class EngineRow(msgspec.Struct):
    """Of ``bench.gpu_pipeline``: one engine. ``pair``: and temperature, or what is replayed."""

    engine: str
    pair: str
    tok_s: float | None
    gb_s: float | None
    theorem7_tok_s: float | None
    stages: Stages

    @property
    def kind(self) -> str:
        """The engine without its numbers."""
        found = re.match(r"[a-z]+(-[a-z]+)*", self.engine)
        return found.group() if found else self.engine

    @property
    def k(self) -> int:
        """Draft tokens a round."""
        found = re.search(r"-(\d+)", self.engine)
        return int(found.group(1)) if found else 0


# ------------------------------------------------------------ steps


def step_share(shape: str) -> Callable[[Outcome], Figure]:
    """Weights' bytes a decoding step reads, over what a copy moves meanwhile."""

    def read(outcome: Outcome) -> Figure:
        step = _decode(outcome, shape)
        rate = outcome.report.get("bandwidth_TBps", 0.0)
        return Figure(step.bandwidth_share, f"{step.ms:.3f} ms; a copy {rate:.2f} TB/s")

    return read


def verification(shape: str) -> Callable[[Outcome], Figure]:
    """Verifying 8 tokens over decoding one."""

    def read(outcome: Outcome) -> Figure:
        step = _decode(outcome, shape)
        return Figure(step.verify8, f"{step.verify8 * step.ms:.3f} over {step.ms:.3f} ms")

    return read


def tree_step(shape: str, branches: int) -> Callable[[Outcome], Figure]:
    """A tree step over a decoding step."""

    def read(outcome: Outcome) -> Figure:
        tree, step = _tree(outcome, shape, branches), _decode(outcome, shape)
        each = tree.total_ms / tree.steps
        return Figure(tree.step_over_ar, f"{each:.3f} over {step.ms:.3f} ms")

    return read


def tree_ms(shape: str, counts: Iterable[int]) -> Callable[[Outcome], Figure]:
    """All steps of a tree, of the slowest number of branches."""

    def read(outcome: Outcome) -> Figure:
        trees = [_tree(outcome, shape, branches) for branches in counts]
        note = ", ".join(f"{t.branches} branches {t.total_ms:.3f} ms" for t in trees)
        return Figure(max(t.total_ms for t in trees), f"{trees[0].steps} steps: {note}")

    return read


def _decode(outcome: Outcome, shape: str) -> Decode:
    steps = [d for d in _records(outcome, "decode", Decode) if d.shape == shape]
    if not steps:
        raise Missing(f"no decoding step of {shape}")
    return steps[0]


def _tree(outcome: Outcome, shape: str, branches: int) -> Tree:
    for tree in _records(outcome, "tree", Tree):
        if (tree.shape, tree.branches) == (shape, branches):
            return tree
    raise Missing(f"no tree of {shape} with {branches} branches")


# ------------------------------------------------------------ whole pipelines


def rate(kind: str, beside: Iterable[str] = ()) -> Callable[[Outcome], Figure]:
    """Tokens a second of the best engine of a kind at the first temperature; ``beside``: other
    kinds to name."""

    def read(outcome: Outcome) -> Figure:
        engines = _engines(outcome)
        mine = [e for e in engines if e.pair == engines[0].pair]
        others = [best(mine, other) for other in beside]
        note = ", ".join(f"{e.engine} {e.tok_s:.0f}" for e in others)
        return Figure(best(mine, kind).tok_s or 0.0, f"beside it: {note}" if note else "")

    return read


def pipeline_share(outcome: Outcome) -> Figure:
    """Weights' bytes that AR reads a second, host and all, over the bandwidth."""
    engine = best(_engines(outcome), "ar")
    if not engine.gb_s or not outcome.bandwidth:
        raise Missing("no rate of bytes")
    note = f"{engine.tok_s:.0f} tok/s; a copy {outcome.bandwidth * 1e-12:.2f} TB/s"
    return Figure(engine.gb_s * 1e9 / outcome.bandwidth, note)


def over(kind: str, temperature: str = "", published: str = "") -> Callable[[Outcome], Figure]:
    """SSD over another engine, each at its best K; ``published``: a pair to name the paper's of."""

    def read(outcome: Outcome) -> Figure:
        engines = [e for e in _engines(outcome) if e.pair.endswith(temperature)]
        ours, other = best(engines, "ssd"), best(engines, kind)
        parts = [_said(e, engines) for e in (ours, other)]
        if published:
            paper = PUBLISHED[published]
            base = paper.sd if kind == "sd" else paper.ar
            parts.append(f"paper {paper.ssd / base:.2f}")
        return Figure((ours.tok_s or 0.0) / (other.tok_s or 1.0), "; ".join(parts))

    return read


def theorem7(outcome: Outcome) -> Figure:
    """The best SSD over what its own stage times allow."""
    engines = _engines(outcome)
    ours = best(engines, "ssd")
    if not ours.theorem7_tok_s:
        raise Missing(f"{ours.engine} has no stage times")
    note = f"{_said(ours, engines)} of {ours.theorem7_tok_s:.0f}; {_inside(ours.pair)}"
    return Figure((ours.tok_s or 0.0) / ours.theorem7_tok_s, note)


def leased_hit(outcome: Outcome) -> Figure:
    """Microseconds from one verification's choice to the next one's start, the worst engine's."""
    engines = [e for e in _engines(outcome) if e.kind == "ssd"]
    found = [
        (e.stages.hit_gap_us, e)
        for e in engines
        if e.stages.hit_gap_us is not None and (e.stages.leased or 0.0) > LEASED
    ]
    if not found:
        raise Missing("no engine's rounds were leased")
    gap, worst = max(found, key=lambda pair: pair[0])
    least = min(gap for gap, _ in found)
    return Figure(gap, f"{worst.engine}, {worst.pair}; the best {least:.1f}")


def scheduled_hit(outcome: Outcome) -> Figure:
    """Microseconds of a round on a hit beyond the GPU's verification, as a leased engine of the
    same chain and branches times it; the worst temperature's.

    Of hits whose chain was ready: with a draft that is late, it is the draft that takes the time.
    """
    engines = _engines(outcome)
    found, late = [], ""
    for host in (e for e in engines if e.kind == "ssd-host"):
        name = host.engine.replace("-host", "")
        stages = host.stages
        said = f"{host.engine}, {host.pair}: {stages.hits_ready} of {stages.hits} hits were ready"
        for twin in engines:
            whole, alone = stages.hit_round_ms, twin.stages.verify_ms
            same = (twin.engine, twin.pair) == (name, host.pair)
            if not same or not whole or not alone or (twin.stages.leased or 0.0) <= LEASED:
                continue
            if stages.hits_ready < FEWEST_HITS:
                late = said
                continue
            beyond, gap = (whole - alone) * 1e3, stages.hit_gap_us or 0.0
            parts = f"{gap:.0f} us between steps, {beyond - gap:.0f} of launch and the way to it"
            found.append((beyond, f"{said}; {parts}"))
    if late:
        raise Missing(late)
    if not found:
        raise Missing("no engine ran both through the scheduler and leased")
    return Figure(*max(found))


def best(engines: Iterable[EngineRow], kind: str) -> EngineRow:
    """The fastest of a kind. Raises Missing without any."""
    found = [e for e in engines if e.kind == kind and e.tok_s]
    if not found:
        raise Missing(f"no engine of kind {kind}")
    return max(found, key=lambda e: e.tok_s or 0.0)


def _said(engine: EngineRow, engines: Iterable[EngineRow]) -> str:
    """An engine and its rate, and a warning if a K beyond those tried may be better still."""
    tried = {e.k for e in engines if e.kind == engine.kind and e.tok_s}
    text = f"{engine.engine} {engine.tok_s:.0f} tok/s"
    if len(tried) > 1 and engine.k in (min(tried), max(tried)):
        text += f" (of K = {', '.join(map(str, sorted(tried)))}, the best at their end)"
    return text


def _inside(pair: str) -> str:
    """What is replayed: the text in brackets."""
    return pair.partition("[")[2].rstrip("]") or pair


def _engines(outcome: Outcome) -> list[EngineRow]:
    engines = _records(outcome, "pipeline", EngineRow)
    if not engines:
        raise Missing("no engine has a row")
    return engines


def _records(outcome: Outcome, section: str, kind: type[Record]) -> list[Record]:
    sections: Any = outcome.report.get("sections")
    records = sections.get(section, []) if isinstance(sections, dict) else []
    try:
        return msgspec.convert(records, list[kind])  # type: ignore[valid-type]
    except msgspec.ValidationError as error:
        raise Missing(f"{section}: {error}") from None
