"""The HTML page of an incident."""
