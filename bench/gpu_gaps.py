"""Where two engines chose differently, and how close the target's own scores are there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bench.compare import Job, Sample
from bench.gpu_common import Report
from models.registry import load_model
from models.sequence_batch import build_batch
from models.transformer import Transformer
from ssd_pipe.hub import resolve
from ssd_pipe.params import SamplingParams
from ssd_pipe.sampling import noise

BLOCK = 16


class Gaps:
    """The target in bfloat16 on one device, loaded at the first question."""

    def __init__(self, model: str, device: str) -> None:
        self._model = model
        self._device = device
        self._loaded: Transformer | None = None

    @torch.inference_mode()
    def between(self, text: Sequence[int], a: int, b: int, params: SamplingParams) -> float:
        """|score(a) - score(b)| after ``text``: logits, or tempered logits with shared noise."""
        if self._loaded is None:
            if self._device.startswith("cuda"):
                torch.cuda.set_device(self._device)
            self._loaded = load_model(resolve(self._model), device=self._device)
        model = self._loaded
        blocks = -(-len(text) // BLOCK)
        batch = build_batch(
            [(list(range(blocks)), 0, list(text), len(text) - 1)], BLOCK, self._device
        )
        logits = model.logits(model.forward(batch, model.make_kv(blocks, BLOCK)))
        if logits is None:
            raise RuntimeError("this rank has no logits")
        scores = logits[0]
        if params.temperature > 0:
            key = noise.keys_to_tensor(
                noise.row_keys([params.seed or 0], [len(text)], noise.SHARED), self._device
            )
            scores = scores / params.temperature + noise.gumbel(key, scores.shape[0])[0]
        return abs(float(scores[a] - scores[b]))


def compare_tokens(
    report: Report,
    label: str,
    samples: Sequence[Sample],
    jobs: Sequence[Job],
    references: Sequence[str],
    gaps: Gaps,
) -> None:
    """Where engines part from ``references``, and how close the two tokens' scores are there."""
    asked = {job.id: job for job in jobs}
    sampled = any(job.params.temperature > 0 for job in jobs)
    names = list(dict.fromkeys(s.engine for s in samples))
    for reference in references:
        wanted = {s.key: s.answer.tokens for s in samples if s.engine == reference}
        for engine in names:
            if engine == reference or (engine.startswith("hf") and sampled):
                continue  # transformers has noise of its own
            answers = [s for s in samples if s.engine == engine and s.key in wanted]
            found = []
            for sample in answers:
                ours, theirs = wanted[sample.key], sample.answer.tokens
                pairs = enumerate(zip(ours, theirs, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), None)
                if at is not None:
                    job = asked[sample.prompt]
                    text = job.tokens + ours[:at]
                    found.append(gaps.between(text, ours[at], theirs[at], job.params))
            report.add(
                "tokens",
                pair=label,
                reference=reference,
                engine=engine,
                answers=len(answers),
                equal=len(answers) - len(found),
                gaps=[round(gap, 4) for gap in sorted(found)],
            )
