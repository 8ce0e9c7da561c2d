"""The page on which every run is looked at: what it shows as structs, its browser files, and both as one HTML file."""
