"""A network whose two halves are on two workers, trained in micro-batches."""
