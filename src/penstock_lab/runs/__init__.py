"""KV indexes of block runs, as a simulation has them; the indexes of single blocks are their oracle."""
