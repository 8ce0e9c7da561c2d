"""Predictors of Dynamo's planners."""
