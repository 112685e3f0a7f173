"""Configuration of an engine. No mlx here: the command line builds this object in the gateway's process."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class SpecPrefillConfig:
    """Speculative prefill (arXiv 2502.02789): the server's defaults; a request may override the first three.

    Shares are of the uncached part of a prompt; lengths are in tokens.
    """

    enabled: bool = False
    """Whether requests that say nothing use it, if their prompt is longer than the threshold."""
    keep_pct: float = 0.3
    threshold: int = 8192
    draft_model: str = "self"
    """`self`: the target's own first layers; `none`: switched off; else a model's folder or hub name."""
    chunk_tokens: int = 8
    """Tokens are kept or dropped in runs of this length."""
    sink_tokens: int = 4
    """First tokens of a prompt, always kept."""
    tail_tokens: int = 24
    """Last tokens, always kept: the end of the question and the start of the answer."""
    keep_system_prompt: bool = False
    """Keep a chat's system prompt whole."""


@dataclass(frozen=True)
class EngineConfig:
    """One engine process: which model, and how it is run."""

    model: str | None = None
    """A folder, a hub name, or None: the default model."""
    name: str = "smollm2-135m-instruct"
    """What clients call the model."""
    kind: Literal["mlx", "scripted"] = "mlx"
    max_batch_size: int = 16
    """Requests that decode together."""
    max_prefills: int = 8
    """Requests whose prompts are being read at a time; the rest waits, so that half-read prompts are few."""
    chunk_target_ms: float = 200.0
    """How long a prefill chunk should take while others decode, in milliseconds."""
    min_chunk_tokens: int = 16
    max_chunk_tokens: int = 2048
    progress_interval_s: float = 0.5
    """How often a request without a token yet hears of its progress."""
    prompt_cache_bytes: int = 2 << 30
    """Memory for the prompts of earlier requests."""
    prompt_cache_entries: int = 64
    max_held_caches: int = 64
    """Paused requests whose caches are held; beyond, who has paused longest is read again when it goes on."""
    dequantize: bool = True
    """On a CPU: turn quantized and half-precision weights to float32 at load where memory allows."""
    trust_remote_code: bool = False
    log_format: Literal["text", "json"] = "text"
    """How the process writes its log to stderr."""
    specprefill: SpecPrefillConfig = field(default_factory=SpecPrefillConfig)
    scripted_token_delay_ms: float = 0.0
    """`scripted` only: how long a decode step takes."""
    scripted_prefill_tokens_per_s: float = 1e6
    """`scripted` only: how fast prompts are read."""
    scripted_load_s: float = 0.0
    """`scripted` only: how long loading takes."""
