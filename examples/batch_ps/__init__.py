"""A parameter server that answers many trainers at once."""
