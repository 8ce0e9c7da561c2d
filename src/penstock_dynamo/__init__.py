"""Dynamo companion: the policies and predictors of its planners, its virtual connector, its options translated."""
