"""What a person reads: terminal tables."""
