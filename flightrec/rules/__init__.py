"""Triggers evaluated on the device."""
