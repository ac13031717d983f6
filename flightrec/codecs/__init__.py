"""Raw components to numbers, in numpy."""
