"""The HTTP server of `mlc-amd serve`: an engine's answers over the APIs that clients of language models speak.

    request body -> one file per API (openai_chat.py, anthropic.py, ollama.py, ..) -> chat_request.py
      -> prompts.py, answering.py -> the engine -> events of chat_request.py -> the same file -> response body

Nothing here computes: a thread of each engine does (runtime/engine/step_loop.py). One event loop serves all
connections.
"""
