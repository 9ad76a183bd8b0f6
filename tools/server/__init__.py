"""The HTTP server of `mlc-amd serve`. It offers an engine's answers through the APIs that clients of language models
use.

    request body -> one file per API (openai_chat.py, anthropic.py, ollama.py, ..) -> chat_request.py
      -> prompts.py, answering.py -> the engine -> events of chat_request.py -> the same file -> response body

The server computes no steps: a thread of each engine does (runtime/engine/step_loop.py). One event loop serves all
connections.
"""
