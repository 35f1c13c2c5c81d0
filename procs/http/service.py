"""What the routes share: the connection to the pipeline and what is known of the served model."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import PurePath

from structlog.typing import FilteringBoundLogger

from procs.http.answers import Answers
from procs.http.errors import ApiError
from procs.http.parse import Prompt
from procs.http.request_metrics import RequestHistograms
from procs.liveness import farewell
from ssd_pipe.async_client import AsyncClient
from ssd_pipe.config import PipelineConfig
from ssd_pipe.errors import RequestError
from ssd_pipe.hub import resolve
from ssd_pipe.params import SamplingParams
from ssd_pipe.text.tokenizer import Tokenizer


class Service:
    """One gateway.

    Attributes:
        client: connection to the pipeline.
        config: of the run.
        model_name: what the model is called here.
        max_model_len: most tokens of prompt and answer together.
        created: when the gateway started, in seconds since 1970.
        histograms: of requests.
        stopping: why the gateway is going down; empty while it is not.
        tokenizing: held by whoever turns text into tokens, or back, for a client.
    """

    def __init__(
        self,
        client: AsyncClient,
        config: PipelineConfig,
        max_model_len: int,
        log: FilteringBoundLogger,
    ) -> None:
        self.client = client
        self.config = config
        self.log = log
        target = config.target.model
        short = PurePath(target).name or target
        self.model_name = config.gateway.model_name or short
        self._names = {self.model_name, target, short}
        self.max_model_len = max_model_len
        self.created = int(time.time())
        self.histograms = RequestHistograms(self.model_name)
        self.stopping = ""
        self.tokenizing = asyncio.Lock()
        self._tokenizer: Tokenizer | None = None

    def check_model(self, name: str | None) -> None:
        """Raises ApiError (404) for a model that is not the served one; None is."""
        # A folder may have been given in another way than the run's configuration has it.
        if name is not None and not {name, os.path.abspath(name)} & self._names:
            reason = f"{name!r} does not exist, this server has {self.model_name!r}"
            raise ApiError(404, reason, "model", "model_not_found")

    def check_serving(self) -> None:
        """Raises RequestError (503) when the gateway is going down."""
        if self.stopping:
            raise self.goodbye()

    def goodbye(self) -> RequestError:
        """What requests are told when the gateway is going down."""
        return farewell(self.stopping)

    def answers(self, prompts: Sequence[Prompt], params: SamplingParams, must_fit: bool) -> Answers:
        """Submit; see Answers."""
        self.check_serving()
        timeout = self.config.gateway.request_timeout
        return Answers(self.client, prompts, params, must_fit, timeout, self.histograms)

    async def tokenizer(self) -> Tokenizer:
        """The target's, read when it is first needed."""
        if self._tokenizer is None:
            folder = resolve(self.config.target.model)
            self._tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        return self._tokenizer

    async def text_of(self, prompt: Prompt) -> str:
        """The text of a prompt, for ``echo``."""
        if prompt.token_ids is None:
            return prompt.text or ""
        return (await self.tokenizer()).decode(prompt.token_ids)
