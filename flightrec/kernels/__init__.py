"""Copy and statistics of one tensor."""
