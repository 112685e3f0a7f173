"""Speculative prefill (arXiv 2502.02789): score a prompt, keep the best of it, fill a cache with that."""
