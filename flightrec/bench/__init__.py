"""Measurements that users can run themselves."""
