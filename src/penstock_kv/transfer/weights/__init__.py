"""Weights of models over the TCP mover: what a checkpoint holds, its server and its fetch."""
