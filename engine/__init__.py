"""The engine: the only folder that imports mlx."""
