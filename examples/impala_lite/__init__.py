"""CartPole by IMPALA in small: a learner, actors that stream rollouts to it, and an evaluator."""
