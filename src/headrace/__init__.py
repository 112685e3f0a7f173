"""Headrace: a WebSocket streaming gateway for MLX language models."""

from importlib.metadata import version

__version__ = version("headrace")
