"""Admin routes: status, explain, fleet operations, settings, time series, planner, metrics, and the page."""
