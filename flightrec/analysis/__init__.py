"""What went wrong first."""
