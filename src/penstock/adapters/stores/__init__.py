"""Where processes find each other: files and memory."""
