"""Planning: the planner live, with its observer, connectors, tick log, report and process."""
