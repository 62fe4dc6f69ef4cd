"""Commands of the command line that are more than a call of one function."""
