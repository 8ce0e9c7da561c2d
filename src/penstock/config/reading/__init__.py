"""From text to checked settings: YAML, environment and flags into a tree, the tree into structs."""
