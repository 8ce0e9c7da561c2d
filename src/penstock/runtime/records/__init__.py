"""Records on disk: run folders, segments of JSON lines, and journals of machines."""
