"""Small real tokenizers, trained here, of the two kinds that language models use."""

import json
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from ssd_pipe.text import tokenizer as text_tokenizer

SPECIALS = ["<unk>", "<s>", "</s>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog, then the other one;",
    "def f(x):\n    return x + 1\n\n\n",
    "καλημέρα κόσμε и доброе утро, 你好世界 こんにちは 🙂🙃👩‍👩‍👧 naïve façade",
] * 4


@cache
def byte_level(bos: bool = False) -> text_tokenizer.Tokenizer:
    """GPT-2 style; with ``bos`` its post-processor puts <s> first, as Llama 3's does."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<own word ü>", special=False)])
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", backend.token_to_id("<s>"))]
        )
    return text_tokenizer.Tokenizer(backend, named_tokens={"bos_token": "<s>"})


@cache
def byte_fallback() -> text_tokenizer.Tokenizer:
    """Llama 2 style: sentencepiece spaces, unknown characters as byte tokens."""
    byte_tokens = [f"<0x{b:02X}>" for b in range(256)]
    backend = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIALS + byte_tokens, show_progress=False
    )
    backend.train_from_iterator(CORPUS[:2], trainer)
    spec = backend.to_str()
    backend = Tokenizer.from_str(_only_special(spec, SPECIALS))
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return text_tokenizer.Tokenizer(backend)


def _only_special(spec: str, keep: list[str]) -> str:
    value = json.loads(spec)
    value["added_tokens"] = [t for t in value["added_tokens"] if t["content"] in keep]
    return json.dumps(value)
