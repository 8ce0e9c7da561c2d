"""Files and texts of ``penstock trace``."""
