"""From a name to a model that is ready to run."""
