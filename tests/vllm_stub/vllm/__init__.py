"""The interfaces of vLLM that the plugin uses, without what is behind them: tests run the plugin against these.

``python tests/vllm_stub/check.py FOLDER...`` holds them to vLLM's own sources.
"""
