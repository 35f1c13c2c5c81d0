"""What parts of the table of two GPUs leave, made up after measured values."""

from __future__ import annotations

from typing import Any

from bench.gpu_table.parts import PARTS, Outcome

GREEDY, SAMPLED = "smollm2 T=0", "smollm2 T=1"


def engine(name: str, tok_s: float | None, pair: str, **other: Any) -> dict[str, Any]:
    """A record of ``bench.gpu_pipeline``; ``other``: rates, or stages."""
    rates = {n: other.pop(n, None) for n in ("gb_s", "theorem7_tok_s")}
    return {"engine": name, "tok_s": tok_s, "pair": pair, "batch": 1, **rates, "stages": other}


def leased(name: str, tok_s: float, pair: str, verify_ms: float = 0.83) -> dict[str, Any]:
    stages = {"verify_ms": verify_ms, "hit_round_ms": verify_ms + 0.01, "hit_gap_us": 9.9}
    return engine(name, tok_s, pair, leased=0.99, theorem7_tok_s=tok_s / 0.96, **stages)


def through(pair: str, ready: int = 150) -> list[dict[str, Any]]:
    stages = {"hit_round_ms": 1.01, "hit_gap_us": 82.0, "verify_ms": 0.91, "leased": 0.0}
    stages |= {"hits": 200, "hits_ready": ready}
    return [
        engine("ar", 1485.0, pair, leased=0.0),
        engine("ssd-host-3-12", 3000.0, pair, **stages),
        leased("ssd-3-12", 2387.0, pair),
    ]


def real(pair: str) -> list[dict[str, Any]]:
    return [
        engine("ar", 1485.0, pair, leased=0.0),
        engine("sd-3", 942.0, pair),
        engine("sd-4", 1526.0, pair),
        engine("sd-5", None, pair),
        leased("ssd-3-12", 2387.0, pair),
        leased("ssd-3-18", 2545.0, pair, 0.82),
        leased("ssd-5-18", 2385.0, pair),
    ]


def shapes(name: str, ar: float, sd: float, ssd: float) -> dict[str, Any]:
    pair = f"{name} [synthetic acceptance: 0.8 a token, hit rate 0.86, assumed]"
    rows = [engine("ar", ar, pair, gb_s=3150.0), engine("sd-4", sd, pair)]
    rows += [engine("sd-5", sd - 9, pair), leased("ssd-3-12", ssd - 20, pair)]
    return {"pipeline": [*rows, leased("ssd-4-10", ssd, pair)]}


def sections() -> dict[str, dict[str, Any]]:
    """Those of every part."""
    decode = {"variant": "default", "tok_s": 238.0, "verify6": 1.05}
    tree = {"variant": "default", "steps": 5}
    return {
        "steps": {
            "decode": [
                decode | {"shape": s, "ms": ms, "bandwidth_share": share, "verify8": v}
                for s, ms, share, v in (
                    ("llama-3.2-1b", 0.98, 0.6, 1.2),
                    ("llama-3.1-8b", 4.2, 0.83, 1.12),
                )
            ],
            "tree": [
                tree | {"shape": s, "branches": b, "total_ms": ms, "step_over_ar": over}
                for s, b, ms, over in (
                    ("llama-3.2-1b", 12, 5.4, 1.10),
                    ("llama-3.2-1b", 24, 5.6, 1.143),
                    ("smollm2-draft-16m", 12, 0.55, 1.2),
                    ("smollm2-draft-16m", 24, 0.6, 1.3),
                )
            ],
        },
        "smollm2": {"pipeline": real(GREEDY) + real(SAMPLED)},
        "host": {"pipeline": through(GREEDY) + through(SAMPLED)},
        "llama8b": shapes("llama8b", 210.0, 370.0, 560.0),
        "qwen32b": shapes("qwen32b", 56.0, 116.0, 191.0),
        "llama70b": shapes("llama70b", 28.0, 128.0, 122.0),
        "transformers": {
            "pipeline": [
                engine("ar", 1458.0, GREEDY),
                leased("ssd-3-18", 2500.0, GREEDY),
                engine("hf", 29.3, GREEDY),
                engine("hf-assisted", 15.4, GREEDY),
            ]
        },
    }


def outcome(content: dict[str, Any], **fields: Any) -> Outcome:
    report = {"bandwidth_TBps": 4.27, "failed": [], "sections": content}
    made = {"command": ["python"], "started": "now", "seconds": 1.0, "bandwidth": 4.2e12}
    return Outcome(**made | {"report": report} | fields)


def outcomes() -> dict[str, Outcome]:
    commands = {part.name: ["python", *part.command] for part in PARTS}
    return {name: outcome(content, command=commands[name]) for name, content in sections().items()}
