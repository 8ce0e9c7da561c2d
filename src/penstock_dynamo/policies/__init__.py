"""Policies of Dynamo's planners."""
