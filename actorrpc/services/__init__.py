"""The system actors and what they need: rendezvous, directory, executor, objects."""
