"""What random clients do over HTTP."""

from __future__ import annotations

import json

import httpx

from tests.soak_questions import EXPIRED, Asking


class OverHttp(Asking):
    """Each method is an action, which ends by itself."""

    async def post(self) -> None:
        prompt, settings, expected = self._question()
        reply = await self._http.post("/v1/completions", json={"prompt": prompt} | settings)
        if self._served(reply):
            [choice] = reply.json()["choices"]
            self._expect(choice["text"] == expected.text, f"HTTP {prompt!r}: {choice}")

    async def post_stream(self) -> None:
        prompt, settings, expected = self._question()
        body = {"prompt": prompt, "stream": True} | settings
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if not self._served(reply):
                return
            lines = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: ")]
        if lines[-1] != "[DONE]":
            self._expect("rate_limit_exceeded" in lines[-1], f"HTTP {prompt!r}: {lines[-1]}")
            return
        events = [json.loads(line) for line in lines[:-1]]
        text = "".join(c["text"] for event in events for c in event["choices"])
        self._expect(text == expected.text, f"HTTP {prompt!r}: {text!r}")

    async def post_late(self) -> None:
        """A deadline that most long answers miss: they are told so, and not as if complete."""
        body = {"prompt": "running out", "max_tokens": 400, "ignore_eos": True}
        body |= {"timeout": self._moment(), "stream": self._random.random() < 0.5}
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            status, text = reply.status_code, (await reply.aread()).decode()
        expired = "timeout_error" in text
        self.done[EXPIRED] += expired
        busy = "rate_limit_exceeded" in text
        whole = status == 200 and '"length"' in text
        good = status in (200, 504) if expired else busy or whole
        self._expect(good and not (expired and "[DONE]" in text), f"HTTP late: {status} {text!r}")

    async def hang_up(self) -> None:
        body = {"prompt": "hanging up", "stream": True, "max_tokens": 400, "ignore_eos": True}
        body |= {"n": self._random.randrange(1, 4)}
        async with self._http.stream("POST", "/v1/completions", json=body) as reply:
            if self._served(reply):
                lines = reply.aiter_lines()
                for _ in range(self._random.randrange(4)):
                    await anext(lines, None)

    async def bad_http(self) -> None:
        wrong: list[tuple[bytes, int]] = [
            (b"{", 400),
            (b'{"prompt": 5}', 400),
            (b'{"prompt": "x", "temperature": "hot"}', 400),
            (b'{"prompt": "x", "model": "other"}', 404),
            (b"[" * 5000, 400),
            (b" " * 10_000_000, 413),
        ]
        body, status = self._random.choice(wrong)
        headers = {"Content-Type": "application/json"}
        reply = await self._http.post("/v1/completions", content=body, headers=headers)
        self._expect(reply.status_code == status, f"{body[:30]!r}: {reply.status_code}")

    async def look(self) -> None:
        for path in ("/health", "/metrics", "/v1/models"):
            reply = await self._http.get(path)
            self._expect(reply.status_code == 200, f"{path}: {reply.status_code} {reply.text}")
        await self._client.status()

    def _served(self, reply: httpx.Response) -> bool:
        self._expect(reply.status_code in (200, 429), f"HTTP {reply.status_code}")
        return reply.status_code == 200
