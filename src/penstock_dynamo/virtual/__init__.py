"""Dynamo's virtual connector: desired replicas as keys in an etcd."""
