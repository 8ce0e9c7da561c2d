"""The live driver and what stands around it: supervision, membership, event feeds, run folders."""
