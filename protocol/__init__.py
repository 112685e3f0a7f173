"""Frames, options, errors, pipe messages and stream states: the rules of Headrace, without I/O.

Sans-I/O: no sockets, no asyncio, no clock, no mlx. PROTOCOL.md is the specification that this folder applies.
"""
