"""The kernel: worker, threads, mailboxes, pending calls, membership. It carries envelopes to actors."""
