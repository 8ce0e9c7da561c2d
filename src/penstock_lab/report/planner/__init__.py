"""Report on a planner's run: analysis, HTML page, CSV tables, schedule and dry run."""
