"""Log probabilities in the two forms of the API."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from ipc.messages.client import TokenLogprob
from procs.http.responses import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    TopLogprob,
)


def chat_logprobs(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    """One entry per token; the alternatives are as many as were asked for."""
    return ChatLogprobs(
        content=[
            ChatTokenLogprob(
                token=_shown(entry.data),
                logprob=entry.logprob,
                bytes=list(entry.data),
                top_logprobs=[
                    TopLogprob(token=_shown(a.data), logprob=a.logprob, bytes=list(a.data))
                    for a in entry.top
                ],
            )
            for entry in entries
        ]
    )


class CompletionLogprobWriter:
    """One answer's log probabilities, piece by piece, with each token's place in the text."""

    def __init__(self) -> None:
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """The next tokens. A token within a character has the place where the character begins."""
        written = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for entry in entries:
            token = _unique(entry.data)
            written.tokens.append(token)
            written.token_logprobs.append(entry.logprob)
            written.top_logprobs.append(
                {_unique(a.data): a.logprob for a in entry.top} | {token: entry.logprob}
            )
            written.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(entry.data))
        return written


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _unique(data: bytes) -> str:
    """The token's text, or its bytes as OpenAI writes them when they are no whole characters."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
