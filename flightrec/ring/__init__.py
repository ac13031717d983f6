"""The ring buffer on the device: segments, slots, tickets."""
