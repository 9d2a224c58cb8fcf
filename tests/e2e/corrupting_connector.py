"""A connector that flips one byte of what it has staged: the control run of the token comparison."""
