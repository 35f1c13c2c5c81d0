"""A pipeline that lives as long as one Python object, for use inside a script."""

from __future__ import annotations

import contextlib
import tempfile
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, overload

import msgspec

from ipc.messages.client import ChatMessage, StatusReply
from ipc.running_time import RunningTime
from ssd_pipe import slow_kernels
from ssd_pipe.client import Client, Result, Stream
from ssd_pipe.config import FanOut, Mode, PipelineConfig
from ssd_pipe.config_load import load
from ssd_pipe.errors import PeerLost, RequestError
from ssd_pipe.owned_process import OwnedProcess, up_command
from ssd_pipe.params import SamplingParams
from ssd_pipe.submission import Messages, Prompt, each_prompt

START_MARGIN = 60.0  # seconds beyond the ready timeout, which the pipeline watches itself
STOP_MARGIN = 10.0  # seconds beyond the grace time for the group to be gone
POLL = 0.02  # seconds between looks for the ready file


class LLM:
    """Starts a pipeline and stops it again; a context manager.

    Args:
        target: built-in name, local folder or hub id; None = the default one.
        draft: likewise.
        mode: "ar", "sd" or "ssd".
        k: draft tokens a round.
        fan_out: branches per accepted length, see SpeculationSection.
        tp: tensor-parallel target processes.
        settings: any other setting by its dotted name, e.g. ``{"scheduler.max_num_seqs": 16}``.
        config: a whole configuration instead of all of the above.
        timeout: seconds of silence after which a request fails with PeerLost.

    Models that are not on this machine are fetched first. Raises ConfigError for a wrong setting,
    ModelError for a model that is not to be had or is broken, PeerLost with the pipeline's last
    words if it does not start. Nothing is left running in any of these cases.
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        mode: Mode | None = None,
        k: int | None = None,
        fan_out: FanOut | None = None,
        tp: int | None = None,
        settings: Mapping[str, Any] | None = None,
        config: PipelineConfig | None = None,
        timeout: float = 60.0,
    ) -> None:
        given = {
            "target.model": target,
            "draft.model": draft,
            "mode": mode,
            "speculation.k": k,
            "speculation.fan_out": fan_out,
            "target.tp": tp,
        }
        overrides = {name: value for name, value in given.items() if value is not None}
        overrides |= settings or {}
        if config is None:
            config = load(None, overrides)
        elif overrides:
            raise TypeError(f"config was given, and besides it {', '.join(overrides)}")
        self.config = config
        _check(config)
        with contextlib.ExitStack() as held:
            # It stays: the ready file is written anew after every restart of the group.
            scratch = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="ssd-pipe-")))
            self._process = OwnedProcess(up_command(config, scratch))
            held.callback(self._process.stop, config.run.grace + STOP_MARGIN)
            run = self._wait_ready(scratch / "ready.json")
            self._client = Client(run=run, shm_dir=config.run.shm_dir, timeout=timeout)
            self._finalizer = weakref.finalize(self, held.pop_all().close)
        with contextlib.suppress(PeerLost):  # of which the first request will tell
            for warning, names in slow_kernels.warnings(self.status().processes):
                warnings.warn(f"{warning} ({names})", RuntimeWarning, stacklevel=2)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[Result]:
        """Complete one prompt or several, all at once; results in order.

        A prompt is a text, a list of token ids, or as vLLM has them ``{"prompt": text}`` or
        ``{"prompt_token_ids": ids}``; a flat list of numbers is one prompt.
        ``params`` are for all or one per prompt; ``sampling`` are fields that override them.
        Raises the first error there is, after cancelling the other requests.
        """
        several = each_prompt(prompts)
        submits = [
            partial(self._client.stream, prompt, own, **sampling)
            for prompt, own in zip(several, _each(params, len(several), "prompts"), strict=True)
        ]
        return self._together(submits)

    @overload
    def chat(
        self,
        messages: str | Messages,
        params: SamplingParams | None = None,
        **sampling: Any,
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Sequence[str | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> list[Result]: ...

    def chat(
        self,
        messages: str | Messages | Sequence[str | Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        **sampling: Any,
    ) -> Result | list[Result]:
        """The answer to a conversation, or to one user message given as a string; a list of either
        is answered all at once, results in order.

        ``params`` and ``sampling`` as for ``generate``; ``chat_template_kwargs`` are more variables
        of the model's chat template.
        """
        one = isinstance(messages, str | Mapping | ChatMessage)  # or a turn without its list
        several = not one and messages and all(map(_is_whole, messages))
        whole: list[Any] = list(messages) if several else [messages]
        submits = [
            partial(self._client.chat, conversation, own, **sampling)
            for conversation, own in zip(
                whole, _each(params, len(whole), "conversations"), strict=True
            )
        ]
        results = self._together(submits)
        return results if several else results[0]

    def _together(self, submits: Sequence[Callable[[], Stream]]) -> list[Result]:
        """All results in order. Raises the first error there is, after cancelling the others."""
        results: list[Result] = []
        waiting: deque[Stream] = deque()
        try:
            for submit in submits:
                if len(waiting) >= self.config.scheduler.max_waiting:
                    results.append(waiting.popleft().result())
                waiting.append(submit())
            while waiting:
                results.append(waiting[0].result())
                waiting.popleft()
        except (PeerLost, RequestError) as error:
            raise self._explain(error) from None
        finally:
            with contextlib.suppress(PeerLost):
                for stream in waiting:
                    stream.close()
        return results

    def stream(
        self,
        prompt: Prompt | None = None,
        params: SamplingParams | None = None,
        *,
        messages: Messages | None = None,
        token_ids: Sequence[int] | None = None,
        **sampling: Any,
    ) -> Stream:
        """Chunks as they come; arguments as for Client.stream."""
        return self._client.stream(
            prompt, params, messages=messages, token_ids=token_ids, **sampling
        )

    def status(self) -> StatusReply:
        """State and counters of the pipeline."""
        return self._client.status()

    def close(self) -> None:
        """Stop the pipeline and wait until it is gone; idempotent."""
        self._client.close()
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _wait_ready(self, ready_file: Path) -> str:
        """Until the pipeline says that it is ready; returns its run's name."""
        clock, limit = RunningTime(POLL), self.config.run.ready_timeout + START_MARGIN
        while not ready_file.exists():
            if not self._process.running:
                raise self._explain(PeerLost("the pipeline ended while it was starting"))
            if clock.read() > limit:
                raise self._explain(PeerLost("the pipeline did not become ready in time"))
            time.sleep(POLL)
        facts = msgspec.json.decode(ready_file.read_bytes(), type=dict[str, Any])
        return str(facts["run"])

    def _explain(self, error: PeerLost | RequestError) -> PeerLost | RequestError:
        """The error with what the pipeline said last, if it is the pipeline's own end."""
        if isinstance(error, RequestError) and error.code != 503:
            return error
        ends = self.config.run.on_failure == "stop"  # else it is being restarted
        words = self._process.last_words(self.config.run.grace + STOP_MARGIN if ends else 0.0)
        if words is None:
            return error
        line, output = words
        explained = PeerLost(f"{error}: {line}")
        if output:
            explained.add_note(f"the pipeline's last lines:\n{output}")
        return explained


def _check(config: PipelineConfig) -> None:
    """Here, where its errors are Python's own, what the pipeline would check as it starts."""
    from ssd_pipe import preflight
    from ssd_pipe.fetch import fetch_models
    from ssd_pipe.threads import check_cpus

    check_cpus(config)
    preflight.check_settings(config)
    fetch_models(config)
    preflight.check_models(config)


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int, what: str
) -> list[SamplingParams | None]:
    """One for each of ``count``. Raises ValueError if others were given."""
    each: list[SamplingParams | None]
    each = list(params) if isinstance(params, Sequence) else [params] * count
    if len(each) != count:
        raise ValueError(f"{count} {what}, but {len(each)} params")
    return each


def _is_whole(part: Any) -> bool:
    """Whether it is a conversation rather than a turn of one."""
    return isinstance(part, Sequence)
