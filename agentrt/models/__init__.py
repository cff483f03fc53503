"""The model gateway: what answers ``model.generate``.

Pure: `settings` what is configured, `catalog` which model answers, `prices` tokens and money, `context` what of a long
conversation is sent, `schema` whether an answer is what was asked for, `failures` what went wrong, `sse` and `chat` the
OpenAI-compatible protocol. With I/O: `openai`, the provider for it, and `service`, which runs providers on a thread of
its own beside the control loop.
"""
