"""Frames, options, errors, pipe messages and stream states: the rules of Headrace, without I/O."""
