"""Incident files: paths, tables, writing and reading."""
