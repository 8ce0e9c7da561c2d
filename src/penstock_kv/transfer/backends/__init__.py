"""Backends of the transfer library: each carries transfers between some kinds of memory, over some distance."""
