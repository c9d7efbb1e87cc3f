"""Agents that ask a language model, through any OpenAI-compatible API. Off unless a run names a model.

What the model returns is untrusted, as every candidate is: it is checked here so that a wrong answer costs little, and
runs in the sandbox alone. What it is shown of posts and sources was written by others and is given to it as data.
"""
