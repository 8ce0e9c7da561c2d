"""Stores for discovery: files, memory and etcd."""
