"""Runtime: the live driver and the processes around it: supervision, membership, KV event feeds, run folders."""
