"""Continuous batching over paged KV: which sequences run in the next target step.

Pure: no clock, no socket, no tensor. One call of ``schedule`` plans one step; ``apply`` takes what
the step gave. Decoding rows come first, then prompt chunks fill what is left of the token budget,
``max_chunk`` of each prompt at most, so that a long prompt neither delays others for long nor keeps
short ones from being read beside it. Chains leave a quarter of the budget to prompts while there
are any. Requests get in, and prompts are read, in the order they came. When
blocks run out the newest sequence is preempted by recomputation: its blocks go, its tokens stay,
and it comes back by the front door.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ipc.messages.target import TOKEN_BYTES, RowOutcome
from ssd_pipe.engine.blocks import BlockManager, NoFreeBlocks
from ssd_pipe.engine.ending import cut
from ssd_pipe.engine.hashing import extend_all
from ssd_pipe.engine.request import Request, Status
from ssd_pipe.engine.step import FAILED, Emission, Row, Step
from ssd_pipe.errors import RequestError

MAX_BEGIN_BYTES = 256 << 10
"""Processors, and the cached prompts they look at, that one step may carry if it begins several."""


@dataclass(slots=True)
class Scheduler:
    """See the module's docstring.

    Attributes:
        blocks: the target's KV blocks.
        max_num_seqs: slots.
        max_model_len: most tokens (prompt + output) of a request.
        max_batched_tokens: token budget of a step.
        lookahead: proposals a decoding row may carry (0 without speculation); may be set before
            each step.
        max_waiting: length of the waiting line.
        long_prefill: most tokens of one prompt in a step; 0 = as the budget allows.
    """

    blocks: BlockManager
    max_num_seqs: int
    max_model_len: int
    max_batched_tokens: int
    lookahead: int
    max_waiting: int
    long_prefill: int = 0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    preemptions: int = 0
    _free_slots: list[int] = field(default_factory=list)
    _dropped: list[int] = field(default_factory=list)
    _steps: int = 0
    _room: int = 0  # proposals a row may carry so that the step fits the token budget

    def __post_init__(self) -> None:
        self._free_slots = list(range(self.max_num_seqs - 1, -1, -1))

    @property
    def max_chunk(self) -> int:
        """Most tokens of one prompt in a step."""
        return self.long_prefill or self.max_batched_tokens

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Put a request in line. Raises RequestError: 400 too long or empty, 429 line full."""
        if not request.tokens:
            raise RequestError(400, "must not be empty", "prompt")
        if request.prompt_len + 1 > self.max_model_len:
            raise RequestError(
                400,
                f"has {request.prompt_len} tokens; with one of output the limit is "
                f"max_model_len = {self.max_model_len}",
                "prompt",
            )
        if len(self.waiting) >= self.max_waiting:
            raise RequestError(429, f"the waiting line is full ({self.max_waiting} requests)")
        request.limit = min(request.limit, self.max_model_len)
        self.waiting.append(request)

    def abort(self, rid: int) -> Request | None:
        """Forget a request, wherever it is; call between steps. None if it is not known."""
        for request in self.waiting:
            if request.rid == rid:
                self.waiting.remove(request)
                request.status = Status.FINISHED
                return request
        for request in self.running:
            if request.rid == rid:
                self._finish(request)
                return request
        return None

    def requests(self) -> Iterator[Request]:
        yield from self.running
        yield from self.waiting

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def load(self) -> int:
        """Sequences that run, or will if none does yet."""
        return len(self.running) or min(self.max_num_seqs, len(self.waiting))

    # ------------------------------------------------------------ planning

    def schedule(self) -> Step | None:
        """Plan the next step, None if nothing can run.

        A decoding row gets blocks for ``lookahead`` proposals; its chain may be set after this
        call and before ``Step.to_plan``, up to that length and ``chain_room``.
        """
        budget = self.max_batched_tokens
        preempted = self.preemptions
        rows: list[Row] = []
        begun: list[Request] = []
        decoding = [request for request in self.running if request.prefilled]
        self._room = self._fitting(len(decoding))
        for request in decoding:
            if request.status is not Status.RUNNING:
                continue  # preempted a moment ago
            need = 1 + self.chain_room(request)
            if self._ensure(request, request.computed + need):
                rows.append(Row(request, request.computed, 1, sample=True, decoding=True))
                budget -= need
        rows = [row for row in rows if row.request.status is Status.RUNNING]
        for request in list(self.running):
            if request.status is Status.RUNNING and not request.prefilled and budget > 0:
                budget -= self._add_chunk(request, budget, rows)
        # A step that preempted admits nobody: whoever left would be let in again at once.
        room = MAX_BEGIN_BYTES
        while preempted == self.preemptions and self.waiting and budget > 0 and self._free_slots:
            request = self.waiting[0]
            processors = request.key.processors
            extra = 0
            if processors is not None:
                extra = processors.wire_bytes + TOKEN_BYTES * len(request.tokens)
            if (begun and extra > room) or not self._admit(request):
                break
            room -= extra
            begun.append(request)
            budget -= self._add_chunk(request, budget, rows)
        rows = [row for row in rows if row.request.status is Status.RUNNING]
        begun = [request for request in begun if request.status is Status.RUNNING]
        if not rows:
            return None
        self._steps += 1
        step = Step(self._steps, rows, begun, self._dropped)
        self._dropped = []
        return step

    def leased_step(self, requests: Sequence[Request]) -> Step:
        """A step that the target made, or makes, of these decoding requests by itself, for
        ``apply``; they have their blocks."""
        self._steps += 1
        rows = [Row(r, r.computed, 1, sample=True, decoding=True) for r in requests]
        return Step(self._steps, rows, [], [])

    def take_dropped(self) -> list[int]:
        """Slots freed since the last step, for when no step is coming."""
        dropped, self._dropped = self._dropped, []
        return dropped

    def chain_room(self, request: Request) -> int:
        """Longest useful chain: its last accepted token still leaves room for t*."""
        return max(0, min(self.lookahead, self._room, request.room - 1))

    @property
    def longest_chain(self) -> int:
        """Most proposals that a row may carry so that the last planned step fits the budget."""
        return self._room

    def _fitting(self, rows: int) -> int:
        """Longest chains with which so many decoding rows fit the step beside a prompt's chunk."""
        reading = len(self.running) > rows or (self.waiting and self._free_slots)
        budget = self.max_batched_tokens * 3 // 4 if reading else self.max_batched_tokens
        return max(0, budget // max(1, rows) - 1)

    # ------------------------------------------------------------ results

    def apply(self, step: Step, outcomes: Sequence[RowOutcome]) -> list[Emission]:
        """Commit what a step gave. ``outcomes`` are those of ``step.sampled``, in order.

        Raises ValueError if their number is off.
        """
        sampled = step.sampled
        if len(outcomes) != len(sampled):
            raise ValueError(f"{len(sampled)} rows sampled, {len(outcomes)} outcomes")
        by_row = dict(zip(map(id, sampled), outcomes, strict=True))
        emissions = []
        for row in step.rows:
            request = row.request
            if request.status is not Status.RUNNING:
                continue
            outcome = by_row.get(id(row))
            if outcome is None:
                request.computed += row.count
                self.blocks.commit(request.table, request.tokens, request.computed)
            else:
                emissions.append(self._commit(row, outcome))
        return emissions

    def _commit(self, row: Row, outcome: RowOutcome) -> Emission:
        request, k = row.request, outcome.accepted
        chain = request.chain if row.decoding else []
        if not 0 <= k <= len(chain):
            raise ValueError(f"{k} of {len(chain)} proposals accepted")
        before = request.prefix_hash
        if outcome.failure:
            self._finish(request)
            return Emission(request, [], 0, outcome, before, FAILED)
        tokens, finish = cut([*chain[:k], outcome.token], request.room, request.stop_ids)
        if row.decoding:
            request.rounds += 1
            request.drafts += bool(chain)
            request.drafted += len(chain)
            request.accepted += k
        request.computed = row.start + row.count + min(k, len(tokens))
        request.tokens.extend(tokens)
        request.prefix_hash = extend_all(before, tokens)
        request.drop_chain()
        if finish:
            self.blocks.commit(
                request.table, request.tokens, min(request.computed, len(request.tokens) - 1)
            )
            self._finish(request)
        else:
            self.blocks.commit(request.table, request.tokens, request.computed)
        accepted = min(k, len(tokens))
        return Emission(request, tokens, accepted, outcome, before, finish, len(chain))

    # ------------------------------------------------------------ places and blocks

    def _add_chunk(self, request: Request, budget: int, rows: list[Row]) -> int:
        count = min(budget, len(request.tokens) - request.computed, self.max_chunk)
        if not self._ensure(request, request.computed + count):
            return 0
        last = request.computed + count == len(request.tokens)
        rows.append(Row(request, request.computed, count, sample=last, decoding=False))
        return count

    def _admit(self, request: Request) -> bool:
        """Give the head of the line a slot and its known prefix; False if its chunk cannot fit."""
        cached = self.blocks.match_prefix(request.tokens)
        covered = len(cached) * self.blocks.block_size
        chunk = min(len(request.tokens), covered + self.max_chunk)
        # One block to spare per running sequence: admission must not cause a preemption at once.
        spare = len(self.running)
        needed = self.blocks.blocks_for(chunk) - len(cached) + spare
        if spare and needed > self.blocks.free_beside(cached):
            return False
        try:
            self.blocks.allocate(request.table, request.tokens, cached, num_tokens=covered)
        except NoFreeBlocks:
            return False
        self.waiting.popleft()
        request.computed = covered
        request.announced = 0
        if not request.cached_prompt_tokens:
            request.cached_prompt_tokens = min(covered, request.prompt_len)
        request.slot = self._free_slots.pop()
        request.draft_length = -1
        request.status = Status.RUNNING
        self.running.append(request)
        return True

    def _ensure(self, request: Request, num_tokens: int) -> bool:
        """Blocks for ``num_tokens`` positions, preempting newer sequences (or itself) for them."""
        while True:
            try:
                self.blocks.ensure(request.table, num_tokens)
                return True
            except NoFreeBlocks:
                victim = self.running[-1]
                if victim is request and len(self.running) == 1:
                    raise  # start-up sizing lets any one sequence fit, so this is a defect
                self._preempt(victim)
                if victim is request:
                    return False

    def _preempt(self, request: Request) -> None:
        self.preemptions += 1
        self._leave(request)
        request.computed = 0
        request.status = Status.WAITING
        self.waiting.appendleft(request)

    def _finish(self, request: Request) -> None:
        self._leave(request)
        request.status = Status.FINISHED

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self.blocks.release(request.table)
        self._dropped.append(request.slot)
        self._free_slots.append(request.slot)
        request.slot = -1
        request.drop_chain()
