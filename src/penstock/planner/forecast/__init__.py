"""Forecasts of demand: plain and classic predictors, and an ensemble with quantiles."""
