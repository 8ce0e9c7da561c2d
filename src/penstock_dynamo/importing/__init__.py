"""Translation of Dynamo's options into settings: readers, rules and the tables of its planners and frontend."""
