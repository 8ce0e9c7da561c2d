"""What will come? Predictors of demand, plain and classic, and an ensemble that says how sure it is."""
