"""Between text and token ids, as vLLM's servers have it."""

from __future__ import annotations

import asyncio

from litestar import post
from litestar.di import NamedDependency

from procs.http import openapi, parse
from procs.http.bodies import wants
from procs.http.parse import Prompt
from procs.http.responses import Detokenized, Tokenized
from procs.http.schemas import DetokenizeRequest, TokenizeRequest
from procs.http.service import Service
from ssd_pipe.text.tokenizer import Tokenizer


@post(
    "/tokenize",
    dependencies=wants(TokenizeRequest),
    operation_class=openapi.TokenizeOperation,
    responses=openapi.answers(Tokenized),
    status_code=200,
)
async def tokenize(
    wanted: NamedDependency[TokenizeRequest], service: NamedDependency[Service]
) -> Tokenized:
    """The token ids of a text or of a conversation, as the model would get them."""
    prompt = parse.to_tokenize(wanted)
    tokenizer = await service.tokenizer()
    # One at a time: a text of some megabytes takes gigabytes on its way.
    async with service.tokenizing:
        ids, names = await asyncio.to_thread(_encode, tokenizer, prompt, wanted)
    return Tokenized(
        count=len(ids), max_model_len=service.max_model_len, tokens=ids, token_strs=names
    )


@post(
    "/detokenize",
    dependencies=wants(DetokenizeRequest),
    operation_class=openapi.DetokenizeOperation,
    responses=openapi.answers(Detokenized),
    status_code=200,
)
async def detokenize(
    wanted: NamedDependency[DetokenizeRequest], service: NamedDependency[Service]
) -> Detokenized:
    """The text of token ids."""
    tokenizer = await service.tokenizer()
    async with service.tokenizing:
        return Detokenized(prompt=await asyncio.to_thread(_decode, tokenizer, wanted.tokens))


def _encode(
    tokenizer: Tokenizer, prompt: Prompt, wanted: TokenizeRequest
) -> tuple[list[int], list[str] | None]:
    """Token ids and, if wanted, their names."""
    if prompt.messages is None:
        ids = tokenizer.encode(prompt.text or "", rendered=wanted.add_special_tokens is False)
    else:
        turns = [{"role": m.role, "content": m.content} for m in prompt.messages]
        text = tokenizer.render_chat(
            turns, prompt.template_kwargs, prompt.generation_prompt, prompt.continued
        )
        ids = tokenizer.encode(text, rendered=not wanted.add_special_tokens)
    return ids, tokenizer.names(ids) if wanted.return_token_strs else None


def _decode(tokenizer: Tokenizer, ids: list[int]) -> str:
    tokenizer.names(ids)  # which refuses what is no token's id
    return tokenizer.decode(ids, special=True)
