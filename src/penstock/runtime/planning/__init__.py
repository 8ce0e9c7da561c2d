"""What a planner needs of the world around it: what it sees, whom it tells, and what it leaves behind."""
