"""The YAML's models, loading and checking."""
