"""Engines that are OpenAI-compatible servers: vLLM, SGLang, our own gateway, or one that runs."""
