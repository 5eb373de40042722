"""Serving with vLLM, unmodified: the plugin, and all that it brings.

    versions.py   which vLLM, and the little that differs between its generations
    checks.py     what is refused before a server starts, and why
    plugin.py     the entry point that vLLM calls in each of its processes
    model.py      the decoder; attention.py its attentions, projections sharded over ranks
    backend.py    what a step is cut into; rows.py the cached row; paths.py the two ways to attend
    chat.py       a conversation with a server, in the terminal

Nothing here is imported by the rest of the package, and nothing imports vLLM before vLLM imports it.
"""
