"""Decoding, verification and glue steps as CUDA graphs, one per bucket of rows.

A step feeds up to W consecutive tokens to each of R rows, takes the logits of all of them, and
chooses a token after each: W = 1 is decoding, W = K + 1 verification or the draft's glue pass. The
host writes a few numbers a row; positions, slots, lengths and noise keys are made on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from models.cuda.candidates import best_scores, following_scores
from models.cuda.capture import GraphPool
from models.cuda.head import head_logits
from models.cuda.inputs import expand_rows
from models.cuda.mailbox import Mailbox
from models.cuda.noise import choose
from models.cuda.posting import Posting
from models.cuda.step_inputs import StepInputs
from models.cuda.tiles import StaticBatch, fixed_tiles, tile_width
from models.kv_cache import KVCache
from models.transformer import Transformer


@dataclass(slots=True)
class StepRow:
    """One sequence's part of a step.

    Attributes:
        blocks: its block table, reaching the last token fed.
        start: position of the first token.
        tokens: 1 to W tokens.
        seed: noise seed, 0..2^64 - 1; the choice after a token at position p has the noise of
            (seed, p + 1, stream).
        temperature: 0 = greedy. No filters: rows with top-p, top-k or min-p are judged on
            ``StepOutput.logits``.
        streams: noise stream of each token's choice, one for all or one a token.
    """

    blocks: Sequence[int] | np.ndarray
    start: int
    tokens: Sequence[int]
    seed: int = 0
    temperature: float = 0.0
    streams: int | Sequence[int] = 0


@dataclass(slots=True)
class StepOutput:
    """Static tensors of a bucket, overwritten by its next launch. Rows beyond the R asked for, and
    tokens beyond a row's own, hold nothing of use.

    Attributes:
        chosen: int64 [rows, W], the choice after each token.
        logits: [rows, W, V] in the model's activation dtype.
        top_scores, top_tokens: float32 and int64 [rows, W, n], falling; with ``top_n`` only.
        next_scores: float32 [rows, W], the score of the token fed next in the row; with ``top_n``
            only.
    """

    chosen: torch.Tensor
    logits: torch.Tensor
    top_scores: torch.Tensor | None = None
    top_tokens: torch.Tensor | None = None
    next_scores: torch.Tensor | None = None


class StepHooks(Protocol):
    """Called with a graph while it is captured; what they queue is part of every launch."""

    def head(self, graph: StepGraph) -> None:
        """Before anything reads the inputs."""

    def tail(self, graph: StepGraph) -> None:
        """After the choice of tokens; may write the next launch's inputs."""


class StepGraph:
    """The graph of one bucket: R rows of W tokens, block tables of ``num_blocks`` entries.

    Attributes:
        inputs: the device tensors that a launch reads.
        launches: so many there were.
        posting: their choices on the host, None if not asked for.
    """

    def __init__(
        self,
        model: Transformer,
        kv: KVCache,
        pool: GraphPool,
        rows: int,
        width: int,
        num_blocks: int,
        top_n: int = 0,
        hooks: StepHooks | None = None,
        post: bool = False,
        successor: StepGraph | None = None,
        mail: bool = False,
    ) -> None:
        device, vocab = model.backend.device, model.config.vocab_size
        tokens = rows * width
        self.rows, self.width, self.num_blocks = rows, width, num_blocks
        self._on_gpu = device.type == "cuda"
        self._model, self._kv, self._top_n, self._hooks = model, kv, top_n, hooks
        self._staging = StepInputs(rows, width, num_blocks, kv.block_size, device)
        self.inputs = self._staging.tensors
        self._mailbox = Mailbox(self._staging) if mail else None

        def filled(dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(tokens, dtype=dtype, device=device)

        self._keys, self._factors = filled(torch.int64), filled(torch.float32)
        heads, kv_heads = len(model.shard.heads), len(model.shard.kv_heads)
        self._batch = StaticBatch(
            tokens=self.inputs["tokens"].view(-1),
            positions=filled(torch.int64),
            slots=filled(torch.int64),
            seqs=torch.arange(rows, dtype=torch.int32, device=device).repeat_interleave(width),
            block_tables=self.inputs["tables"],
            context_lens=filled(torch.int32),
            logit_index=torch.arange(tokens, device=device),
            tiles=fixed_tiles(
                rows,
                width,
                tile_width(width, heads, kv_heads, model.backend.activation_dtype),
                device,
            ),
        )
        self.output = StepOutput(
            torch.zeros((rows, width), dtype=torch.int64, device=device),
            torch.empty(0, device=device),
        )
        self._shape = (rows, width, vocab)
        self.posting = Posting(rows, width, device) if post else None
        self._successor = successor
        self._launch = pool.capture(self._step, device)
        self.launches = 0
        if mail and self._on_gpu:
            # The first launch uploads the graph, which must not wait behind one that waits.
            self._launch()
            torch.cuda.synchronize(device)
        if self.posting is not None:
            self.posting.begin()

    @torch.inference_mode()
    def _step(self) -> None:
        batch, inputs, out = self._batch, self.inputs, self.output
        if self._hooks is not None:
            self._hooks.head(self)
        expand_rows(
            inputs["starts"],
            inputs["counts"],
            inputs["tables"],
            inputs["seeds"],
            inputs["streams"],
            inputs["factors"],
            (batch.positions, batch.slots, batch.context_lens, self._keys, self._factors),
            self._kv.block_size,
        )
        logits = head_logits(self._model, self._model.forward(batch, self._kv))
        out.logits = logits.view(self._shape)
        noise = (self._keys, self._factors)
        choose(logits, *noise, out=out.chosen.view(-1))
        if self._top_n:
            found = best_scores(logits, *noise, self._top_n)
            out.top_scores, out.top_tokens = (t.view(self.rows, self.width, -1) for t in found)
            out.next_scores = following_scores(logits, *noise, inputs["tokens"])
        if self._hooks is not None:
            self._hooks.tail(self)
        if self.posting is not None:
            following = None if self.successor is None else self.successor.inputs
            self.posting.post(out.chosen, inputs, following)

    @property
    def successor(self) -> StepGraph | None:
        """The graph that gets the rows' next tokens, as inputs of one token a row: itself, or one
        of the same rows and blocks. None if nobody does."""
        if self.posting is None or self._hooks is not None:  # hooks may write inputs of their own
            return None
        # Not kept as an attribute: a graph in a cycle outlives the group whose collectives it has.
        return self if self._successor is None else self._successor

    def run(self, rows: Sequence[StepRow]) -> StepOutput:
        """Launch; does not wait. Raises ValueError if ``rows`` do not fit the bucket."""
        self.load(rows)
        return self.launch()

    def load(self, rows: Sequence[StepRow]) -> None:
        """Queue the copy of inputs for ``launch``. Raises as ``run``."""
        self._staging.write(rows)
        self._staging.copy()

    def launch(self) -> StepOutput:
        """Launch on the inputs as they are on the device; does not wait."""
        self._launch()
        self.launches += 1
        return self.output

    def launch_ahead(self) -> None:
        """Launch on input that is to come; does not wait. ``mail`` must follow before anything
        else is asked of the stream: nothing that is queued behind runs before it.

        Without a GPU, where nobody could bring it meanwhile, it is launched with its mail. Raises
        RuntimeError if the graph was not made for that.
        """
        mailbox = self._mail_taken()
        self.launches += 1
        if self._on_gpu:
            mailbox.fetch(self.launches)
            self._launch()

    def mail(self, rows: Sequence[StepRow]) -> None:
        """The input of the launch made ahead, which is the last one: ``rows``, or none, of which
        nothing comes. Does not wait. Raises as ``run``; the launch still waits then."""
        mailbox = self._mail_taken()
        if rows:
            self._staging.write(rows)
        else:
            self._staging.write_none()
        mailbox.send(self.launches)
        if not self._on_gpu:
            mailbox.fetch(self.launches)
            self._launch()

    def _mail_taken(self) -> Mailbox:
        if self._mailbox is None:
            raise RuntimeError("a launch ahead on a graph that takes no mail")
        return self._mailbox

    def go_on(self, held: Sequence[int], more: Sequence[Sequence[int]] = ()) -> StepGraph | None:
        """Queue the step after the last one launched, of the token that one chooses for each row;
        does not wait.

        A successor other than this graph must have been loaded with the rows before that launch;
        of what it was loaded with, all but token and position counts.

        Args:
            held: blocks that each row had at the last launch.
            more: those it has besides by now; empty if none has any.

        Returns:
            The graph launched; None, and nothing is done, if the blocks do not fit or there is no
            successor.
        """
        more = more or [[]] * len(held)
        longest = max(n + len(m) for n, m in zip(held, more, strict=True))
        following = self.successor
        if following is None or longest > following.num_blocks:
            return None
        if any(more):
            staging = following._staging
            staging.wait()
            tables = staging.host["tables"]
            for i, (count, blocks) in enumerate(zip(held, more, strict=True)):
                tables[i, count : count + len(blocks)] = blocks
            staging.copy("tables")
        following.launch()
        return following
