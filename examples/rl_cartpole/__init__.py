"""CartPole with one agent and several observers: the tutorial of ``torch.distributed.rpc`` written as roles."""
