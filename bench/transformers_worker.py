"""The process behind TransformersEngine: jobs come as JSON lines on stdin, answers go to stdout."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bench.engines import Answer
from ssd_pipe.params import SamplingParams
from ssd_pipe.prctl import end_with_parent

if TYPE_CHECKING:
    import torch


class Loaded(msgspec.Struct, kw_only=True):
    """The models are there. ``weight_bytes``: what one step of the target reads."""

    weight_bytes: int
    settings: dict[str, Any]


class Job(msgspec.Struct, kw_only=True):
    """``gaps``: also say how far apart the two best logits were at each token."""

    tokens: list[int]
    params: SamplingParams
    gaps: bool = False


class Output(msgspec.Struct, kw_only=True):
    """``answer.started`` is when the job was received. ``gaps`` has one number a token."""

    answer: Answer
    gaps: list[float] = []


class Arrivals:
    """A streamer for ``generate`` that keeps times and tokens; the first put is the prompt."""

    def __init__(self) -> None:
        self.times: list[tuple[float, int]] = []
        self.tokens: list[int] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """``value``: token ids of any shape."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        ids = value.flatten().tolist()
        if ids:
            self.times.append((time.monotonic(), len(ids)))
            self.tokens += ids

    def end(self) -> None:
        """Nothing is held back."""


class Worker:
    """Two models and how to ask them."""

    def __init__(
        self, model: str, assistant: str | None, threads: int, device: str, dtype: str
    ) -> None:
        import torch

        torch.set_num_threads(threads)
        self._device, self._dtype = device, dtype
        self._model = _load(model, device, dtype)
        self._assistant = _load(assistant, device, dtype) if assistant else None
        self._eos = self._model.generation_config.eos_token_id

    def loaded(self) -> Loaded:
        import torch
        import transformers

        weights = {p.data_ptr(): p.nbytes for p in self._model.parameters() if p.dim() == 2}
        table = self._model.get_input_embeddings().weight
        head = self._model.get_output_embeddings().weight
        # A step gathers rows of the embedding; it reads the table only as a tied head.
        if table.data_ptr() != head.data_ptr():
            del weights[table.data_ptr()]
        settings: dict[str, Any] = {
            "dtype": self._dtype,
            "device": self._device,
            "attention": self._model.config._attn_implementation,
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
            "torch_threads": torch.get_num_threads(),
        }
        return Loaded(weight_bytes=sum(weights.values()), settings=settings)

    def run(self, job: Job) -> Output:
        import torch

        started = time.monotonic()
        arrivals = Arrivals()
        prompt = torch.tensor([job.tokens], device=self._device)
        params = job.params
        options: dict[str, Any] = {
            "max_new_tokens": params.max_tokens,
            "use_cache": True,
            "do_sample": params.temperature > 0,
            "return_dict_in_generate": True,
            "output_logits": job.gaps,
        }
        if params.temperature > 0:
            torch.manual_seed(params.seed or 0)
            options |= {"temperature": params.temperature, "top_p": params.top_p}
            options |= {"top_k": params.top_k, "min_p": params.min_p or None}
        if self._assistant is not None:
            options["assistant_model"] = self._assistant
        self._model.generation_config.eos_token_id = None if params.ignore_eos else self._eos
        with torch.inference_mode():
            made = self._model.generate(
                prompt, attention_mask=torch.ones_like(prompt), streamer=arrivals, **options
            )
        tokens = made.sequences[0, len(job.tokens) :].tolist()
        if tokens != arrivals.tokens:
            raise RuntimeError("the streamer saw other tokens than generate returned")
        ended = len(tokens) < params.max_tokens or tokens[-1] in _as_list(self._eos)
        return Output(
            answer=Answer(
                started=started,
                arrivals=arrivals.times,
                tokens=tokens,
                finish="stop" if ended and not params.ignore_eos else "length",
            ),
            gaps=_gaps(made.logits) if job.gaps else [],
        )


def _load(folder: str, device: str, dtype: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), local_files_only=True
    )
    return model.to(device).eval()


def _gaps(logits: Sequence[torch.Tensor]) -> list[float]:
    """Best minus second best of each step's logits [1, V]."""
    import torch

    best = torch.cat(list(logits)).float().topk(2).values
    return (best[:, 0] - best[:, 1]).tolist()


def _as_list(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else ids if isinstance(ids, list) else [ids]


def main() -> None:
    """Serve jobs until stdin ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--assistant")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--cpus", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    arguments = parser.parse_args()
    end_with_parent()
    if arguments.cpus:  # before torch makes threads
        os.sched_setaffinity(0, [int(c) for c in arguments.cpus.split(",")])
    worker = Worker(
        arguments.model,
        arguments.assistant,
        arguments.threads,
        arguments.device,
        arguments.dtype,
    )
    _answer(worker.loaded())
    for line in sys.stdin.buffer:
        _answer(worker.run(msgspec.json.decode(line, type=Job)))


def _answer(message: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
